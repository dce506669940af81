"""Charts say what their files say."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fastattn.bench.cases.case import sweep
from fastattn.bench.results import charts

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture
def report() -> Any:
    return json.loads((RESULTS / "h100-2026-11-22.json").read_text(encoding="utf-8"))


def words(chart: str) -> list[str]:
    return [x.text or "" for x in ElementTree.fromstring(chart).iter() if x.tag.endswith("text")]


def test_a_chart_names_its_gpu_and_date(report: Any) -> None:
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


def test_bars_are_as_long_as_their_figures_and_no_wrong_one_is_drawn(report: Any) -> None:
    """The figures of our kernel in a graph were found wrong in this run."""
    wrong = [x for x in report["results"] if x["status"] == "wrong"]
    assert wrong and {x["implementation"] for x in wrong} == {"fastattn-triton"}
    for record in wrong:
        record["kv_gbps"] = record["tflops"] = 4600.0
    chart = charts.measured(report)["measured-decode"]
    lengths = [float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    shown = [int(x) for x in words(chart) if x.isdigit()]
    assert len(lengths) == len(shown) > 5
    ratios = [length / value for length, value in zip(lengths, shown, strict=True)]
    assert max(ratios) / min(ratios) < 1.005
    assert "fastattn, portable kernels, batch 32, call" in words(chart)
    assert "fastattn, portable kernels, batch 32, graph" not in words(chart)


def test_a_chart_follows_its_file(report: Any) -> None:
    before = charts.measured(report)
    assert charts.measured({**report, "results": []}) == {}
    for record in report["results"]:
        if record["implementation"] == "sdpa-cudnn" and "tflops" in record:
            record["tflops"] /= 2
        if record["case"].get("direction") == "backward":
            record.pop("peak_mib", None)
    after = charts.measured(report)
    changed = {name for name, chart in before.items() if after.get(name) != chart}
    assert changed == {"measured-forward", "measured-backward", "measured-memory-backward"}
    assert "measured-memory-backward" not in after


def test_a_curve_is_of_the_sweep_alone(report: Any) -> None:
    one = sweep("forward", 128, 16384, causal=True)
    before = charts.measured(report)["measured-forward"]
    for other in (replace(one, T_q=4096, T_k=4096), replace(one, H_k=1), replace(one, D=64, B=2)):
        record = {"case": other.to_dict(), "implementation": "sdpa-flash", "status": "timed"}
        report["results"].append({**record, "tflops": 1.0})
    assert charts.measured(report)["measured-forward"] == before


@pytest.mark.parametrize(
    ("clock", "direction", "limits"),
    [
        # 132 multiprocessors at 1 GHz: 2.1e12 exponentials a second, 512 operations each.
        (1000.0, "forward", ["exponentials 1081", "matrix product 793"]),
        (1000.0, "backward", ["matrix product 793"]),
        (None, "forward", ["matrix product 793"]),
    ],
)
def test_limits(report: Any, clock: float | None, direction: str, limits: list[str]) -> None:
    report["environment"]["gpu"]["max_sm_clock_mhz"] = clock
    said = words(charts.measured(report)[f"measured-{direction}"])
    found = {w for w in said if re.fullmatch(r"(exponentials|matrix product) \d+", w)}
    assert sorted(found - {"exponentials 541"}) == limits


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
    for word, (colour, *_), count in (
        ("100", charts.SHOWN["fastattn-triton"], 4),
        ("1000", charts.UNFUSED["sdpa-math"], 2),
    ):
        texts = (x for x in ElementTree.fromstring(chart).iter() if x.text == word)
        lines = {round(float(x.get("y", "")) - 4, 1) for x in texts}
        assert len(places(chart, colour)) == count
        assert {round(y, 1) for y in places(chart, colour)} <= lines


def test_memory_has_the_least_that_is_needed(report: Any) -> None:
    """o, dq, dk and dv of 16384 tokens, 2048 wide, in bf16, and lse in fp32 of 16 or 32 heads."""
    drawn = charts.measured(report)
    for name, tensors in (("forward", 1), ("backward", 4)):
        told = {w for w in words(drawn[f"measured-memory-{name}"]) if w.startswith("outputs and")}
        assert told == {f"outputs and lse {64 * tensors + lse}" for lse in (1, 2)}


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
    others = {"sdpa-flash": "flash-attn-3", "sdpa-cudnn": "flash-attn-2"}
    for record in report["results"]:
        record["implementation"] = others.get(record["implementation"], record["implementation"])
    said = words(charts.measured(report)["measured-forward"])
    assert {"FlashAttention-3", "flash-attn 2"} <= set(said) and "torch flash" not in said
    looks = [(colour, mark) for colour, mark, _ in (charts.SHOWN | charts.UNFUSED).values()]
    assert len({mark for _, mark in looks}) == len(looks)
