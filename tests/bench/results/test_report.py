"""The page of results and its script, by the files of the repository."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fastattn.bench.results import charts, tables
from fastattn.bench.results.report import empty, load, save

CHECKOUT = Path(__file__).resolve().parents[3]
RESULTS = CHECKOUT / "bench" / "results"
REPORT = "h100-2026-11-22.json"


def test_the_page_follows_its_files(tmp_path):
    folder = shutil.copytree(RESULTS, tmp_path / "results")
    tests = {"status": "finished", "passed": 10, "failed": 1}
    save(folder / REPORT, load(folder / REPORT) | {"tests": tests})
    told = tables.check(folder)
    assert "\n+Kinds of kernels verified on this GPU: 10 passed, 1 failed (finished)." in told
    assert "NVIDIA H100 80GB HBM3: 10 passed, 1 failed (finished)" in told
    tables.draw(folder)
    assert tables.check(folder) == ""


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


def test_charts_are_drawn_of_what_there_is(script, tmp_path):
    drawn = charts.measured(load(RESULTS / REPORT))
    files = "".join(f"{tmp_path / 'a' / name}.svg\n" for name in drawn)
    assert script("results_table.py", "--charts", RESULTS / REPORT, tmp_path / "a") == (
        0,
        files,
        "",
    )
    assert {path.stem: path.read_text() for path in (tmp_path / "a").iterdir()} == drawn
    path = tmp_path / "out.json"
    save(path, empty("command"))
    for text, said in (
        (path.read_text(), "has no figure that a chart shows"),
        ("x", "is not JSON"),
        ("[]", "is not a benchmark report of format 1"),
    ):
        path.write_text(text)
        code, _, error = script("results_table.py", "--charts", path, tmp_path / "b")
        assert code == 1 and f"{path.name} {said}" in error


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
