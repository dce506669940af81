"""Actions of models on a GPU alone: autocast and its scaler, resuming, graphs, events."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from calls import SMALL, random
from posing import Graph, stage

from fastattn import attention
from fastattn.bench.cases import sets
from fastattn.bench.time import attention as attention_jobs
from fastattn.bench.time import environment, jobs
from fastattn.bench.time.samples import Bench, Effort, device_timer
from fastattn.generation.generate import generate_batch, generate_tokens
from fastattn.kernels.launch import tiles
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import load_checkpoint
from fastattn.training.data.text import TextDataset
from fastattn.training.step_timing import time_training_steps
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

MODEL = {"context_length": 32, "num_layers": 1, "num_heads": 2, "embed_dim": 128}
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12


def calls() -> None:
    with tiles.forced(**SMALL), tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        stage.play("Trainer", lambda: train(out))
        stage.play("Trainer, resumed", lambda: resume(out))
        stage.play("time_training_steps", time_steps)
        model = small_model().to(torch.bfloat16).eval()
        of_model: dict[str, Callable[..., object]] = {
            "generate": lambda **how: list(generate_tokens(model, [1, 2, 3], 4, **how)),
            "generate a batch": lambda **how: generate_batch(model, [[1, 2, 3], [4]], 4, **how),
        }
        for name, call in of_model.items():
            stage.play(name, call)
            stage.play(f"{name}, graph", partial(with_graph, partial(call, cuda_graph=True)))
        stage.play("events", time_attention)
        stage.play("environment", environment.collect, launches=False)
        stage.play("rows of the short set", short_set)


def small_model(vocab_size: int = 64) -> GPT:
    return GPT(GPTConfig(vocab_size=vocab_size, **MODEL)).to("cuda")


def make_trainer(out: Path, **options: Any) -> Trainer:
    tokenizer = CharacterTokenizer(TEXT)
    data = TextDataset.from_text(TEXT, tokenizer, MODEL["context_length"])
    # In float16 the scaler of losses is at work.
    train_config = TrainConfig(steps=4, batch_size=2, eval_batches=1, dtype="float16")
    model = small_model(tokenizer.vocab_size)
    return Trainer(model, data, tokenizer, train_config, out, **options)


def train(out: Path) -> None:
    """Two of four steps."""
    requested = iter((False, False, True))
    trainer = make_trainer(out)
    assert trainer.device.type == "cuda"
    assert trainer.scaler.is_enabled()
    assert trainer.run(lambda: next(requested)).step == 2


def resume(out: Path) -> None:
    trainer = make_trainer(out, resume_from=load_checkpoint(out))
    assert trainer.scaler.state_dict() == load_checkpoint(out).training["scaler"]
    assert trainer.run().finished


def time_steps() -> None:
    how = {"batch_size": 2, "backend": "triton", "device": "cuda", "steps": 2, "warm_up": 1}
    timing = time_training_steps(GPTConfig(vocab_size=64, **MODEL), **how)
    assert timing.mfu is not None and timing.peak_mib is not None


def with_graph(call: Any) -> None:
    before = Graph.replays
    call()
    assert Graph.replays > before, "no graph was replayed"


def time_attention() -> None:
    q, k, v = (random(1, 2, 64, 64) for _ in range(3))
    bench = Bench(device_timer(), Effort(warm_up=1, target_ms=0.01, least=1, most=1, pause=0))
    results = bench.compare({"attention": lambda: attention(q, k, v, causal=True)})
    timing = results["attention"]
    assert isinstance(timing, dict) and timing["samples"] == 1, timing


def short_set() -> None:
    """Rows by the process of `run_all`, small; what kernels compute is not checked."""
    small: dict[str, Any] = {"B": 1, "H_q": 2, "H_k": 2, "T_k": 128, "D": 64}
    rows = []
    for kind in (sets.plain_rows, sets.decode_rows):
        case, names = next(iter(kind()))
        rows.append(sets.Row(replace(case, T_q=min(128, case.T_q), **small), names))
    told: list[dict[str, Any]] = []
    settings = {"which": "short", "folder": "", "seconds": 9.0, "left": 9.0, "names": []}
    with (
        mock.patch.object(jobs, "gpu_jobs", lambda session: jobs.of_rows(rows)),
        mock.patch.object(attention_jobs, "check", lambda *results: None),
    ):
        requests = ({"job": name, "broken": {}} for name in jobs.of_rows(rows))
        jobs.run(settings, lambda **message: told.append(message), requests)
    records = [record for message in told for record in message.get("records", ())]
    ours = {record["kernels"]: record["status"] for record in records if "kernels" in record}
    assert ours == {"fastattn-hopper": "timed", "fastattn-triton": "timed"}, told
