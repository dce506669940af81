"""Reports, tables and the page of results, from fake results; the page of the repository."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn.bench.cases import case as cases
from fastattn.bench.cases.figures import figures
from fastattn.bench.results import charts, tables
from fastattn.bench.results.report import empty, load, newest, save

CHECKOUT = Path(__file__).resolve().parents[3]
RESULTS = CHECKOUT / "bench" / "results"
CASE = cases.sweep("forward", 128, 4096, causal=True)


def timed(case, implementation, ms):
    summary = {"median": ms, "p20": ms, "p80": ms, "least": ms, "samples": 5}
    record = {"case": case.to_dict(), "implementation": implementation, "status": "timed"}
    return {**record, "ms": summary, **figures(case, ms)}


@pytest.fixture
def report(tmp_path):
    """A report of a machine that does not exist, with round numbers."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "notes.md").write_text("before\n<!-- tables -->\nbehind\n")
    gpu = {"name": "Imaginary GPU", "capability": "9.0", "driver": 1.0}
    data = empty("python run_all.py --out x") | {
        "started": "2000-01-01T00:00:00+00:00",
        "environment": {"gpu": gpu, "versions": {"torch": "0"}, "cudnn": 1},
        "ceilings": {"matmul_tflops": 500.0, "copy_gbps": 2000.0, "empty_ms": 0.001},
        "tests": {"status": "finished", "passed": 10, "failed": 0, "failures": []},
        "jobs": {"late": {"status": "not reached", "reason": "the time was up"}},
    }
    for direction in ("forward", "backward"):
        case = cases.sweep(direction, 128, 4096, causal=True)
        data["results"] += [timed(case, "fastattn-triton", 2.0), timed(case, "sdpa-flash", 3.0)]
    decode = timed(cases.decode(32, 4096), "fastattn-triton", 0.5)
    absent = {"status": "cannot serve", "reason": "flash_attn_interface is not installed"}
    data["results"] += [decode, {**decode, "implementation": "flash-attn-3", **absent}]
    path = folder / "fake-2000-01-01.json"
    save(path, data)
    assert load(path) == data
    return SimpleNamespace(path=path, data=data)


def test_the_page_has_every_figure_and_every_gap_and_what_ran_where(report):
    text = tables.page(report.path.parent)
    assert text.startswith("before\n\n## Measured") and text.endswith("|\n\nbehind\n")
    assert text.count("| not run | not run |") == 4
    ran = "Imaginary GPU: 10 passed, 0 failed (finished) | Imaginary GPU, 2000-01-01"
    for said in (
        f"| {CASE.name} | {figures(CASE, 2.0)['tflops']:.3g} |",
        # 3 ms against 2 ms, no cuDNN, no flex.
        f"| {CASE.name} | fastattn-triton | 1.50 |  |  |",
        "decode, GB/s of keys and values:",
        "flash-attn-3, cannot serve",
        "- late: not reached. the time was up",
        f"| sm_90 | {ran} |",
    ):
        assert said in text


def test_of_several_runs_the_newest_figure_is_shown_with_its_commit(report):
    report.data["environment"]["commit"] = "0123456789"
    later = {**report.data, "started": "2001", "environment": {"commit": "abcdef012345"}}
    ours = timed(CASE, "fastattn-hopper", 1.0) | {"commit": "fedcba9"}
    wrong = {**timed(CASE, "fastattn-triton", 1.0), "status": "wrong", "reason": "too far off"}
    later["results"] = [ours, wrong, timed(CASE, "sdpa-flash", 1.5)]
    text = tables.markdown(later, report.data)
    # The kernels of neither commit are known, so that they may have changed.
    hopper, triton, flash = (f"{figures(CASE, ms)['tflops']:.0f}" for ms in (1.0, 2.0, 1.5))
    assert f"| {CASE.name} | *{hopper}* fedcba9 | *{triton}* 0123456 | {flash} |" in text
    # What `auto` takes there.
    assert f"| {CASE.name} | fastattn-hopper | 1.50 |  |  |" in text
    assert sum(x["case"]["name"] == CASE.name for x in newest([later, report.data])) == 3


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs a script of bench/; its exit code, and what it wrote."""

    def run(name, *arguments):
        path = str(CHECKOUT / "bench" / name)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_page_in_the_repository_agrees_with_its_files(script, monkeypatch):
    assert script("results_table.py", "--check") == (0, "", "")
    monkeypatch.setattr(tables, "check", lambda folder: f"differs: {folder.name}")
    assert script("results_table.py", "--check") == (1, "", "differs: results\n")


def test_a_page_is_checked_by_its_files(report):
    folder = report.path.parent
    tables.draw(folder)
    assert tables.check(folder) == ""
    (folder / "README.md").write_text(tables.page(folder).replace("| 1.50 |", "| 1.60 |", 1))
    assert "\n-| backward-B4-H16-T4096-D128-causal | fastattn-triton | 1.60" in tables.check(folder)


def test_charts_are_drawn_of_what_there_is(report, script, tmp_path):
    def draw(folder):
        return script("results_table.py", "--charts", report.path, tmp_path / folder)

    names = ["measured-forward", "measured-backward", "measured-decode"]
    files = "".join(f"{tmp_path / 'a' / name}.svg\n" for name in names)
    assert draw("a") == (0, files, "")
    assert {p.name: p.read_text() for p in (tmp_path / "a").iterdir()} == {
        f"{name}.svg": chart for name, chart in charts.measured(report.data).items()
    }
    assert not (report.path.parent / "README.md").exists()
    save(report.path, report.data | {"results": []})
    assert draw("b") == (1, "", f"{report.path} has no figure that a chart shows\n")
    for text, said in (("x", "is not JSON"), ("[]", "is not a benchmark report of format 1")):
        report.path.write_text(text)
        code, _, error = draw("c")
        assert code == 1 and f"{report.path.name} {said}" in error
        assert not (tmp_path / "c").exists()


def test_a_run_says_that_there_is_no_gpu(tmp_path, monkeypatch, script):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = script("run_all.py", "--out", tmp_path / "out")
    assert code == 2 and error.startswith("no GPU") and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_figures_in_the_readme_are_on_the_page():
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Results")[1].split("## ")[0]
    claims = section.partition("fused\nkernels")[2].partition("On your own")[0]
    figures = re.findall(r"\b\d{2,4}\b", claims.replace("torch 2.11", ""))
    shown = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert len(figures) > 12
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", shown)] == []
