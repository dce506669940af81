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
    assert sorted(drawn) == ["measured-backward", "measured-decode", "measured-forward"]
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
