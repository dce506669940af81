"""The training loop: evaluation, resume, what is left of a run; its steps: test_plain_loop.py."""

import dataclasses
import itertools
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nightly import gate_cases

from fastattn.files.text import DataError
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint
from fastattn.training.data.text import TextDataset
from fastattn.training.metrics import (
    Progress,
    append_metrics,
    draw_loss_curve,
    read_metrics,
)
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer, TrainingError

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12
TINY = {"context_length": 16, "num_layers": 1, "num_heads": 2, "embed_dim": 16}
QUICK = {"steps": 12, "batch_size": 3, "eval_interval": 5, "eval_batches": 2, "log_interval": 3}


def make_trainer(out: Path, *, text=TEXT, model=(), resume=False, **changes):
    """A trainer of a tiny model; `changes` are fields of TrainConfig."""
    keywords = {}
    for name in ("progress", "resume_from", "kind"):
        if name in changes:
            keywords[name] = changes.pop(name)
    config = TrainConfig(**{**QUICK, **changes})
    tokenizer = CharacterTokenizer(text)
    torch.manual_seed(config.seed)
    gpt = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **{**TINY, **dict(model)}))
    dataset = TextDataset.from_text(text, tokenizer, gpt.config.context_length)
    if resume:
        keywords["resume_from"] = load_checkpoint(out)
    return Trainer(gpt, dataset, tokenizer, config, out, **keywords)


@pytest.mark.parametrize("package", ["safetensors", "matplotlib"])
def test_a_missing_package_is_named_before_the_first_step(tmp_path, monkeypatch, package):
    trainer = make_trainer(tmp_path / "run")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs the package {package}"):
        trainer.run()
    assert not (tmp_path / "run").exists()


def without_usage(records):
    apart = ("tokens_per_second", "peak_mib")
    return [{k: v for k, v in record.items() if k not in apart} for record in records]


def assert_same_end(first: Path, second: Path) -> None:
    """Two runs' folders hold the same checkpoint bit for bit, and the same metrics."""
    one, other = latest_checkpoint(first), latest_checkpoint(second)
    assert one is not None
    assert other is not None
    assert one.name == other.name
    ends = [load_checkpoint(path) for path in (one, other)]
    assert all(torch.equal(x, ends[1].model[name]) for name, x in ends[0].model.items())
    assert ends[0].config == ends[1].config
    states = [(x.training["loss"], x.training["optimizer"]["state"]) for x in ends]
    assert repr(states[0]) == repr(states[1])
    assert without_usage(read_metrics(first)) == without_usage(read_metrics(second))


