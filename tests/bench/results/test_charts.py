"""Charts say what their files say."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fastattn.bench.cases.case import sweep
from fastattn.bench.results import charts

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture
def report():
    return json.loads((RESULTS / "h100-2026-11-22.json").read_text(encoding="utf-8"))


def words(chart):
    return [x.text or "" for x in ElementTree.fromstring(chart).iter() if x.tag.endswith("text")]


def test_charts_name_their_gpu_and_no_wrong_figure_is_drawn(report):
    """The figures of our kernel in a graph were found wrong in this run."""
    wrong = [x for x in report["results"] if x["status"] == "wrong"]
    assert {x["implementation"] for x in wrong} == {"fastattn-triton"}
    for record in wrong:
        record["kv_gbps"] = record["tflops"] = 4600.0
    drawn = charts.measured(report)
    kinds = ["backward", "decode", "forward", "memory-backward", "memory-forward"]
    assert sorted(drawn) == [f"measured-{kind}" for kind in kinds]
    for chart in drawn.values():
        assert "measured, NVIDIA H100 80GB HBM3, 2026-11-22" in words(chart)
        # Bars are as long as their figures.
        lengths = [float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
        values = [int(x) for x in words(chart) if x.isdigit()]
        assert len(lengths) == len(values) > 5
        longest = max(range(len(values)), key=values.__getitem__)
        for length, value in zip(lengths, values, strict=True):
            assert length / lengths[longest] == pytest.approx(value / values[longest], abs=0.004)
    for direction, limits in {
        "forward": "matrix product 793",
        # o, dq, dk and dv of 16384 tokens, 2048 wide, in bf16, and lse in fp32 of 16 heads.
        "memory-forward": "outputs and lse 65",
        "memory-backward": "outputs and lse 257",
    }.items():
        said = words(drawn[f"measured-{direction}"])
        assert said[said.index("head dim 128, causal, 4096 tokens") + 1] == limits
    said = words(drawn["measured-decode"])
    calls = said.index("32 heads, 4096 keys, batch 32, call")
    graphs = said.index("32 heads, 4096 keys, batch 32, graph")
    ours = [n for n, word in enumerate(said) if word == "fastattn, portable kernels"]
    assert [n for n in ours if calls < n < graphs] and not [n for n in ours if n > graphs]


def test_a_chart_follows_its_file_and_shows_the_sweep_alone(report):
    before = charts.measured(report)
    assert charts.measured({**report, "results": []}) == {}
    one = sweep("forward", 128, 16384, causal=True)
    for other in (replace(one, T_q=4096, T_k=4096), replace(one, H_k=1), replace(one, D=64, B=2)):
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
