"""Train small GPTs that differ in one option, and record their losses as JSON and as a picture.

python bench/compare_layers.py                      # write docs/recorded/layers.json and layers.png
python bench/compare_layers.py --steps 50 --out x   # a shorter run, elsewhere

Compared are the order of norm and sublayers (post-LN, pre-LN, parallel), all without warm-up, and
which keys are seen (all, or a window and a stride, by turns or together). The text is the standard
library's source, a token a character.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch

from fastattn.models.gpt import GPTConfig
from fastattn.training.data.text import fingerprint, standard_library_text
from fastattn.training.metrics import read_metrics
from fastattn.training.run import Options, train

OUT = Path(__file__).resolve().parents[1] / "docs" / "recorded"
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


def record_runs(steps: int, groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict:
    """Trains every variant from the same seed on the same batches; losses in nats a token."""
    text = standard_library_text(TEXT_CHARACTERS)
    training = {
        "steps": steps,
        "batch_size": 4,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "log_interval": max(1, steps // 30),
        "eval_interval": steps,
        "seed": 0,
        "device": "cpu",
        "checkpoint_interval": steps,
    }
    found: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.py"
        path.write_text(text, encoding="utf-8")
        for group, variants in groups.items():
            for name, changes in variants.items():
                config = GPTConfig(vocab_size=1, **MODEL, **changes)
                key = json.dumps(config.to_dict())
                if key not in trained:
                    out = Path(folder) / f"run-{len(trained)}"
                    options = Options({**MODEL, **changes}, training, {"text": (str(path),)})
                    result = train(options, out)
                    records = [record for record in read_metrics(out) if "loss" in record]
                    trained[key] = {
                        "model": {**MODEL, **changes},
                        "loss": [[record["step"], round(record["loss"], 4)] for record in records],
                        "validation_loss": round(result.validation_loss or 0.0, 4),
                    }
                found[f"{group}: {name}"] = trained[key]
    return {
        "text": {"of": "the standard library's source", "characters": len(text)}
        | {"sha256": fingerprint(text)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "training": training,
        "runs": found,
    }


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A panel a group: training loss over steps, with each run's validation loss in the legend."""
    groups = list(dict.fromkeys(name.split(": ")[0] for name in record["runs"]))
    figure = matplotlib.figure.Figure(figsize=(5.5 * len(groups), 4), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for group, axes in zip(groups, panels, strict=True):
        for name, run in record["runs"].items():
            if name.startswith(f"{group}: "):
                title = name.removeprefix(f"{group}: ")
                label = f"{title} (validation {run['validation_loss']:.2f})"
                axes.plot(*zip(*run["loss"], strict=True), label=label)
        axes.set(title=group, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("cross-entropy (nats per token)")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of every run (300)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (docs/recorded)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # models too small to share
    record = record_runs(options.steps, GROUPS)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "layers.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(record, options.out / "layers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
