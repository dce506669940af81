"""bench/compare_layers.py: it writes the recorded files, and their page agrees with them."""

import importlib.util
import json
from pathlib import Path

import pytest

from fastattn.models.gpt import GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CHECKOUT = Path(__file__).resolve().parents[2]
RECORD = json.loads((CHECKOUT / "docs" / "recorded" / "layers.json").read_text(encoding="utf-8"))


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location(
        "compare_layers", CHECKOUT / "bench" / "compare_layers.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_is_of_the_script_s_own_variants(script):
    wanted = {
        f"{group}: {name}": GPTConfig(vocab_size=1, **script.MODEL, **changes)
        for group, variants in script.GROUPS.items()
        for name, changes in variants.items()
    }
    runs = RECORD["runs"].items()
    assert {name: GPTConfig(vocab_size=1, **run["model"]) for name, run in runs} == wanted


def test_the_record_shows_what_its_page_says():
    def later(name: str) -> float:
        """Mean training loss over the second third of the run."""
        losses = [loss for _, loss in RECORD["runs"][name]["loss"]]
        third = len(losses) // 3
        return sum(losses[third : 2 * third]) / third

    order, keys = "order of norm and sublayers: ", "keys that are seen: "
    assert later(order + "post-LN") > later(order + "pre-LN") + 0.1
    assert later(order + "parallel") < later(order + "pre-LN") + 0.05
    dense = RECORD["runs"][keys + "dense"]["validation_loss"]
    for name in ("sparse, alternating", "sparse, merged"):
        assert RECORD["runs"][keys + name]["validation_loss"] < dense + 0.01
    assert (CHECKOUT / "docs" / "recorded" / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_writes_both_files(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TEXT_CHARACTERS", 20_000)
    monkeypatch.setattr(
        script, "MODEL", {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "context_length": 32}
    )
    groups = {"a": {"one": {}, "same": {"block": "pre"}}, "b": {"other": {"block": "post"}}}
    monkeypatch.setattr(script, "GROUPS", groups)
    assert script.main(["--steps", "2", "--out", str(tmp_path / "runs")]) == 0
    record = json.loads((tmp_path / "runs" / "layers.json").read_text())
    assert list(record["runs"]) == ["a: one", "a: same", "b: other"]
    assert record["runs"]["a: one"] == record["runs"]["a: same"]
    assert record["runs"]["a: one"]["loss"] != record["runs"]["b: other"]["loss"]
    assert [step for step, _ in record["runs"]["b: other"]["loss"]] == [1, 2]
    assert (tmp_path / "runs" / "layers.png").stat().st_size > 1000
