"""Checkpoints: what is written is read back, and neither a kill nor a full disk breaks the last."""

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from file_faults import arm, fork, status_of
from gloo_ranks import run_alone

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    load_trained,
    save_checkpoint,
)
from fastattn.training.tokenizers import CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CONFIG = GPTConfig(vocab_size=3, context_length=4, num_layers=1, num_heads=1, embed_dim=8)


def make_checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint(
        step=step,
        model=GPT(CONFIG).state_dict(),
        tokenizer=CharacterTokenizer("abc"),
        config={"kind": "gpt", "model": CONFIG.to_dict(), "training": {"steps": 9}},
        training={"moments": torch.full((5,), float(step)), "loss": (1.5, 2)},
    )


def test_what_is_saved_is_loaded_and_runs_no_code(tmp_path):
    expected = make_checkpoint(7)
    folder = save_checkpoint(tmp_path / "run", expected)
    assert folder == tmp_path / "run" / "step-00000007"
    assert sorted(x.name for x in folder.iterdir()) == ["model.safetensors", "training.pt"]
    for path in (tmp_path / "run", folder):
        actual = load_checkpoint(path)
        assert actual.model.keys() == expected.model.keys()
        assert all(torch.equal(x, expected.model[name]) for name, x in actual.model.items())
        assert torch.equal(actual.training["moments"], expected.training["moments"])
        assert actual.training["loss"] == (1.5, 2)
        assert actual.tokenizer.to_json() == expected.tokenizer.to_json()
        assert (actual.step, actual.config) == (7, expected.config)
        assert load_checkpoint(path, training=False).training == {}
    model, tokenizer = load_model(folder)
    assert model.config == CONFIG and not model.training
    assert tokenizer.encode("cab") == [2, 0, 1]
    for step in (7, 3):  # of another run: neither goes unwritten in silence
        with pytest.raises(CheckpointError, match="run holds step-00000007 already"):
            save_checkpoint(tmp_path / "run", make_checkpoint(step))
    save_checkpoint(tmp_path, dataclasses.replace(expected, training={"code": print}))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_checkpoint(tmp_path)


def test_parts_that_do_not_belong_together_are_named(tmp_path):
    whole = make_checkpoint(1)
    small = {**CONFIG.to_dict(), "embed_dim": 4}
    huge = {**CONFIG.to_dict(), "embed_dim": 2**40}
    for change, message in (
        ({"tokenizer": CharacterTokenizer("abcd")}, "does not belong to it: of 4 ids, its model's"),
        ({"config": {"kind": "gpt", "model": small}}, "a different configuration: .* shape"),
        ({"config": {"kind": "gpt", "model": huge}}, "no usable configuration|another configura"),
        ({"config": {"kind": "gpt", "model": {"depth": 1}}}, "no usable model config: .*'depth'"),
        ({"config": {"kind": "mamba"}}, "of kind 'mamba', this fastattn has gpt"),
    ):
        run = tmp_path / message[:9]
        save_checkpoint(run, dataclasses.replace(whole, **change))
        with pytest.raises(CheckpointError, match=message):
            load_trained(run)
        shutil.rmtree(run)
    older = tmp_path / "older" / "step-00000001"
    older.mkdir(parents=True)
    (older / "checkpoint.json").touch()
    with pytest.raises(CheckpointError, match="written by an earlier fastattn: export it there"):
        load_checkpoint(older.parent)


def test_the_highest_step_is_the_newest(tmp_path):
    for step in (99_999_999, 100_000_000, 9):
        checkpoint_path(tmp_path, step).mkdir()
    (tmp_path / ".writing-step-200000000").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100000000"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"no checkpoint in {path}"):
            find_checkpoint(path)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_a_damaged_file_is_named(name, tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(1)) / name
    content = path.read_bytes()
    moments = content.find(torch.full((5,), 1.0).numpy().tobytes())
    place = moments if name == "training.pt" else len(content) - 3  # in a tensor
    changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    for damaged in (b"", content[: len(content) // 2], changed, None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(tmp_path)
        assert str(path) in str(error.value)


WRITTEN, REFUSED, UNFLUSHED, WRONG = 0, 11, 12, 13


def save_again(run: Path, mode: str, n: int) -> int:
    """Save step 2 over step 1, with a fault at the n-th file operation."""
    second = make_checkpoint(2)
    arm(n, mode)
    try:
        save_checkpoint(run, second)
    except CheckpointError as error:
        text = str(error)
        if "No space left on device; " in text and "step-00000001 is kept" in text:
            return REFUSED
        return UNFLUSHED if "may not survive a power cut: No space" in text else WRONG
    return WRITTEN


def faults(folder: str, count: int) -> list[tuple[str, int, int, list[str]]]:
    """Saves with a fault in a forked process: mode, exit status, the step that is left."""
    outcomes = []
    for mode in ("kill", "fail"):
        for n in range(1, count + 1):
            run = Path(folder) / f"{mode}-{n}"
            save_checkpoint(run, make_checkpoint(1))
            status = status_of(fork(lambda run=run, mode=mode, n=n: save_again(run, mode, n)))
            left = load_checkpoint(run).step
            save_checkpoint(run, make_checkpoint(3))
            outcomes.append((mode, status, left, os.listdir(run)))
    return outcomes


def test_a_kill_or_an_error_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    count = 40
    reports = run_alone(f"{__file__}:faults", folder=str(tmp_path), count=count)
    killed = [(status, left) for mode, status, left, _ in reports if mode == "kill"]
    failed = [(status, left) for mode, status, left, _ in reports if mode == "fail"]
    assert len(killed) == len(failed) == count
    # Every operation of a save was met, and those after the rename found the new checkpoint.
    operations = killed.index((WRITTEN, 2))
    assert operations > 15
    assert {status for status, _ in killed[:operations]} == {-9}
    assert set(killed[operations:]) == {(WRITTEN, 2)}
    renamed = killed.index((-9, 2))
    assert renamed > 10
    assert killed[:renamed] == [(-9, 1)] * renamed
    # An error is either told, with what is kept, or only keeps old files from being removed.
    assert set(failed[:renamed]) <= {(REFUSED, 1), (WRITTEN, 2)}
    assert failed.count((REFUSED, 1)) > 10
    assert set(failed[renamed:operations]) == {(UNFLUSHED, 2), (WRITTEN, 2)}
    for report in reports:
        assert report[-1] == ["step-00000003"], report
