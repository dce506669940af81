"""Damaged and made-up checkpoints: whatever a field holds, one error names the file and the field.

Every field of a valid file is changed in every way of `VALUES`; what is no error then is listed.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattn.models import gpt2
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training import metrics
from fastattn.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from fastattn.training.convert import export_hf, import_hf, import_nanogpt
from fastattn.training.distributed import ranks as ranks_module
from fastattn.training.run import Options, train
from fastattn.training.tasks import sources
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig

pytestmark = pytest.mark.usefixtures("on_torch", "one_thread")

CONFIG = GPTConfig(vocab_size=3, context_length=4, num_layers=1, num_heads=1, embed_dim=8)
MISSING = object()


def nested() -> Any:
    value: Any = []
    for _ in range(50):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "text": "x",
    "fraction": 0.5,
    "negative": -1,
    "huge": 10**30,
    "many": 10**9,
    "nan": math.nan,
    "list": [],
    "object": {},
    "nested": nested(),
    "true": True,
}


def places(fields: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def changed(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    inside = fields
    for name in path[:-1]:
        inside = inside[name]
    if value is MISSING:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return fields


def harmless(use, path: Path, *, below: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The changes of a JSON file that `use` accepts, by field, of those fields that are below one.

    For every other change it must raise an error that names the file's folder and the field.
    """
    fields = json.loads(path.read_text())
    results: dict[str, set[str]] = {}
    for place in places(fields):
        for change, value in VALUES.items() if place[: len(below)] == below else ():
            path.write_text(json.dumps(changed(fields, place, value)))
            try:
                use()
            except (CheckpointError, gpt2.UnsupportedModelError) as error:
                text = str(error)
                assert str(path.parent) in text, (place, change, text)
                # A size that is possible, and not that of the weights, is told by a weight's name.
                other = ("another configuration", "another text", "the weights have", "has no x;")
                assert place[-1] in text or any(words in text for words in other), (place, text)
            else:
                results.setdefault(".".join(place), set()).add(change)
    path.write_text(json.dumps(fields))
    return results


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, one_thread) -> Path:
    """The folder of a run that was stopped after its first step, and of its text."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 20)
    options = Options(
        model={"num_layers": 1, "num_heads": 1, "embed_dim": 8, "context_length": 4},
        training={"steps": 3, "batch_size": 1, "device": "cpu", "eval_interval": 9},
        data={"text": (str(folder / "text.txt"),)},
    )
    requested = iter([False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        train(options, folder / "run", should_stop=lambda: next(requested))
    return folder / "run"


@pytest.fixture
def run(stopped, tmp_path, monkeypatch) -> Path:
    """The manifest of a copy of the run; going on writes nothing."""
    shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.setattr(sources.texts, "standard_library_text", lambda: "no text\n" * 50)
    monkeypatch.setattr(metrics, "draw_loss_curve", lambda records, path: None)
    monkeypatch.setattr(ranks_module, "save_checkpoint", lambda out_dir, checkpoint: out_dir)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    return tmp_path / "run" / "step-00000001" / "checkpoint.json"


def sets(**changes: str) -> dict[str, set[str]]:
    return {name: set(text.split()) for name, text in changes.items()}


def test_every_field_of_a_model(run):
    """Absent fields have their defaults; the others are numbers in range, and choices."""
    faults = harmless(lambda: load_model(run.parent), run, below=("config", "model"))
    faults = {name.removeprefix("config.model."): changes for name, changes in faults.items()}
    needed = {"num_layers", "embed_dim", "vocab_size", "context_length"}
    optional = {field.name for field in dataclasses.fields(GPTConfig)} - needed
    assert {name for name, changes in faults.items() if "missing" in changes} == optional
    left = {name: changes - {"missing"} for name, changes in faults.items()}
    assert {name: changes for name, changes in left.items() if changes} == sets(
        num_kv_heads="null",
        kv_latent_dim="null",
        output_gate="null",
        v_head_dim="null",
        window="null many",
        stride="null",
        sparse="null",
        hidden_dim="null",
        softcap="null fraction many huge",
        rotary_base="fraction many huge",
        norm_eps="fraction many huge",
        relative_distance="many",
        dropout="fraction",
        attention_dropout="fraction",
        label_smoothing="fraction",
        tie_weights="true",
        batch_invariant="true",
    )


def test_every_other_field_of_a_manifest(run):
    results = {}
    for part in ("format", "version", "step", "files", "state"):
        results |= harmless(lambda: load_checkpoint(run.parent), run, below=(part,))
    assert results == {
        "step": {"many"},
        "state": {"object"},
        "state.finished": {"missing", "true"},
        "state.validation_loss": {"missing", "null", "fraction", "negative", "many", "huge"},
        "state.loss_count": {"missing", "many"},
        "state.scaler": {"missing", "object"},
    }


def test_every_field_that_a_run_goes_on_with(run):
    def resume() -> None:
        train(Options(), run.parent.parent, resume=True, should_stop=lambda: True)

    results = harmless(resume, run, below=("config", "training"))
    results = {name.rpartition(".")[2]: changes for name, changes in results.items()}
    assert results.pop("training") == {"missing", "object"}
    assert results.keys() == {field.name for field in dataclasses.fields(TrainConfig)}
    assert all("missing" in changes for changes in results.values())
    left = {name: changes - {"missing", "many"} for name, changes in results.items()}
    assert {name: changes for name, changes in left.items() if changes} == sets(
        learning_rate="fraction huge",
        min_learning_rate="null",
        warmup_steps="null",
        weight_decay="fraction huge",
        beta1="fraction",
        beta2="fraction",
        grad_clip="fraction huge",
        compile="true",
        save_in_background="true",
    )
    results = harmless(resume, run, below=("config", "data"))
    assert {name.rpartition(".")[2]: changes for name, changes in results.items()} == sets(
        tokenizer="missing text",
        vocab_size="missing many negative",
        prepared="missing null",
    )
    results = harmless(resume, run, below=("state",))
    assert "missing" not in results["state.finished"]


def test_no_name_leads_out_of_the_folder(run, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((run.parent / "model.safetensors").read_bytes())
    fields = json.loads(run.read_text())
    theirs = tmp_path / "hf"
    save_gpt2(theirs)
    outside = "../model.safetensors", "/etc/hostname", "..\\model.safetensors", "C:model"
    for name in (*outside, "a/b", "", ".."):
        entry = fields["files"]["model.safetensors"]
        run.write_text(json.dumps({**fields, "files": {**fields["files"], name: entry}}))
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is corrupt: files names "):
            load_checkpoint(run.parent)
        index = {"weight_map": {"x": name}}
        (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="names a file of another folder"):
            import_hf(theirs, tmp_path / "imported")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "checkpoint.json"])
def test_no_link_leads_out_of_the_folder(name, run, tmp_path):
    path = run.parent / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link to a file of another folder"):
        load_checkpoint(run.parent)
    path.unlink()
    (tmp_path / name).rename(run.parent / "elsewhere")
    path.symlink_to("elsewhere")
    load_checkpoint(run.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is no file"):
        load_checkpoint(run.parent)


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    save_gpt2(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    load_model(import_hf(snapshot, tmp_path / "run"))
    other = tmp_path / "plain"
    (tmp_path / "snapshots").rename(other)
    with pytest.raises(CheckpointError, match="is a link to a file of another folder"):
        import_hf(other / "1234", tmp_path / "again")


def test_contents_of_the_right_digest_and_no_sense_are_named(run):
    fields = json.loads(run.read_text())
    for name in ("model.safetensors", "training.safetensors", "tokenizer.json"):
        whole = (run.parent / name).read_bytes()
        for content in (b"", b"\xff" * 40, b"[" * 100_000, b'{"model": 3}'):
            (run.parent / name).write_bytes(content)
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            run.write_text(json.dumps({**fields, "files": {**fields["files"], name: entry}}))
            with pytest.raises(CheckpointError, match=rf"step-00000001.*{name}"):
                load_checkpoint(run.parent)
        (run.parent / name).write_bytes(whole)


def test_json_that_is_no_object_is_named(run, tmp_path):
    config = tmp_path / "hf" / "config.json"
    save_gpt2(config.parent)
    for content in (b"[" * 100_000, b"\xff", b"3", b"9" * 5000):
        run.write_bytes(content)
        config.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
            load_checkpoint(run.parent)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            import_hf(config.parent, tmp_path / "x")


@pytest.mark.parametrize("name", ["random.cpu", "random.batches", "loss_sum", "optimizer.norm"])
def test_a_state_of_the_wrong_shape_is_named(name, run):
    checkpoint = load_checkpoint(run.parent)
    training = {
        key: torch.zeros(7) if key.startswith(name) else tensor
        for key, tensor in checkpoint.training.items()
    }
    broken = dataclasses.replace(checkpoint, training=training)
    save_checkpoint(run.parents[2] / "broken", broken)
    with pytest.raises(CheckpointError, match="step-00000001 has an unusable state"):
        train(Options(), run.parents[2] / "broken", resume=True)


def save_gpt2(folder: Path) -> None:
    """A GPT-2 of `CONFIG`'s size as transformers saves it."""
    config = dataclasses.replace(CONFIG, bias=True)
    model, tokenizer = GPT(config).state_dict(), CharacterTokenizer("abc")
    run = folder.with_name("own")
    save_checkpoint(run, Checkpoint(0, model, {}, tokenizer, {"model": config.to_dict()}, {}))
    export_hf(run, folder)


