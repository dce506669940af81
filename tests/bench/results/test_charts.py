"""Charts say what their files say, and which are of a model."""

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fastattn.bench.results import charts

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture
def report() -> Any:
    return json.loads((RESULTS / "h100-2026-11-22.json").read_text(encoding="utf-8"))


@pytest.fixture
def model() -> Any:
    return json.loads((RESULTS / "modelled" / "sm_90.json").read_text(encoding="utf-8"))


def words(chart: str) -> list[str]:
    return [x.text or "" for x in ElementTree.fromstring(chart).iter() if x.tag.endswith("text")]


def test_modelled_and_measured_are_told_apart(report: Any, model: Any) -> None:
    drawn = charts.measured(report)
    assert sorted(drawn) == [
        "measured-backward",
        "measured-decode",
        "measured-forward",
        "measured-memory-backward",
        "measured-memory-forward",
    ]
    for chart in drawn.values():
        assert "measured, NVIDIA H100 80GB HBM3, 2026-11-22" in words(chart)
        assert "odelled" not in chart
    chart = charts.modelled(model)
    assert words(chart)[0].startswith("Modelled, not measured")
    assert "H100" not in chart
    fills = set(re.findall(r'<rect [^>]*fill="([^"]+)"', chart))
    assert fills == {"none"}


def test_bars_are_as_long_as_their_figures(report: Any, model: Any) -> None:
    for chart in (charts.measured(report)["measured-decode"], charts.modelled(model)):
        lengths = [float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
        shown = [int(x) for x in words(chart) if x.isdigit()]
        assert len(lengths) == len(shown) > 5
        ratios = [length / value for length, value in zip(lengths, shown, strict=True)]
        assert max(ratios) / min(ratios) < 1.005
    expected = [row["tflops"] for row in model["rows"] if row["D"] in (64, 128)]
    assert [int(x) for x in words(charts.modelled(model)) if x.isdigit()] == expected


def test_what_was_wrong_is_not_drawn(report: Any) -> None:
    """The figures of our kernel in a graph were found wrong in this run."""
    labels = words(charts.measured(report)["measured-decode"])
    assert "fastattn, portable kernels, batch 32, call" in labels
    assert "fastattn, portable kernels, batch 32, graph" not in labels


def test_a_chart_follows_its_file(report: Any) -> None:
    changed = copy.deepcopy(report)
    for record in changed["results"]:
        if record["implementation"] == "sdpa-cudnn" and "tflops" in record:
            record["tflops"] /= 2
    before, after = charts.measured(report), charts.measured(changed)
    assert before["measured-forward"] != after["measured-forward"]
    assert before["measured-decode"] == after["measured-decode"]
    assert charts.measured({**report, "results": []}) == {}
    assert before["measured-memory-forward"] == after["measured-memory-forward"]


def places(chart: str, colour: str) -> list[float]:
    """How far down the marks of a colour are, the legend's first left out."""
    found = re.findall(rf'fill="{colour}" transform="translate\([\d.]+ ([\d.]+)\)"', chart)
    return [float(y) for y in found][:-1]


def test_memory_stands_where_its_axis_says(report: Any) -> None:
    """Against the words of the lines, which are 4 below them."""
    for record in report["results"]:
        if "peak_mib" in record:
            record["peak_mib"] = 1000 if record["implementation"] == "sdpa-math" else 100
    chart = charts.measured(report)["measured-memory-backward"]
    lines = {
        word: {
            round(float(x.get("y", "")) - 4, 1)
            for x in ElementTree.fromstring(chart).iter()
            if x.text == word
        }
        for word in ("100", "1000")
    }
    fused = charts.SHOWN["fastattn-triton"][0]
    assert len(places(chart, fused)) == 4
    assert {round(y, 1) for y in places(chart, fused)} <= lines["100"]
    unfused = charts.UNFUSED["sdpa-math"][0]
    assert len(places(chart, unfused)) == 2
    assert {round(y, 1) for y in places(chart, unfused)} <= lines["1000"]


def test_memory_has_the_least_that_is_needed(report: Any) -> None:
    """o, dq, dk and dv of 16384 tokens, 2048 wide, in bf16, and lse in fp32 of 16 or 32 heads."""
    drawn = charts.measured(report)
    for name, tensors in (("forward", 1), ("backward", 4)):
        told = {w for w in words(drawn[f"measured-memory-{name}"]) if w.startswith("outputs and")}
        assert told == {f"outputs and lse {64 * tensors + lse}" for lse in (1, 2)}


def test_memory_that_was_not_measured_is_not_drawn(report: Any) -> None:
    for record in report["results"]:
        if record["case"].get("direction") == "backward":
            record.pop("peak_mib", None)
    drawn = charts.measured(report)
    assert "measured-memory-forward" in drawn and "measured-backward" in drawn
    assert "measured-memory-backward" not in drawn


def test_each_cache_has_a_chart(report: Any) -> None:
    before = charts.measured(report)["measured-decode"]
    longer = [copy.deepcopy(x) for x in report["results"] if "kv_gbps" in x]
    for record in longer:
        record["case"]["T_k"] *= 8
        record["kv_gbps"] = 1234.0
    report["results"] += longer
    drawn = charts.measured(report)
    assert drawn["measured-decode-32-heads-4096-keys"] == before
    said = words(drawn["measured-decode-32-heads-32768-keys"])
    assert said[0] == "A decoded token, 32 heads, against a bf16 cache of 32768 keys"
    assert {x for x in said if x.isdigit()} == {"1234"}
    assert "measured-decode" not in drawn


def test_other_peers_have_marks_of_their_own(report: Any) -> None:
    for record in report["results"]:
        if record["implementation"] == "sdpa-flash":
            record["implementation"] = "flash-attn-3"
        elif record["implementation"] == "sdpa-cudnn":
            record["implementation"] = "flash-attn-2"
    said = words(charts.measured(report)["measured-forward"])
    assert {"FlashAttention-3", "flash-attn 2"} <= set(said) and "torch flash" not in said
    looks = [(colour, mark) for colour, mark, _ in (charts.SHOWN | charts.UNFUSED).values()]
    assert len({mark for _, mark in looks}) == len(looks)


def test_a_file_of_the_model_is_drawn_as_one(model: Any) -> None:
    path = RESULTS / "modelled" / "sm_90.json"
    assert charts.drawn(path) == {"modelled": charts.modelled(model)}
