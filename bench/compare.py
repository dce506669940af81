"""Run small GPTs that differ in one setting; record the results as JSON and as a picture.

python bench/compare.py layers                      # docs/recorded/layers.json and layers.png
python bench/compare.py splits --steps 20 --out x   # a shorter run, elsewhere

layers: the order of norm and sublayers (post-LN, pre-LN, parallel), without warm-up, and the
visible keys (all, or a window and a stride, by turns or together). splits: one model on 1, 2 and 4
ranks, by `fastattn train` on the CPU with gloo, under torchrun with several ranks. attention,
scores and one-step: a program of examples/ with each of its kinds. serving: an `Engine` by its
number of concurrent requests. The text is the standard library's source, one token per character.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from fastattn.generation import Engine
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.data.text import fingerprint, standard_library_text
from fastattn.training.metrics import read_metrics
from fastattn.training.run import Options, train

CHECKOUT = Path(__file__).resolve().parents[1]
OUT = CHECKOUT / "docs" / "recorded"
TEXT_CHARACTERS = 300_000
MODEL = {"num_layers": 6, "num_heads": 2, "embed_dim": 32, "context_length": 64}
SPARSE = {"window": 8, "stride": 8}
GROUPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "order of norm and sublayers": {
        "post-LN": {"block": "post"},
        "pre-LN": {"block": "pre"},
        "parallel": {"block": "parallel"},
    },
    "keys that are seen": {
        "dense": {},
        "sparse, alternating": {**SPARSE, "sparse": "alternate"},
        "sparse, merged": {**SPARSE, "sparse": "merge"},
    },
}
SERVED = {"num_layers": 4, "num_heads": 4, "embed_dim": 128, "context_length": 256}
SERVED |= {"num_kv_heads": 2, "positions": "rotary"}
PROMPT, BATCHES = 64, (1, 2, 4, 8, 16)
SHAPE = "--layers 2 --heads 2 --embed-dim 32 --context 64 --batch 4"
SPLITS: Mapping[str, tuple[int, str]] = {
    "1 rank": (1, ""),
    "2 ranks: cp 2": (2, "--context-parallel 2"),
    "2 ranks: fsdp 2": (2, "--fsdp 2"),
    "4 ranks: fsdp 2 x tp 2": (4, "--fsdp 2 --tensor-parallel 2"),
}
# Okabe and Ito's colours, for colour-blind readers; lines cover each other.
STYLES = (
    {"color": "#000000", "linewidth": 3.5, "alpha": 0.35},
    {"color": "#0072B2", "linestyle": "-"},
    {"color": "#E69F00", "linestyle": "--"},
    {"color": "#009E73", "linestyle": ":", "linewidth": 2.0},
)
ATTENTIONS = {
    "plain": "plain", "plain --seed 1": "plain, another seed", "latent": "multi-head latent (MLA)",
    "nsa": "native sparse (NSA)", "moba": "mixture of blocks (MoBA)",
}  # fmt: skip
ONE_STEP = {"dense": "dense in torch", "fastattn": "fastattn"}
SCORES = {"plain": "no gates", "dense": "gates, dense in torch", "gates": "gates, score_mod"}
NATS = "cross-entropy (nats per token)"
Record = dict[str, Any]


def layers(steps: int, text: Path, folder: Path) -> Record:
    """Trains every variant from the same seed on the same batches; losses in nats per token."""
    training = {"steps": steps, "batch_size": 4, "learning_rate": 3e-3, "warmup_steps": 0}
    training |= {"log_interval": max(1, steps // 30), "seed": 0, "device": "cpu"}
    training |= dict.fromkeys(("eval_interval", "checkpoint_interval"), steps)
    runs: Record = {}
    for group, variants in GROUPS.items():
        for name, changes in variants.items():
            model, out = {**MODEL, **changes}, folder / f"run-{len(runs)}"
            result = train(Options(model, training, {"text": (str(text),)}), out)
            losses = [[x["step"], round(x["loss"], 4)] for x in read_metrics(out) if "loss" in x]
            validation = round(result.validation_loss or 0.0, 4)
            run = {"model": model, "loss": losses, "validation_loss": validation}
            runs[f"{group}: {name}"] = run
    return {"training": training, "runs": runs}


def draw_layers(record: Mapping[str, Any], figure: Figure, unit: str = NATS) -> None:
    """One panel per group: training loss over steps, validation losses in the legend."""
    groups = list(dict.fromkeys(name.split(": ")[0] for name in record["runs"]))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for group, axes in zip(groups, panels, strict=True):
        for name, run in record["runs"].items():
            if name.startswith(f"{group}: "):
                title = name.removeprefix(f"{group}: ")
                if "validation_loss" in run:
                    title += f" (validation {run['validation_loss']:.2f})"
                axes.plot(*zip(*run["loss"], strict=True), label=title)
        axes.set(title=group, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel(unit)


def command(ranks: int, split: str, steps: int) -> str:
    """A user's command, without the text and the run's folder."""
    launch = f"torchrun --nproc-per-node {ranks} -m fastattn" if ranks > 1 else "fastattn"
    often = f"--steps {steps} --eval-every {steps} --save-every {steps} --log-every 1"
    return " ".join(f"{launch} train {SHAPE} {often} --seed 0 --device cpu {split}".split())


def trained_by(line: str, text: Path, out: Path) -> Record:
    """Run a command and read its metrics, in nats per token: "loss" for each step.

    Raises:
        CalledProcessError: it failed; its messages are on the terminal.
    """
    run, *words = shlex.split(line)
    module = "torch.distributed.run" if run == "torchrun" else "fastattn"
    port = ["--standalone"] if run == "torchrun" else []
    whole = [sys.executable, "-m", module, *port, *words, "--text", str(text), "--out", str(out)]
    # The models are too small for threads.
    subprocess.run(whole, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    records = read_metrics(out)
    return {
        "command": line,
        "loss": [round(x["loss"], 8) for x in records if "loss" in x],
        "validation_loss": round(records[-1]["validation_loss"], 8),
    }


def differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Distance of each run's losses from the first run's, for each step, in nats per token."""
    alone, *others = runs
    return {
        name: [abs(a - b) for a, b in zip(runs[name]["loss"], runs[alone]["loss"], strict=True)]
        for name in others
    }