def test_every_field_of_gpt2s_configuration(tmp_path):
    folder = tmp_path / "hf"
    save_gpt2(folder)
    runs = (tmp_path / f"run-{i}" for i in itertools.count())
    actual = harmless(lambda: import_hf(folder, next(runs)), folder / "config.json")
    ignored = {name: set(VALUES) for name in ("architectures", "bos_token_id", "eos_token_id")}
    assert {name: changes for name, changes in actual.items() if changes != {"missing"}} == {
        **ignored,
        **sets(n_inner="missing null", attn_pdrop="missing fraction"),
        "tie_word_embeddings": {"missing", "true"},
        "scale_attn_weights": {"missing", "true"},
    }
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "model.safetensors"}}))
    assert harmless(lambda: import_hf(folder, next(runs)), index) == {}


def test_every_field_of_nanogpts_arguments(tmp_path):
    config = {"vocab_size": 3, "block_size": 4, "n_layer": 1, "n_head": 1, "n_embd": 8}
    fields = {**config, "dropout": 0.0, "bias": False}
    (tmp_path / "abc.txt").write_text("abc")
    for place in places(fields):
        for change, value in VALUES.items():
            torch.save({"model": {}, "model_args": changed(fields, place, value)}, tmp_path / "pt")
            with pytest.raises((CheckpointError, gpt2.UnsupportedModelError)) as error:
                import_nanogpt(tmp_path / "pt", tmp_path / "run", text=tmp_path / "abc.txt")
            text = str(error.value)
            assert str(tmp_path / "pt") in text, (place, change, text)
            assert place[0] in text or "the weights have no" in text, (place, change, text)