def test_validation_loss_is_the_mean_over_every_token(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.double()
    tokens = trainer.task._text.validation.long()
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            part = tokens[start : start + 17]
            logits, _ = trainer.model(part[None, :-1])
            losses.append(F.cross_entropy(logits[0], part[1:], reduction="none"))
    expected = torch.cat(losses)
    assert len(expected) == len(tokens) - 1
    assert trainer.validation_loss() == pytest.approx(float(expected.mean()), rel=1e-12)


def test_estimates_use_the_same_batches_and_leave_training_alone(tmp_path):
    trainer = make_trainer(tmp_path, model={"dropout": 0.1})
    state = torch.get_rng_state()
    assert trainer.estimate_loss() == trainer.estimate_loss()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stop_at", gate_cases([5], [1, 8]))
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(stop_at, tmp_path):
    options = {"model": {"dropout": 0.2}, "accumulation": 2, "device": "cpu"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = make_trainer(whole, **options)
    with torch.device("meta"):
        uninterrupted.run()
    stopped = make_trainer(parts, **options)
    result = stopped.run(lambda: stopped.step == stop_at)
    assert (result.step, result.finished, result.validation_loss) == (stop_at, False, None)
    torch.rand(3)
    resumed = make_trainer(parts, resume=True, **options)
    with torch.device("meta"):
        assert resumed.run().finished
    assert_same_end(whole, parts)


def test_every_step_and_rank_draws_for_itself(tmp_path, monkeypatch):
    """Batches by the step, dropout by step and rank; all ranks draw the same batches."""
    seen = []
    for rank in range(2):
        trainer = make_trainer(tmp_path)
        trainer.ranks.rank, draw = rank, trainer.task.draw

        def spy(*args, draw=draw):
            batch = draw(*args)
            seen.append((tuple(batch.inputs[0].flatten().tolist()), torch.initial_seed()))
            return batch

        monkeypatch.setattr(trainer.task, "draw", spy)
        for _ in range(6):
            trainer._train_step()
    batches, seeds = zip(*seen, strict=True)
    assert batches[:6] == batches[6:] and len(set(batches)) == 6
    assert len(set(seeds)) == 12


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path):
    class Killed(Progress):
        def advance(self, step, *, loss, **figures):
            if step == 9:
                raise KeyboardInterrupt

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make_trainer(whole, checkpoint_interval=4).run()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(parts, checkpoint_interval=4, progress=Killed()).run()
    assert load_checkpoint(parts).step == 8
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a line that was cut short is left out
    make_trainer(parts, checkpoint_interval=4, resume=True).run()
    assert_same_end(whole, parts)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_trainer(tmp_path).run(lambda: True)
    with pytest.raises(CheckpointError, match="has a different configuration"):
        make_trainer(tmp_path, resume=True, model={"embed_dim": 32})
    saved = load_checkpoint(tmp_path)
    for change in ({"optimizer": {}}, {"loss": 3}, {"scaler": None, "optimizer": [1]}):
        lacking = dataclasses.replace(saved, training={**saved.training, **change})
        with pytest.raises(CheckpointError, match="step-00000000 has an unusable state"):
            make_trainer(tmp_path, resume_from=lacking)


@pytest.mark.parametrize(("kind", "error"), [("none", ValueError), ("masked", TypeError)])
def test_a_kind_that_no_checkpoint_could_be_read_by_is_refused(kind, error, tmp_path):
    with pytest.raises(error, match=f"kind .*got {'fastattn' if kind == 'masked' else repr(kind)}"):
        make_trainer(tmp_path, kind=kind)


def test_compile_wraps_the_training_step_alone(tmp_path, monkeypatch):
    calls = []

    def compile_model(model):
        return lambda *args: calls.append(1) or model(*args)

    monkeypatch.setattr(torch, "compile", compile_model)
    make_trainer(tmp_path / "compiled", compile=True).run()
    make_trainer(tmp_path / "plain").run()
    assert len(calls) == 12
    compiled, plain = (load_checkpoint(tmp_path / name).model for name in ("compiled", "plain"))
    assert compiled.keys() == plain.keys()
    assert all(torch.equal(compiled[name], plain[name]) for name in plain)


RARE = {"log_interval": 100, "checkpoint_interval": 4}


@pytest.mark.parametrize(
    ("value", "at", "changes", "message"),
    [
        (math.nan, 1, {}, "training loss is nan at step 3"),
        (math.nan, 1, RARE, "training loss is nan at step 4"),
        (math.nan, 8, RARE, "largest weight is nan at step 8"),
        (1e30, 8, {**RARE, "grad_clip": 0.0}, "largest moment is inf at step 8"),
        (math.nan, 12, RARE, "validation loss is nan at step 12"),
    ],
)
def test_what_is_not_finite_ends_the_run_and_is_not_written(value, at, changes, message, tmp_path):
    trainer, count = make_trainer(tmp_path, **changes), itertools.count(1)
    weight = trainer.model.norm.weight
    weight.register_hook(lambda g: g.fill_(value) if next(count) == at else g)
    with pytest.raises(TrainingError, match=message):
        trainer.run()
    left = load_checkpoint(tmp_path)
    assert all(x.isfinite().all() for x in left.model.values())
    assert not re.search("nan|inf", repr(left.training))
    assert left.step == (0 if at == 1 else (at - 1) // 4 * 4)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("apart", ["all", "a remainder"])
def test_batches_without_targets_have_no_loss(apart, tmp_path, monkeypatch):
    """Where each token is a document of its own."""
    windows, trainer = TextDataset.windows, make_trainer(tmp_path)

    def with_documents(self, starts, length):
        ids, _ = windows(self, starts, length)
        alone = apart == "all" or length <= TINY["context_length"]
        return ids, torch.arange(length).expand_as(ids) * alone

    monkeypatch.setattr(TextDataset, "windows", with_documents)
    if apart == "all":
        with pytest.raises(DataError, match="the validation split must have targets"):
            trainer.run()
        assert all(x.isfinite().all() for x in trainer.model.parameters())
    else:
        assert trainer.run().finished


def test_a_folder_is_of_one_run_alone(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept" / "step-00000003"
    first = make_trainer(run)
    shutil.copytree(first.run(lambda: first.step == 3).checkpoint, kept)
    result = first.run()  # goes on, and then leaves what is finished
    assert result.step == 12 and first.run().checkpoint == result.checkpoint
    shutil.copytree(kept, run / kept.name)
    before = {path: path.is_dir() or path.read_bytes() for path in run.rglob("*")}
    for source in (None, run / kept.name, kept):
        branch = make_trainer(run, resume_from=source, learning_rate=0.1, steps=15)
        with pytest.raises(CheckpointError, match=r"run holds .*step-00000012.*resume_from='/"):
            branch.run()
    assert {path: path.is_dir() or path.read_bytes() for path in run.rglob("*")} == before
    branch = make_trainer(tmp_path / "branch", resume_from=str(kept), learning_rate=0.1)
    saved = load_checkpoint(branch.run().checkpoint).model
    assert all(torch.equal(x, saved[name]) for name, x in branch.model.state_dict().items())


def test_metrics_and_curve_are_left(tmp_path):
    notes = []

    class Notes(Progress):
        def note(self, text):
            notes.append(text)

    make_trainer(tmp_path, progress=Notes()).run()
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records if "loss" in r] == [3, 6, 9, 12]
    assert [r["step"] for r in records if "validation_loss" in r] == [5, 10, 12]
    for name in ("tokens_per_second", "peak_mib", "learning_rate"):
        assert all(r[name] > 0 for r in records if "loss" in r)
    whole = "validating on the whole split"
    steps = ["step 5/12", "step 10/12", whole, "step 12/12"]
    assert [text.split(":")[0] for text in notes] == steps
    assert notes[-1].endswith("(whole split)")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    results = load_checkpoint(tmp_path).config["results"]
    assert results == {"validation_loss": records[-1]["validation_loss"], "scores": {}}


@pytest.mark.parametrize("line", [b'{"step": 1', b"[]", b'{"loss": 1}', b"\xff"])
def test_a_damaged_record_is_named(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(OSError, match=r"metrics\.jsonl:2 is damaged"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png"])
def test_a_run_s_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "full").touch()
    with pytest.raises(OSError, match=f"cannot write .*{name}: .*; the run's checkpoints are kept"):
        draw_loss_curve(tmp_path) if name == "loss.png" else append_metrics(tmp_path, {"step": 1})
    assert [path.name for path in tmp_path.iterdir()] == [name]
