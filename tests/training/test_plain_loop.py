"""The trainer against a loop in plain torch, for drawn settings: weights, losses and rates."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.testing.calls import Draw
from fastattn.training import metrics
from fastattn.training import trainer as trainer_module
from fastattn.training.checkpoint import load_checkpoint
from fastattn.training.data.text import TextDataset
from fastattn.training.metrics import read_metrics
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12
# Values of every number that a step depends on. 0 is one of those that may be 0.
VALUES: dict[str, tuple[Any, ...]] = {
    "steps": (4, 5, 22),
    "batch_size": (2, 3),
    "accumulation": (1, 2, 3),
    "learning_rate": (1e-2, 3e-3),
    "min_learning_rate": (None, 0, 2e-3),
    "warmup_steps": (None, 0, 1, 3),
    "weight_decay": (0, 0.3, 2.0),
    "beta1": (0, 0.6, 0.9),
    "beta2": (0, 0.9, 0.99),
    "grad_clip": (0, 0.05, 1.0),
    "seed": (0, 7),
}
# Numbers that change no step.
BESIDE = {"eval_interval", "eval_batches", "log_interval", "checkpoint_interval"}


def numbers() -> dict[str, dataclasses.Field]:
    """The fields of `TrainConfig` that are numbers, by name."""
    fields = dataclasses.fields(TrainConfig)
    return {x.name: x for x in fields if str(x.type).startswith(("int", "float"))}


def drawn_settings(seed: int) -> dict[str, Any]:
    draw = Draw(f"{seed}/train")
    return {name: draw.choice(*values) for name, values in VALUES.items()} | {
        "log_interval": draw.choice(1, 2), "eval_interval": 3, "eval_batches": 1,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes as long as a run."""
    monkeypatch.setattr(metrics, "draw_loss_curve", lambda out: None)


def make(out: Path, settings: dict[str, Any], resume: bool = False) -> Trainer:
    tokenizer, config = CharacterTokenizer(TEXT), TrainConfig(**settings, device="cpu")
    torch.manual_seed(1)
    sizes = {"context_length": 12, "num_layers": 1, "num_heads": 2, "embed_dim": 8, "bias": True}
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **sizes))
    for parameter in model.parameters():
        # What is 0 does not decay, and large numbers overflow in fp16.
        torch.nn.init.normal_(parameter, std=1.5 if config.dtype == "float16" else 0.4)
    if config.dtype != "float16":
        model.double()
    dataset = TextDataset.from_text(TEXT, tokenizer, 12)
    return Trainer(
        model, dataset, tokenizer, config, out, resume_from=load_checkpoint(out) if resume else None
    )


def rate_at(step: int, given: dict[str, Any]) -> float:
    """nanoGPT's get_lr, with a tenth of the rate and a twentieth of the steps by default."""
    least, warmup = given["min_learning_rate"], given["warmup_steps"]
    least = given["learning_rate"] / 10 if least is None else least
    warmup = given["steps"] // 20 if warmup is None else warmup
    if step < warmup:
        return given["learning_rate"] * (step + 1) / (warmup + 1)
    ratio = (step - warmup) / (given["steps"] - warmup)
    return least + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (given["learning_rate"] - least)


