"""Checkpoints: what is written is read back, and neither a kill nor a full disk breaks the last."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from fastattn.training.storage.folder import checkpoint_path, write
from fastattn.training.tokenizers import CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CONFIG = GPTConfig(vocab_size=3, context_length=4, num_layers=1, num_heads=1, embed_dim=8)


def make_checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint(
        step=step,
        model=GPT(CONFIG).state_dict(),
        training={"moments": torch.full((5,), float(step)), "random": torch.get_rng_state()},
        tokenizer=CharacterTokenizer("abc"),
        config={"model": CONFIG.to_dict(), "training": {"steps": 9}},
        state={"finished": False},
    )


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    for got, want in ((found.model, expected.model), (found.training, expected.training)):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert all(got[name].dtype == want[name].dtype for name in want)
    assert found.tokenizer.to_json() == expected.tokenizer.to_json()
    assert (found.step, found.config, found.state) == (
        expected.step,
        expected.config,
        expected.state,
    )


def test_what_is_saved_is_loaded(tmp_path):
    expected = make_checkpoint(7)
    folder = save_checkpoint(tmp_path / "run", expected)
    assert folder == tmp_path / "run" / "step-00000007"
    assert_same(load_checkpoint(tmp_path / "run"), expected)
    assert_same(load_checkpoint(folder), expected)


def test_there_is_no_pickle(tmp_path):
    folder = save_checkpoint(tmp_path, make_checkpoint(1))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "checkpoint.json",
        "model.safetensors",
        "tokenizer.json",
        "training.safetensors",
    ]
    for name in names:
        content = (folder / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        json.loads(content if name.endswith(".json") else content[8 : 8 + length])


def test_the_newest_checkpoint_replaces_the_others(tmp_path):
    for step in (5, 123_456_789, 10):
        save_checkpoint(tmp_path, make_checkpoint(step))
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}"]


def test_the_highest_step_is_the_newest(tmp_path):
    for step in (99_999_999, 100_000_000, 9):
        save_checkpoint(tmp_path / str(step), make_checkpoint(step))
        (tmp_path / str(step) / f"step-{step:08d}").rename(tmp_path / f"step-{step:08d}")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step-100000000"


def test_the_same_step_is_written_once(tmp_path):
    folder = save_checkpoint(tmp_path, make_checkpoint(1))
    before = (folder / "checkpoint.json").stat()
    assert save_checkpoint(tmp_path, make_checkpoint(1)) == folder
    after = (folder / "checkpoint.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_model_is_built_from_its_checkpoint(tmp_path):
    expected = make_checkpoint(3)
    save_checkpoint(tmp_path, expected)
    model, tokenizer = load_model(tmp_path)
    assert model.config == CONFIG
    assert not model.training
    assert tokenizer.encode("cab") == [2, 0, 1]
    assert all(torch.equal(x, expected.model[name]) for name, x in model.state_dict().items())


def test_a_checkpoint_of_another_configuration_is_named(tmp_path):
    saved = make_checkpoint(1)
    wider = {**CONFIG.to_dict(), "embed_dim": 16}
    save_checkpoint(tmp_path / "wide", Checkpoint(**{**vars(saved), "config": {"model": wider}}))
    with pytest.raises(CheckpointError, match=r"another configuration: .* has shape .*8"):
        load_model(tmp_path / "wide")
    wrong = {**CONFIG.to_dict(), "embed_dim": 0}
    save_checkpoint(tmp_path / "wrong", Checkpoint(**{**vars(saved), "config": {"model": wrong}}))
    with pytest.raises(CheckpointError, match="no usable model config: embed_dim must be"):
        load_model(tmp_path / "wrong")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training.safetensors", "tokenizer.json", "checkpoint.json"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "changed"])
def test_a_damaged_file_is_named(name, damage, tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(1)) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    assert str(path) in str(error.value)


def test_a_foreign_index_is_named(tmp_path):
    folder = save_checkpoint(tmp_path, make_checkpoint(1))
    path = folder / "checkpoint.json"
    index = json.loads(path.read_text())
    for changes, message in (
        ({"format": "other"}, "is not a checkpoint of fastattn"),
        ({"version": 3}, "has format version 3, this fastattn reads 1 and 2"),
        ({"step": None}, "is corrupt: it has no 'step'"),
        ({"files": {}}, "has no entry 'model.safetensors'"),
    ):
        changed = {k: v for k, v in {**index, **changes}.items() if v is not None}
        path.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path)


def test_a_folder_without_checkpoint_is_named(tmp_path):
    (tmp_path / ".writing-step-00000004").mkdir()
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"no checkpoint in {path}"):
            find_checkpoint(path)


def test_a_checkpoint_that_another_run_has_written_is_named(tmp_path):
    """Meanwhile, where no lock keeps two runs apart; it is no fault of the disk."""

    def contents() -> dict[str, bytes]:
        (checkpoint_path(tmp_path, 1) / "theirs").mkdir(parents=True)
        return {"ours": b""}

    with pytest.raises(CheckpointError, match="another run has written checkpoint"):
        write(tmp_path, 1, contents)
    assert [path.name for path in tmp_path.rglob("*")] == ["step-00000001", "theirs"]


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left on device; there is no earlier"):
            save_checkpoint(tmp_path, make_checkpoint(1))
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path, make_checkpoint(1))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; .*step-00000001 is kept"):
        save_checkpoint(tmp_path, make_checkpoint(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# Saves step 2 over step 1 again and again, each time in a forked child that is killed or gets an
# error at its n-th file operation, and reports what is left as JSON lines. Audit events come before
# their operation; fsync, which has none, is replaced.
FAULTS = """
import errno, json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import make_checkpoint
from fastattn.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
WRITTEN, REFUSED, UNFLUSHED, WRONG = 0, 1, 2, 3
folder = Path(sys.argv[2])
checkpoints = {step: make_checkpoint(step) for step in (1, 2, 3)}
os.fsync = lambda descriptor: None
save_checkpoint(folder / "warm-up", checkpoints[1])
load_checkpoint(folder / "warm-up")


