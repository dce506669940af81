"""Charts say what their files say."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fastattn.bench.cases.case import padded, sweep
from fastattn.bench.results import charts
from fastattn.bench.results.report import load
from fastattn.bench.time.environment import fingerprints

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


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
    drawn = {name.partition("-")[2]: chart for name, chart in charts.measured(report).items()}
    assert drawn.keys() == charts.CHARTS.keys()
    said = {name: words(chart) for name, chart in drawn.items()}
    for name, chart in drawn.items():
        lengths = [float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
        values = [float(x) for x in said[name] if re.fullmatch(r"[\d.]+", x)]
        shares = [value / max(values) for value in values]
        assert len(values) > 5
        assert [x / max(lengths) for x in lengths] == pytest.approx(shares, abs=0.004)
    # o, dq, dk and dv of 16384 tokens, 2048 wide, in bf16, and lse in fp32 of 16 heads: MiB.
    lse = ["outputs and lse", "65"], ["outputs and lse", "257"]
    limits = {"forward": ["a matrix product", "793"], "decode": ["a copy", "3022"]}
    for name, limit in {**limits, "memory-forward": lse[0], "memory-backward": lse[1]}.items():
        sizes = next(x for x in said[name] if x.startswith(("head dim 128, causal", "32 heads")))
        assert said[name][said[name].index(sizes) + 1 :][:2] == limit
    graphs = said["decode"][said["decode"].index("32 heads, 4096 keys, batch 32, graph") :]
    assert "torch cuDNN" in graphs and "fastattn, portable kernels" not in graphs
    assert "causal, window of 1024, 8192 tokens" in said["masks"] and "3.39" in said["masks"]
    assert {f"{x}, full, 4096 tokens" for x in charts.LABELS.values()} < set(said["padded"])


def test_charts_name_their_commits_and_outline_changed_kernels(report):
    where = "measured, NVIDIA H100 80GB HBM3, 2026-11-22, at "
    changed = "; outlined: kernels have changed since"
    source = words(charts.measured(report)["measured-masks"])[1]
    assert source == f"{where}4f8eb67{changed}"
    report["environment"]["kernels"] = fingerprints() | {"hopper": "of older sources"}
    for record in report["results"]:
        if record["implementation"] == "fastattn-triton":
            record["commit"] = "4f8eb67"
    chart = charts.measured(report)["measured-forward"]
    assert words(chart)[1] == f"{where}415326a to 4f8eb67{changed}"
    hopper = charts.SHOWN["fastattn-hopper"][0]
    assert set(re.findall(r'<rect [^>]*fill-opacity[^>]*stroke="(#\w+)"', chart)) == {hopper}


def test_a_chart_follows_its_file_and_shows_the_sweep_alone(report):
    before = charts.measured(report)
    assert charts.measured({**report, "results": []}) == {}
    one = sweep("forward", 128, 16384, causal=True)
    changes = {"T_q": 4096}, {"H_k": 1}, {"D": 64}, {"option": "sinks"}, {"dtype": "float16"}
    others = [replace(one, **change) for change in changes]
    for other in (*others, padded("forward_backward", "half", 4096, causal=False)):
        record = {"case": other.to_dict(), "implementation": "sdpa-flash", "status": "timed"}
        report["results"].append({**record, "tflops": 1.0, "ms": {"median": 1.0}})
    assert charts.measured(report) == before
    kept = [x for x in report["results"] if x["case"].get("direction") != "backward"]
    gone = before.keys() - charts.measured({**report, "results": kept}).keys()
    assert gone == {"measured-backward", "measured-memory-backward"}


def test_the_overview_sets_the_default_beside_its_peers_in_one_run(report):
    def group(*reports):
        said = words(charts.overview(*reports))
        headings = [i for i, x in enumerate(said) if x.startswith(tuple(charts.OVERVIEW))]
        assert len(headings) == len(charts.OVERVIEW)
        return said[headings[1] : headings[2]]

    padding, ours = [*charts.OVERVIEW][1], ["fastattn", "1"]
    case = charts.OVERVIEW[padding].to_dict()
    assert group(report) == [f"{padding}; fastattn: 3.43 ms", *ours, "torch cuDNN", "3.85"]
    assert "outlined" in words(charts.overview(report))[1]

    def again(name, ms):
        record = {"case": case, "implementation": name, "status": "timed", "ms": {"median": ms}}
        report["results"].append(record | {"commit": "415326a"})  # another run, an earlier one

    for name in ("flex", "fastattn-hopper"):
        again(name, 1.0)
    assert group(report) == [f"{padding}; fastattn: 3.43 ms", *ours, "torch cuDNN", "3.85"]
    again("fastattn", 2.0)
    assert group(report) == [f"{padding}; fastattn: 2 ms", *ours, "FlexAttention", "0.5"]
    none = [x for x in report["results"] if x["case"].get("family") != "padded"]
    assert len(charts.beside_peers({**report, "results": none})) == len(charts.OVERVIEW) - 2
