"""bench/compare_splits.py: what is recorded is of its commands, and the page agrees with it."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from fastattn.cli.main import build_parser
from fastattn.training.metrics import append_metrics

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "docs" / "recorded"
RECORD = json.loads((FOLDER / "splits.json").read_text(encoding="utf-8"))


@pytest.fixture
def script():
    path = CHECKOUT / "bench" / "compare_splits.py"
    spec = importlib.util.spec_from_file_location("compare_splits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_is_of_the_script_s_own_commands(script):
    wanted = {name: script.command(*split, 300) for name, split in script.SPLITS.items()}
    assert {name: run["command"] for name, run in RECORD["runs"].items()} == wanted
    for line in wanted.values():
        words = shlex.split(line)
        build_parser().parse_args(words[words.index("train") :])
    assert all(len(run["loss"]) == 300 for run in RECORD["runs"].values())


def test_the_page_says_the_largest_difference(script):
    found = {name: max(losses) for name, losses in script.differences(RECORD["runs"]).items()}
    assert list(found) == list(RECORD["largest_difference"])
    for name, largest in found.items():
        assert RECORD["largest_difference"][name] == float(f"{largest:.2g}") < 1e-4
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"no loss of any split is further than (\S+) nats", page)
    assert float(said) == max(RECORD["largest_difference"].values())
    assert (FOLDER / "splits.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_writes_both_files(script, tmp_path, monkeypatch):
    """Of runs that metrics.jsonl alone is left of; tests/training has torchrun."""
    started = []

    def run(words, **options):
        assert options["check"]
        started.append(words)
        out = Path(words[words.index("--out") + 1])
        out.mkdir()
        for step in range(1, 13):
            append_metrics(out, {"step": step, "loss": 1.0 / step + 0.25 * (len(started) - 1)})
        append_metrics(out, {"step": 12, "validation_loss": 0.5})

    monkeypatch.setattr(script, "TEXT_CHARACTERS", 20_000)
    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main(["--steps", "12", "--out", str(tmp_path / "runs")]) == 0
    modules = [words[words.index("-m") + 1] for words in started]
    assert modules == ["fastattn", *["torch.distributed.run"] * 3]
    record = json.loads((tmp_path / "runs" / "splits.json").read_text())
    assert list(record["largest_difference"].values()) == [0.25, 0.5, 0.75]
    assert record["runs"]["1 rank"]["loss"][:2] == [1.0, 0.5]
    assert script.by_tens(record["runs"]["1 rank"]["loss"], min) == {10: 0.1, 12: 0.08333333}
    assert (tmp_path / "runs" / "splits.png").stat().st_size > 1000
