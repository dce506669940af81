"""Train one small GPT on 1, 2 and 4 ranks, and record the losses as JSON and as a picture.

python bench/compare_splits.py                      # write docs/recorded/splits.json and splits.png
python bench/compare_splits.py --steps 20 --out x   # a shorter run, elsewhere

Every run is the `fastattn train` of a user, under torchrun where there are several ranks, on the
CPU with gloo. The text is the standard library's source, a token a character.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch

from fastattn.training.data.text import fingerprint, standard_library_text
from fastattn.training.metrics import read_metrics

OUT = Path(__file__).resolve().parents[1] / "docs" / "recorded"
TEXT_CHARACTERS = 300_000
SHAPE = "--layers 2 --heads 2 --embed-dim 32 --context 64 --batch 4"
SPLITS: Mapping[str, tuple[int, str]] = {
    "1 rank": (1, ""),
    "2 ranks: cp 2": (2, "--context-parallel 2"),
    "2 ranks: fsdp 2": (2, "--fsdp 2"),
    "4 ranks: fsdp 2 x tp 2": (4, "--fsdp 2 --tensor-parallel 2"),
}
# Okabe and Ito's colours, which the colour-blind can tell apart, on lines that cover each other.
STYLES = (
    {"color": "#000000", "linewidth": 3.5, "alpha": 0.35},
    {"color": "#0072B2", "linestyle": "-"},
    {"color": "#E69F00", "linestyle": "--"},
    {"color": "#009E73", "linestyle": ":", "linewidth": 2.0},
)


def command(ranks: int, split: str, steps: int) -> str:
    """What a user types, but for the text and the run's folder."""
    launch = f"torchrun --nproc-per-node {ranks} -m fastattn" if ranks > 1 else "fastattn"
    often = f"--steps {steps} --eval-every {steps} --save-every {steps} --log-every 1"
    return " ".join(f"{launch} train {SHAPE} {often} --seed 0 --device cpu {split}".split())


def trained(line: str, text: Path, out: Path) -> dict[str, Any]:
    """What a command's metrics say, in nats a token: "loss" step by step.

    Raises:
        CalledProcessError: it failed; what it said is on the terminal.
    """
    run, *words = shlex.split(line)
    module = "torch.distributed.run" if run == "torchrun" else "fastattn"
    port = ["--standalone"] if run == "torchrun" else []
    whole = [sys.executable, "-m", module, *port, *words, "--text", str(text), "--out", str(out)]
    # Models too small to share among threads.
    subprocess.run(whole, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    records = read_metrics(out)
    return {
        "command": line,
        "loss": [round(x["loss"], 8) for x in records if "loss" in x],
        "validation_loss": round(records[-1]["validation_loss"], 8),
    }


def differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """By run, how far its losses are from those of the first, step by step, in nats a token."""
    alone, *others = runs
    return {
        name: [abs(a - b) for a, b in zip(runs[name]["loss"], runs[alone]["loss"], strict=True)]
        for name in others
    }


def record_runs(steps: int) -> dict[str, Any]:
    """Trains on every split from the same seed on the same batches."""
    text = standard_library_text(TEXT_CHARACTERS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.py"
        path.write_text(text, encoding="utf-8")
        runs = {
            name: trained(command(*split, steps), path, Path(folder) / f"run-{i}")
            for i, (name, split) in enumerate(SPLITS.items())
        }
    return {
        "text": {"of": "the standard library's source", "characters": len(text)}
        | {"sha256": fingerprint(text)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "largest_difference": {
            name: float(f"{max(found):.2g}") for name, found in differences(runs).items()
        },
        "runs": runs,
    }


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Training loss over steps, and its distance from that of one rank, of every 10 steps."""
    figure = matplotlib.figure.Figure(figsize=(11, 4.4), layout="constrained")
    losses, apart = figure.subplots(1, 2)
    for (name, run), style in zip(record["runs"].items(), STYLES, strict=True):
        tens = by_tens(run["loss"], statistics.fmean)
        losses.plot(list(tens), list(tens.values()), label=name, **style)
    for found, style in zip(differences(record["runs"]).values(), STYLES[1:], strict=True):
        tens = by_tens(found, max)
        # Where there is no difference a logarithm has no place for it.
        apart.plot(list(tens), [x or float("nan") for x in tens.values()], **style)
    losses.set(title="training loss, mean of 10 steps", ylabel="cross-entropy (nats per token)")
    apart.set(title="distance from 1 rank, largest of 10 steps", ylabel="nats per token")
    apart.set_yscale("log")
    for axes in (losses, apart):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=len(STYLES))
    figure.savefig(path, dpi=110)


def by_tens(values: list[float], kind: Callable[[list[float]], float]) -> dict[int, float]:
    """What `kind` makes of every 10 values in turn, by the last step of them."""
    stretches = [values[i : i + 10] for i in range(0, len(values), 10)]
    return {10 * i + len(found): kind(found) for i, found in enumerate(stretches)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of every run (300)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (docs/recorded)")
    options = parser.parse_args(arguments)
    record = record_runs(options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "splits.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(record, options.out / "splits.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
