"""Reports, tables, the page of results and what charts show, from fake results."""

import json
import os
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastattn.bench import cases
from fastattn.bench.figures import figures
from fastattn.bench.results import charts, page, series
from fastattn.bench.results.report import Report, markdown

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPT = CHECKOUT / "bench" / "results_table.py"


def timed(case, implementation, ms):
    summary = {"median": ms, "p20": ms, "p80": ms, "least": ms, "samples": 5}
    record = {"case": case.to_dict(), "implementation": implementation, "status": "timed"}
    return {**record, "ms": summary, **figures(case, ms)}


@pytest.fixture
def report(tmp_path):
    """A report of a machine that does not exist, with round numbers."""
    folder = tmp_path / "results"
    folder.mkdir()
    report = Report.create(folder / "fake-2000-01-01.json", "python run_all.py --out x")
    report.data["started"] = "2000-01-01T00:00:00+00:00"
    report.data["environment"] = {
        "gpu": {
            "name": "Imaginary GPU",
            "capability": "9.0",
            "driver": 1.0,
            "sm_count": 100,
            "max_sm_clock_mhz": 1000.0,
        },
        "versions": {"torch": "0"},
        "cudnn": 1,
    }
    report.data["ceilings"] = {"matmul_tflops": 500.0, "copy_gbps": 2000.0, "empty_ms": 0.001}
    report.data["tests"] = {"status": "finished", "passed": 10, "failed": 0, "failures": []}
    results = report.data["results"]
    for T in (4096, 16384):
        for direction in ("forward", "backward"):
            case = cases.sweep(direction, 128, T, causal=True)
            results.append(timed(case, "fastattn-triton", 2.0))
            results.append(timed(case, "sdpa-flash", 3.0))
    results.append(timed(cases.decode(32, 4096), "fastattn-triton", 0.5))
    results.append(
        {
            "case": cases.decode(32, 4096).to_dict(),
            "implementation": "flash-attn-3",
            "status": "cannot serve",
            "reason": "flash_attn_interface is not installed",
        }
    )
    report.data["jobs"] = {"late": {"status": "not reached", "reason": "the time was up"}}
    report.save()
    return report


def test_reports_are_read_back(report):
    assert Report.load(report.path).data == report.data


def test_a_write_that_fails_leaves_the_old_file(report, monkeypatch):
    before = report.path.read_text()

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    report.data["results"] = []
    with pytest.raises(OSError, match="no space left"):
        report.save()
    assert report.path.read_text() == before
    assert [p.name for p in report.path.parent.iterdir()] == [report.path.name]