def plain_loop(
    model: GPT, batches: Iterator[tuple[Tensor, Tensor]], given: dict[str, Any], half: bool
) -> Iterator[tuple[float, float]]:
    """Train in place; yield each step's rate and mean loss."""
    matrices = [x for x in model.parameters() if x.dim() > 1]
    vectors = [x for x in model.parameters() if x.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": given["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=given["learning_rate"],
        betas=(float(given["beta1"]), float(given["beta2"])),
        fused=half,  # bit for bit
    )
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    for step in range(given["steps"]):
        rate, losses = rate_at(step, given), []
        for group in optimizer.param_groups:
            group["lr"] = rate
        for inputs, targets in itertools.islice(batches, given["accumulation"]):
            with torch.autocast("cpu", torch.float16, enabled=half):
                logits = model(inputs)[0]
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            scaler.scale(loss / given["accumulation"]).backward()
        if given["grad_clip"]:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), given["grad_clip"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield rate, sum(losses) / len(losses)
    if half:
        skipped = 16 - math.log2(scaler.get_scale())
        assert 0 < skipped < given["steps"] - 1


def assert_equals_plain(out: Path, given: dict[str, Any], stop_at: int, half: bool) -> None:
    """Run the trainer, stop and resume it, and compare with the plain loop."""
    batches: list[tuple[Tensor, Tensor]] = []
    model = None
    for resume in (False, True):
        trainer = make(out, given, resume)
        draw = trainer.task.draw

        def spy(split: Any, *how: Any, draw: Any = draw) -> Any:
            batch = draw(split, *how)
            if split == "train":
                batches.append((batch.inputs[0], batch.targets))
            return batch

        trainer.task.draw = spy
        model = model or copy.deepcopy(trainer.model)
        trainer.run(lambda run=trainer, resume=resume: run.step == stop_at and not resume)
    assert model is not None and len(batches) == given["steps"] * given["accumulation"]
    rates, losses = zip(*plain_loop(model, iter(batches), given, half), strict=True)
    bounds = {"rtol": 0.0, "atol": 0.0} if half else {"rtol": 1e-9, "atol": 1e-11}
    trained = dict(trainer.model.named_parameters())
    for name, expected in model.named_parameters():
        # A number that all scores share changes no weight: the gradient of k's bias is rounding,
        # another on each CPU, which AdamW divides by its eps.
        if half or not name.endswith("k_proj.bias"):
            torch.testing.assert_close(trained.pop(name), expected, **bounds)
    assert {*trained} <= {"blocks.0.attention.k_proj.bias"}
    records, last = [x for x in read_metrics(out) if "loss" in x], 0
    assert records[-1]["step"] == given["steps"]
    for record in records:
        step = record["step"]
        assert record["learning_rate"] == pytest.approx(rates[step - 1], rel=1e-12)
        mean = sum(losses[last:step]) / (step - last)
        assert record["loss"] == pytest.approx(mean, rel=1e-5)
        last = step


@pytest.mark.parametrize("seed", range(10))
def test_drawn_runs_equal_a_plain_loop(seed: int, tmp_path: Path) -> None:
    given = drawn_settings(seed)
    assert_equals_plain(tmp_path, given, stop_at=seed % 4, half=False)


@pytest.mark.parametrize("grad_clip", [0, 0.05])
def test_a_scaled_run_equals_a_plain_loop(
    grad_clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of fp16 overflow at first: a step is skipped, and the scale outlives a resume."""
    monkeypatch.setattr(trainer_module, "resolve_dtype", lambda *_: torch.float16)
    given = drawn_settings(3) | {"steps": 5, "grad_clip": grad_clip, "dtype": "float16"}
    assert_equals_plain(tmp_path, given, stop_at=2, half=True)


def test_rates_are_those_of_the_formula() -> None:
    for seed in range(200):
        draw = Draw(f"{seed}/rates")
        steps = draw.integer(1, 150)
        given = {
            "steps": steps,
            "learning_rate": draw.choice(1.0, 0.01),
            "min_learning_rate": draw.choice(None, 0, 0.005),
            "warmup_steps": draw.choice(None, 0, draw.integer(0, steps - 1)),
        }
        config = TrainConfig(**given)
        expected = [rate_at(step, given) for step in range(steps)]
        assert [config.learning_rate_at(step) for step in range(steps)] == pytest.approx(expected)
        assert config.learning_rate_at(steps) == pytest.approx(rate_at(steps, given))


def test_every_number_of_a_step_is_drawn_and_0_is_where_it_may_be() -> None:
    drawn = [drawn_settings(seed) for seed in range(10)]
    assert VALUES.keys() == numbers().keys() - BESIDE
    for name, values in VALUES.items():
        check = numbers()[name].metadata["check"]
        assert (0 in values) == check[1](0), name
        assert {given[name] for given in drawn} == {*values}, name
