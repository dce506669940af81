"""bench/compare.py: it writes the recorded files, and their page agrees with them."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from fastattn.cli.main import build_parser
from fastattn.models.gpt import GPTConfig
from fastattn.training.metrics import append_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "docs" / "recorded"


def recorded(name):
    assert (FOLDER / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def page_says(pattern):
    return float(re.search(pattern, (FOLDER / "runs.md").read_text(encoding="utf-8"))[1])


@pytest.fixture
def script(monkeypatch):
    path = CHECKOUT / "bench" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TEXT_CHARACTERS", 20_000)
    return module


def test_the_record_of_layers_is_of_the_script_and_shows_what_its_page_says(script):
    runs = recorded("layers")["runs"]
    assert {name: GPTConfig(1, **run["model"]) for name, run in runs.items()} == {
        f"{group}: {name}": GPTConfig(1, **script.MODEL | changes)
        for group, variants in script.GROUPS.items()
        for name, changes in variants.items()
    }

    later = {}  # mean training loss over the second third of a run
    for name, run in runs.items():
        third = len(run["loss"]) // 3
        later[name.split(": ")[1]] = sum(loss for _, loss in run["loss"][third : 2 * third]) / third
    assert later["post-LN"] > later["pre-LN"] + 0.1
    assert later["parallel"] < later["pre-LN"] + 0.05
    dense, *sparse = (x["validation_loss"] for name, x in runs.items() if "seen: " in name)
    assert max(sparse) < dense + 0.01


def test_the_record_of_splits_is_of_the_script_s_own_commands(script):
    record = recorded("splits")
    wanted = {name: script.command(*split, 300) for name, split in script.SPLITS.items()}
    assert {name: run["command"] for name, run in record["runs"].items()} == wanted
    for line in wanted.values():
        words = shlex.split(line)
        build_parser().parse_args(words[words.index("train") :])
    assert all(len(run["loss"]) == 300 for run in record["runs"].values())
    apart = script.differences(record["runs"]).items()
    largest = {name: float(f"{max(losses):.2g}") for name, losses in apart}
    said = page_says(r"no loss of any split differs by more than (\S+) nats")
    assert largest == record["largest_difference"] and said == max(largest.values()) < 1e-4


def test_the_record_of_scores_shows_what_its_page_says(script):
    runs = recorded("scores")["runs"]
    assert list(runs) == [f"attention: {title}" for title in script.SCORES.values()]
    plain, dense, gates = ([loss for _, loss in run["loss"]] for run in runs.values())
    apart = page_says(r"No loss of the two differs by more than (\S+) nats")
    assert max(abs(x - y) for x, y in zip(dense, gates, strict=True)) <= apart < 0.01
    below = page_says(r"at the end both are (\S+) below")
    assert min(plain[-1] - dense[-1], plain[-1] - gates[-1]) >= below > 0


def written(script, what, steps, folder):
    assert script.main([what, "--steps", str(steps), "--out", str(folder / "runs")]) == 0
    assert (folder / "runs" / f"{what}.png").stat().st_size > 1000
    return json.loads((folder / "runs" / f"{what}.json").read_text())


def test_the_script_trains_layers(script, tmp_path, monkeypatch):
    model = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "context_length": 32}
    monkeypatch.setattr(script, "MODEL", model)
    monkeypatch.setattr(script, "GROUPS", {"a": {"one": {}}, "b": {"other": {"block": "post"}}})
    runs = written(script, "layers", 2, tmp_path)["runs"]
    one, other = (runs[name]["loss"] for name in ("a: one", "b: other"))
    assert one != other and [step for step, _ in other] == [1, 2]


def test_the_script_serves(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "BATCHES", (1, 2))
    record = written(script, "serving", 3, tmp_path)
    # Requests by turns, each a prompt in chunks, whose last gives a token, and 2 more steps.
    assert record["runs"]["1"]["steps"] == 2 * (2 + 2)
    assert record["runs"]["1"]["read_tokens"] == 2 * (script.PROMPT + 2)
    assert record["model"] == script.SERVED == recorded("serving")["model"]
    assert list(recorded("serving")["runs"]) == ["1", "2", "4", "8", "16"]


def test_the_script_starts_splits_and_examples(script, tmp_path, monkeypatch):
    """Fakes leave metrics.jsonl or print what an example prints; other tests run the real ones."""
    started = []

    def run(words, **options):
        assert options["check"]
        started.append(words)
        if "--attention" in words:
            assert Path(words[1]).is_file() and words[words.index("--steps") + 1] == "2"
            said = "a kind: 1234 parameters\nstep    1  loss 2.5\nstep    2  loss 1.25\n"
            return script.subprocess.CompletedProcess(words, 0, said)
        out = Path(words[words.index("--out") + 1])
        out.mkdir()
        for step in range(1, 13):
            append_metrics(out, {"step": step, "loss": 1.0 / step + 0.25 * (len(started) - 1)})
        append_metrics(out, {"step": 12, "validation_loss": 0.5})

    monkeypatch.setattr(script.subprocess, "run", run)
    record = written(script, "splits", 12, tmp_path)
    modules = [words[words.index("-m") + 1] for words in started]
    assert modules == ["fastattn", *["torch.distributed.run"] * 3]
    assert list(record["largest_difference"].values()) == [0.25, 0.5, 0.75]
    assert record["runs"]["1 rank"]["loss"][:2] == [1.0, 0.5]
    short = written(script, "attention", 2, tmp_path)["runs"].values()
    assert len(short) == len(script.ATTENTIONS)
    assert all(x["parameters"] == 1234 and x["loss"] == [[1, 2.5], [2, 1.25]] for x in short)
    assert written(script, "one-step", 2, tmp_path)["text"] is None
    assert ["--text" in words for words in started[-3:]] == [True, False, False]