@pytest.mark.parametrize("text", ["[]", '{"format": 99}'])
def test_other_files_are_no_reports(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a benchmark report of format 1"):
        Report.load(path)


def test_table_has_every_figure_and_every_gap(report):
    text = markdown(report.data)
    case = cases.sweep("forward", 128, 4096, causal=True)
    tflops = figures(case, 2.0)["tflops"]
    assert f"| {case.name} | {tflops:.3g} |" in text
    assert f"| {case.name} | 1.50 |  |  |" in text  # 3 ms against 2 ms, no cuDNN, no flex
    assert "decode, GB/s of keys and values:" in text
    assert "flash-attn-3, cannot serve" in text
    assert "- late: not reached. the time was up" in text
    assert "10 passed, 0 failed" in text


def test_page_without_files_says_that_nothing_was_measured(tmp_path):
    text = page.page(tmp_path)
    assert "There is no such file yet" in text
    assert text.count("| not run | not run |") == 5


def test_page_names_what_ran_where(report):
    text = page.page(report.path.parent)
    assert "There is no such file yet" not in text
    ran = "Imaginary GPU: 10 passed, 0 failed (finished) | Imaginary GPU, 2000-01-01"
    assert f"| sm_90 | {ran} |" in text
    assert "| sm_80 | not run | not run |" in text


def test_page_has_what_was_measured_outside_a_full_run(tmp_path):
    (tmp_path / "probes").mkdir()
    name = "h100-2026-11-22.json"
    data = json.loads((CHECKOUT / "bench" / "results" / "probes" / name).read_text())
    (call, *_), data["calls"] = data["calls"], data["calls"][:1]
    same = {"B": 1, "H": 2, "Hk": 2, "T": 3, "D": 4, "causal": True}
    call["rows"] += [
        {"job": "fwd", "name": implementation, **same, "ms": 1.0, "tflops": tflops}
        for implementation, tflops in (("triton", 111.4), ("cudnn", 222.0), ("triton", 333.0))
    ]
    (tmp_path / "probes" / name).write_text(json.dumps(data))
    text = page.page(tmp_path)
    assert "| forward | causal | 1 | 2 | 3 | 4 | 333 |  |  |  |  | 222 |" in text
    assert "| sm_90 | NVIDIA H100 80GB HBM3, 2026-11-22: in parts, see above | NVIDIA" in text


def test_the_page_in_the_repository_agrees_with_its_files():
    assert page.check(CHECKOUT / "bench" / "results") == ""


def run_script(monkeypatch, *arguments):
    """The exit code of the script."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_check_fails_on_a_figure_that_was_changed(report, monkeypatch, capsys):
    folder = report.path.parent
    assert run_script(monkeypatch, "--results", folder) == 0
    assert page.check(folder) == ""
    readme = folder / "README.md"
    text = readme.read_text()
    assert "| 1.50 |" in text
    readme.write_text(text.replace("| 1.50 |", "| 1.60 |", 1))
    assert run_script(monkeypatch, "--results", folder, "--check") == 1
    told = capsys.readouterr().err
    assert "+" in told and "1.50" in told


def test_check_fails_on_results_that_were_changed(report):
    folder = report.path.parent
    page.draw(folder)
    data = json.loads(report.path.read_text())
    data["results"][0]["tflops"] *= 2
    report.path.write_text(json.dumps(data))
    assert page.check(folder) != ""


def test_charts_are_drawn_of_what_there_is(report, monkeypatch, capsys, tmp_path):
    assert run_script(monkeypatch, "--charts", report.path, tmp_path / "a") == 0
    names = ["measured-forward", "measured-backward", "measured-decode"]
    files = [str(tmp_path / "a" / f"{name}.svg") for name in names]
    assert capsys.readouterr().out.splitlines() == files
    assert {p.name: p.read_text() for p in (tmp_path / "a").iterdir()} == {
        f"{name}.svg": chart for name, chart in charts.measured(report.data).items()
    }
    assert not (report.path.parent / "README.md").exists()
    report.data["results"] = []
    report.save()
    assert run_script(monkeypatch, "--charts", report.path, tmp_path / "b") == 1
    assert "has no figure that a chart shows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [("x", "other.json is not JSON"), ("{}", "other.json is not a benchmark report of format 1")],
)
def test_charts_of_other_files_are_refused(monkeypatch, capsys, tmp_path, text, words):
    (tmp_path / "other.json").write_text(text)
    assert run_script(monkeypatch, "--charts", tmp_path / "other.json", tmp_path / "a") == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_series_of_the_sweep(report):
    one = cases.sweep("forward", 128, 16384, causal=True)
    for other in (replace(one, T_q=4096, T_k=4096), replace(one, H_k=1), replace(one, D=64, B=2)):
        report.data["results"].append(timed(other, "sdpa-flash", 3.0))
    panels = series.sweep_series(report.data, "forward")
    assert list(panels) == [(128, True)]
    assert [x for x, _ in panels[128, True]["sdpa-flash"]] == [4096, 16384]


def test_limits(report):
    # 100 multiprocessors at 1 GHz: 1.6e12 exponentials a second, 512 operations each.
    found = series.limits(report.data, 128, "forward")
    assert found == {"matrix product": 500.0, "exponentials": pytest.approx(819.2)}
    assert series.limits(report.data, 128, "backward") == {"matrix product": 500.0}


def test_figures_in_the_readme_are_on_the_page():
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Results")[1].split("## ")[0]
    claims = section.partition("fused\nkernels")[2].partition("On your own")[0]
    figures = re.findall(r"\b\d{2,4}\b", claims.replace("torch 2.11", ""))
    shown = (CHECKOUT / "bench" / "results" / "README.md").read_text(encoding="utf-8")
    assert len(figures) > 12
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", shown)] == []