def splits(steps: int, text: Path, folder: Path) -> Record:
    """Trains on every split from the same seed on the same batches."""
    runs = {
        name: trained_by(command(*split, steps), text, folder / f"run-{i}")
        for i, (name, split) in enumerate(SPLITS.items())
    }
    largest = {name: float(f"{max(values):.2g}") for name, values in differences(runs).items()}
    return {"largest_difference": largest, "runs": runs}


def draw_splits(record: Mapping[str, Any], figure: Figure) -> None:
    """Training loss over steps, and its distance from one rank's, by 10 steps."""
    losses, apart = figure.subplots(1, 2)
    runs = {name: run["loss"] for name, run in record["runs"].items()}
    for axes, curves, styles, reduced in (
        (losses, runs, STYLES, statistics.fmean),
        # A logarithmic axis cannot show a difference of 0.
        (apart, differences(record["runs"]), STYLES[1:], lambda tens: max(tens) or float("nan")),
    ):
        for (name, values), style in zip(curves.items(), styles, strict=True):
            tens = [reduced(values[i : i + 10]) for i in range(0, len(values), 10)]
            axes.plot(range(10, 10 * len(tens) + 1, 10), tens, label=name, **style)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3, which="both")
    losses.set(title="training loss, mean of 10 steps", ylabel=NATS)
    apart.set(title="distance from 1 rank, largest of 10 steps", ylabel="nats per token")
    apart.set_yscale("log")
    losses.legend()


