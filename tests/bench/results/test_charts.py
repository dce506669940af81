"""Charts say what their files say."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fastattn.bench.cases.case import sweep
from fastattn.bench.results import charts
from fastattn.bench.results.report import load
from fastattn.bench.time.environment import fingerprints

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
OUTLINED = "; outlined: kernels have changed since"


@pytest.fixture
def report():
    return load(RESULTS / "h100-2026-11-22.json")


def words(chart):
    return [x.text or "" for x in ElementTree.fromstring(chart).iter() if x.tag.endswith("text")]


def test_bars_are_as_long_as_figures_and_no_wrong_figure_is_drawn(report):
    """The figures of our kernel in a graph were found wrong in this run."""
    wrong = [x for x in report["results"] if x["status"] == "wrong"]
    assert {x["implementation"] for x in wrong} == {"fastattn-triton"}
    for record in wrong:
        record["kv_gbps"] = record["tflops"] = 4600.0
    drawn = charts.measured(report)
    assert set(drawn) == {f"measured-{name}" for name in charts.CHARTS}
    for chart in drawn.values():
        lengths = [float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
        values = [float(x) for x in words(chart) if re.fullmatch(r"[\d.]+", x)]
        assert len(lengths) == len(values) > 5
        for length, value in zip(lengths, values, strict=True):
            assert length / max(lengths) == pytest.approx(value / max(values), abs=0.004)
    for direction, limits in {
        "forward": "matrix product 793",
        # o, dq, dk and dv of 16384 tokens, 2048 wide, in bf16, and lse in fp32 of 16 heads.
        "memory-forward": "outputs and lse 65",
        "memory-backward": "outputs and lse 257",
    }.items():
        said = words(drawn[f"measured-{direction}"])
        assert said[said.index("head dim 128, causal, 4096 tokens") + 1] == limits
    said = words(drawn["measured-decode"])
    graphs = said[said.index("32 heads, 4096 keys, batch 32, graph") :]
    assert "torch cuDNN" in graphs and "fastattn, portable kernels" not in graphs
    assert words(drawn["measured-masks"])[-4:-2] == ["torch cuDNN", "3.39"]
    headings = [x for x in words(drawn["measured-padded"]) if x.endswith("full, 4096 tokens")]
    assert {x.partition(",")[0] for x in headings} == set(charts.LABELS.values())


def test_charts_name_their_commits_and_outline_changed_kernels(report):
    where = "measured, NVIDIA H100 80GB HBM3, 2026-11-22, at "
    for name, commits in {"masks": "4f8eb67", "forward": "415326a"}.items():
        assert words(charts.measured(report)[f"measured-{name}"])[1] == where + commits + OUTLINED
    report["environment"]["kernels"] = fingerprints() | {"hopper": "of older sources"}
    for record in report["results"]:
        if record["implementation"] == "fastattn-triton":
            record["commit"] = "4f8eb67"
    chart = charts.measured(report)["measured-forward"]
    assert words(chart)[1] == f"{where}415326a to 4f8eb67{OUTLINED}"
    portable, hopper = (charts.SHOWN[f"fastattn-{x}"][0] for x in ("triton", "hopper"))
    assert set(re.findall(r'stroke="(#\w+)"/><text', chart)) == {hopper} and portable in chart
    report["environment"]["kernels"] = fingerprints()
    assert OUTLINED not in charts.measured(report)["measured-forward"]


def test_a_chart_follows_its_file_and_shows_the_sweep_alone(report):
    before = charts.measured(report)
    assert charts.measured({**report, "results": []}) == {}
    one = sweep("forward", 128, 16384, causal=True)
    for other in (replace(one, T_q=4096, T_k=4096), replace(one, H_k=1), replace(one, D=64)):
        record = {"case": other.to_dict(), "implementation": "sdpa-flash", "status": "timed"}
        report["results"].append({**record, "tflops": 1.0})
    assert charts.measured(report) == before
    for record in report["results"]:
        if record["implementation"] == "sdpa-cudnn" and "tflops" in record:
            record["tflops"] /= 2
        if record["case"].get("direction") == "backward":
            record.pop("peak_mib", None)
    after = charts.measured(report)
    changed = {name for name, chart in before.items() if after.get(name) != chart}
    assert changed == {"measured-forward", "measured-backward", "measured-memory-backward"}
    assert "measured-memory-backward" not in after