def arm(mode, n):
    count = 0

    def operation():
        nonlocal count
        count += 1
        if count == n and mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = lambda descriptor: operation()
    sys.addaudithook(lambda event, args: operation() if event in EVENTS else None)


def save_in_child(run):
    try:
        save_checkpoint(run, checkpoints[2])
    except CheckpointError as error:
        text = str(error)
        if "No space left on device; " in text and "step-00000001 is kept" in text:
            return REFUSED
        return UNFLUSHED if "may not survive a power cut: No space" in text else WRONG
    except BaseException:
        return WRONG
    return WRITTEN


for mode in ("kill", "fail"):
    for n in range(1, int(sys.argv[3]) + 1):
        run = folder / f"{mode}-{n}"
        save_checkpoint(run, checkpoints[1])
        pid = os.fork()
        if pid == 0:
            arm(mode, n)
            os._exit(save_in_child(run))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left = load_checkpoint(run).step
        save_checkpoint(run, checkpoints[3])
        sys.stdout.write(json.dumps([mode, n, status, left, os.listdir(run)]) + "\\n")
"""


def test_a_kill_or_an_error_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    count = 40
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(Path(__file__).parent), str(tmp_path), str(count)],
        env={**os.environ, "FASTATTN_BACKEND": "torch"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [(status, left) for mode, _, status, left, _ in reports if mode == "kill"]
    failed = [(status, left) for mode, _, status, left, _ in reports if mode == "fail"]
    assert len(killed) == len(failed) == count
    # Every operation of a save was met, and those after the rename found the new checkpoint.
    operations = killed.index((0, 2))
    assert operations > 15
    assert {status for status, _ in killed[:operations]} == {-9}
    assert set(killed[operations:]) == {(0, 2)}
    renamed = killed.index((-9, 2))
    assert renamed > 10
    assert killed[:renamed] == [(-9, 1)] * renamed
    # An error is either told, with what is kept, or only keeps old files from being removed.
    written, refused, unflushed = (0, 2), (1, 1), (2, 2)
    assert set(failed[:renamed]) <= {refused, written}
    assert failed.count(refused) > 10
    assert set(failed[renamed:operations]) == {unflushed, written}
    for report in reports:
        assert report[-1] == ["step-00000003"], report


def test_a_kill_in_the_middle_of_a_file_leaves_the_checkpoint_before(tmp_path):
    save_checkpoint(tmp_path, make_checkpoint(1))
    folder = save_checkpoint(tmp_path / "other", make_checkpoint(2))
    half = tmp_path / ".writing-step-00000002"
    shutil.copytree(folder, half)
    (half / "checkpoint.json").unlink()
    (half / "model.safetensors").write_bytes(b"\x10")
    assert_same(load_checkpoint(tmp_path), make_checkpoint(1))
    save_checkpoint(tmp_path, make_checkpoint(2))
    assert_same(load_checkpoint(tmp_path), make_checkpoint(2))
    assert not half.exists()