def examples(example: str, kinds: Mapping[str, str], steps: int, text: Path, *_: Path) -> Record:
    """Train an example's model with each kind of attention; its losses."""
    runs = {}
    for name, title in kinds.items():
        line = f"python {example} --attention {name} --steps {steps}"
        words = [sys.executable, str(CHECKOUT / example), *line.split()[2:]]
        # The other trains a generator by its tangents: the distance of its samples from the data.
        words += ["--text", str(text)] if kinds is not ONE_STEP else []
        said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        ((parameters,), *losses) = (re.findall(r"[\d.]+", x) for x in said.splitlines())
        runs[f"attention: {title}"] = {
            "command": line,
            "parameters": int(parameters),
            "loss": [[int(step), float(loss)] for step, loss in losses],
        }
    return {"runs": runs} if kinds is not ONE_STEP else {"text": None, "runs": runs}


def serving(steps: int, text: Path, folder: Path) -> Record:
    """Serve requests of `steps` tokens each, for several batch sizes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, **SERVED)).eval()
    tokens = list(text.read_bytes())
    runs = {}
    for size in BATCHES:
        engine = Engine(model, num_pages=16 * size, max_batch=size, max_step_tokens=size + 32)
        requests = [
            engine.submit(tokens[1000 * i :][:PROMPT], steps, seed=i) for i in range(2 * size)
        ]
        for _ in engine.run():
            pass
        metrics = engine.metrics()
        assert all(len(request.tokens) == steps for request in requests)
        runs[str(size)] = {
            "tokens_per_second": round(metrics.tokens_per_second, 1),
            "milliseconds_a_step": round(1000 * metrics.seconds / metrics.steps, 2),
            "first_token_seconds": round(metrics.first_token_seconds or 0.0, 3),
            "steps": metrics.steps,
            "read_tokens": metrics.read_tokens,
        }
    prompt = {"tokens": PROMPT, "new_tokens": steps, "requests": "twice the batch size"}
    return {"model": SERVED, "prompt": prompt, "threads": torch.get_num_threads(), "runs": runs}


def draw_serving(record: Mapping[str, Any], figure: Figure) -> None:
    """Tokens per second and milliseconds per step, over the number of concurrent requests."""
    panels = figure.subplots(1, 2)
    sizes = [int(size) for size in record["runs"]]
    for axes, name in zip(panels, ("tokens_per_second", "milliseconds_a_step"), strict=True):
        axes.plot(sizes, [run[name] for run in record["runs"].values()], marker="o")
        axes.set(title=name.replace("_", " "), xlabel="requests at a time", ylim=(0, None))
        axes.grid(alpha=0.3)


draw_distances = partial(draw_layers, unit="square distance of samples from data")
COMPARED = {
    "layers": (layers, draw_layers, 4.0),
    "splits": (splits, draw_splits, 4.4),
    "attention": (partial(examples, "examples/sparse_gpt.py", ATTENTIONS), draw_layers, 4.0),
    "scores": (partial(examples, "examples/own_score.py", SCORES), draw_layers, 4.0),
    "one-step": (partial(examples, "examples/one_step.py", ONE_STEP), draw_distances, 4.0),
    "serving": (serving, draw_serving, 3.6),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COMPARED)
    parser.add_argument("--steps", type=int, default=300, help="of every run (300)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (docs/recorded)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the models are too small for threads
    run, draw, height = COMPARED[options.what]
    text = standard_library_text(TEXT_CHARACTERS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.py"
        path.write_text(text, encoding="utf-8")
        measured = run(options.steps, path, Path(folder))
    source = {"of": "the standard library's source", "characters": len(text)}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    record = {"text": source | {"sha256": fingerprint(text)}, "versions": versions, **measured}
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / options.what
    file.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    figure = Figure(figsize=(11, height), layout="constrained")
    draw(record, figure)
    figure.savefig(file.with_suffix(".png"), dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
