"""Reports, tables and the page of results, from fake results; the page of the repository."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from fastattn.bench.cases import case as cases
from fastattn.bench.cases.figures import figures
from fastattn.bench.results import charts, tables
from fastattn.bench.results.report import Report, newest

CHECKOUT = Path(__file__).resolve().parents[3]
RESULTS = CHECKOUT / "bench" / "results"


def timed(case, implementation, ms):
    summary = {"median": ms, "p20": ms, "p80": ms, "least": ms, "samples": 5}
    record = {"case": case.to_dict(), "implementation": implementation, "status": "timed"}
    return {**record, "ms": summary, **figures(case, ms)}


@pytest.fixture
def report(tmp_path):
    """A report of a machine that does not exist, with round numbers."""
    folder = tmp_path / "results"
    folder.mkdir()
    report = Report.at(folder / "fake-2000-01-01.json", "python run_all.py --out x")
    gpu = {"name": "Imaginary GPU", "capability": "9.0", "driver": 1.0}
    clocks = {"sm_count": 100, "max_sm_clock_mhz": 1000.0}
    report.data |= {
        "started": "2000-01-01T00:00:00+00:00",
        "environment": {"gpu": {**gpu, **clocks}, "versions": {"torch": "0"}, "cudnn": 1},
        "ceilings": {"matmul_tflops": 500.0, "copy_gbps": 2000.0, "empty_ms": 0.001},
        "tests": {"status": "finished", "passed": 10, "failed": 0, "failures": []},
        "jobs": {"late": {"status": "not reached", "reason": "the time was up"}},
    }
    for T in (4096, 16384):
        for direction in ("forward", "backward"):
            case = cases.sweep(direction, 128, T, causal=True)
            ours, theirs = timed(case, "fastattn-triton", 2.0), timed(case, "sdpa-flash", 3.0)
            report.data["results"] += [ours, theirs]
    decode = timed(cases.decode(32, 4096), "fastattn-triton", 0.5)
    absent = {"status": "cannot serve", "reason": "flash_attn_interface is not installed"}
    peer = {"case": decode["case"], "implementation": "flash-attn-3", **absent}
    report.data["results"] += [decode, peer]
    report.save()
    return report


def test_a_report_is_read_back_and_gone_on_with(report):
    assert Report.load(report.path).data == report.data
    assert Report.at(report.path, "another command").data == report.data


def test_table_has_every_figure_and_every_gap(report):
    text = tables.markdown(report.data)
    case = cases.sweep("forward", 128, 4096, causal=True)
    assert f"| {case.name} | {figures(case, 2.0)['tflops']:.3g} |" in text
    # 3 ms against 2 ms, no cuDNN, no flex.
    assert f"| {case.name} | fastattn-triton | 1.50 |  |  |" in text
    assert "decode, GB/s of keys and values:" in text
    assert "flash-attn-3, cannot serve" in text
    assert "- late: not reached. the time was up" in text
    assert "10 passed, 0 failed" in text


def test_page_names_what_ran_where(report, tmp_path):
    nothing = tables.page(tmp_path)
    assert "There is no such file yet" in nothing
    assert nothing.count("| not run | not run |") == 5
    (report.path.parent / "notes.md").write_text("before\n<!-- tables -->\nbehind\n")
    text = tables.page(report.path.parent)
    assert "There is no such file yet" not in text
    ran = "Imaginary GPU: 10 passed, 0 failed (finished) | Imaginary GPU, 2000-01-01"
    assert f"| sm_90 | {ran} |" in text
    assert "| sm_80 | not run | not run |" in text
    assert text.startswith("before\n\n## Measured") and text.endswith("|\n\nbehind\n")


def test_of_several_runs_the_newest_figure_is_shown_with_its_commit(report):
    case = cases.sweep("forward", 128, 4096, causal=True)
    report.data["environment"]["commit"] = "0123456789"
    later = {**report.data, "started": "2001", "environment": {"commit": "abcdef012345"}}
    ours = timed(case, "fastattn-hopper", 1.0)
    wrong = {**timed(case, "fastattn-triton", 1.0), "status": "wrong", "reason": "too far off"}
    later["results"] = [ours | {"commit": "fedcba9"}, wrong, timed(case, "sdpa-flash", 1.5)]
    text = tables.markdown(later, report.data)
    # The kernels of neither commit are known, so that they may have changed.
    hopper, triton = (figures(case, ms)["tflops"] for ms in (1.0, 2.0))
    flash = f"{figures(case, 1.5)['tflops']:.0f}"
    row = f"| {case.name} | *{hopper:.0f}* fedcba9 | *{triton:.0f}* 0123456 | {flash} |"
    assert row in text
    # What `auto` takes there.
    assert f"| {case.name} | fastattn-hopper | 1.50 |  |  |" in text
    assert sum(x["case"]["name"] == case.name for x in newest([later, report.data])) == 3


def run_script(monkeypatch, name, *arguments):
    """The exit code of a script of bench/."""
    path = str(CHECKOUT / "bench" / name)
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    return ended.value.code


def test_the_page_in_the_repository_agrees_with_its_files(monkeypatch):
    assert run_script(monkeypatch, "results_table.py", "--check") == 0


@pytest.mark.parametrize("changed", ["page", "file"])
def test_check_fails_on_a_figure_that_was_changed(report, changed, monkeypatch, capsys):
    folder = report.path.parent
    assert run_script(monkeypatch, "results_table.py", "--results", folder) == 0
    assert tables.check(folder) == ""
    readme = folder / "README.md"
    if changed == "page":
        assert "| 1.50 |" in readme.read_text()
        readme.write_text(readme.read_text().replace("| 1.50 |", "| 1.60 |", 1))
    else:
        report.data["results"][0]["tflops"] *= 2
        report.save()
    written = readme.read_text()
    assert run_script(monkeypatch, "results_table.py", "--results", folder, "--check") == 1
    assert "--- README.md" in capsys.readouterr().err
    assert readme.read_text() == written


def test_charts_are_drawn_of_what_there_is(report, monkeypatch, capsys, tmp_path):
    def draw(folder):
        return run_script(monkeypatch, "results_table.py", "--charts", report.path, folder)

    assert draw(tmp_path / "a") == 0
    names = ["measured-forward", "measured-backward", "measured-decode"]
    files = [str(tmp_path / "a" / f"{name}.svg") for name in names]
    assert capsys.readouterr().out.splitlines() == files
    assert {p.name: p.read_text() for p in (tmp_path / "a").iterdir()} == {
        f"{name}.svg": chart for name, chart in charts.measured(report.data).items()
    }
    assert not (report.path.parent / "README.md").exists()
    report.data["results"] = []
    report.save()
    assert draw(tmp_path / "b") == 1
    assert "has no figure that a chart shows" in capsys.readouterr().err
    for text, words in (("x", "is not JSON"), ("[]", "is not a benchmark report of format 1")):
        report.path.write_text(text)
        assert draw(tmp_path / "c") == 1
        assert f"{report.path.name} {words}" in capsys.readouterr().err
        assert not (tmp_path / "c").exists()


def test_a_run_says_that_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_script(monkeypatch, "run_all.py", "--out", tmp_path / "out") == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_figures_in_the_readme_are_on_the_page():
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Results")[1].split("## ")[0]
    claims = section.partition("fused\nkernels")[2].partition("On your own")[0]
    figures = re.findall(r"\b\d{2,4}\b", claims.replace("torch 2.11", ""))
    shown = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert len(figures) > 12
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", shown)] == []
