"""The page of results and its script, by the files of the repository."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fastattn.bench.cases.case import Case, sweep
from fastattn.bench.results import charts, tables
from fastattn.bench.results.report import empty, load, number, save

CHECKOUT = Path(__file__).resolve().parents[3]
RESULTS = CHECKOUT / "bench" / "results"
# A figure in prose: a number with a unit, or a part in words.
FIGURE = r"\d[\d.,]* ?(?:TFLOP|TF\b|[kMGT]i?B\b|[mu]?s\b|percent|%|times\b|tokens/s)"
FIGURE += r"|\ba (?:half|third|quarter|fifth|sixth|eighth)\b"


def test_the_page_follows_its_files(tmp_path):
    for name in ("notes.md", "h100-2026-11-22.json", "h100-2026-11-22-probes.json"):
        shutil.copy(RESULTS / name, tmp_path)
    path = tmp_path / "h100-2026-11-22.json"
    tests = {"status": "finished", "passed": 10, "failed": 1, "failures": ["one"]}
    save(path, load(path) | {"tests": tests})
    ran = tables.page(tmp_path).partition("## What has run where")[2].splitlines()
    gpu = "2026-11-22 | NVIDIA H100 80GB HBM3"
    of_run = "10 | 1 | not recorded | kinds of kernels verified: finished"
    assert f"| 4f8eb67 | {gpu} | {of_run} |" in ran
    # By commits, the newest first.
    commits = ["4f8eb67", "4f8eb67", "415326a", "0b37215", "7580bdc", "8f3b2af", "8f3b2af"]
    assert [line[2:9] for line in ran if gpu in line] == commits
    for text, said in {"x": "is not JSON", "[]": "is not a benchmark report of format 1"}.items():
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=f"other.json {said}"):
            tables.page(tmp_path)


def test_the_newest_commit_is_shown_and_compared_within_its_run():
    case = sweep("forward", 128, 4096, causal=True).to_dict()

    def record(name, ms, **more):
        timed = {"case": case, "implementation": name, "status": "timed", "ms": {"median": ms}}
        return timed | {"tflops": 120 / ms} | more

    dates = {"aaaaaaa": "2026-11-22T13", "bbbbbbb": "2026-11-22T12", "ddddddd": "2026-11-22T10"}
    newer, ours, older = ({"commit": commit} for commit in dates)
    results = [record("fastattn-hopper", 1.0, **ours), record("sdpa-flash", 3.0, **ours)]
    results += [record("sdpa-flash", 4.0, **newer), record("sdpa-cudnn", 5.0, **older)]
    results += [record("fastattn-hopper", 2.0, **older)]
    wrong = {"case": case, "implementation": "flex", "status": "wrong", "reason": "NaN"}
    results += [wrong, wrong | {"implementation": "xformers", "status": "cannot serve"}]
    results += [wrong | {"implementation": "fastattn-triton", **newer}]
    first = empty("one") | {"started": "2026-11-22T09", "results": results, "commits": dates}
    results = [record(name, 6.0) for name in ("fastattn-hopper", "fastattn-triton", "sdpa-flash")]
    then = empty("two") | {"started": "2026-11-22T11", "results": results}
    then["environment"] = {"commit": "c" * 40}
    for reports in ((first, then), (then, first)):
        text = tables.markdown(*reports)
        figures = "*120* bbbbbbb | *20* ccccccc | wrong | 24 | 30"
        assert f"| {case['name']} | {figures} |\n" in text
        ratios = "*fastattn-hopper* bbbbbbb | 6.00 (ccccccc) | 3.00 | 5.00 (ddddddd) | "
        assert f"| {case['name']} | {ratios} |" in text


def test_records_have_dated_commits_and_the_names_of_cases():
    """A probe of a plain call by other words would stand beside its case, newer or older."""
    own = re.compile(r"(plain, )?(forward|backward),( B \d+ H \d+ T \d+)? D \d+( causal| full)?")
    for data in tables.reports(RESULTS):
        ran = data["tests"] if isinstance(data["tests"], list) else []
        commits = {x["commit"] for x in [*data["results"], *ran] if "commit" in x}
        assert commits <= data.get("commits", {}).keys()
        for case in (record["case"] for record in data["results"]):
            assert own.fullmatch(case["name"]) is None
            if "D" in case:
                assert case["name"] == Case.of(case).name


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


def test_the_page_in_the_repository_agrees_with_its_files(script, monkeypatch, tmp_path):
    assert script("results_table.py", "--check") == (0, "", "")
    code, _, error = script("results_table.py", "--check", "--add", tmp_path / "none.json")
    assert code == 1 and "none.json" in error
    monkeypatch.setattr(tables, "page", lambda folder: "other")
    code, _, error = script("results_table.py", "--check")
    assert code == 1 and "README.md is not what the files say" in error


def test_a_run_says_that_there_is_no_gpu(tmp_path, monkeypatch, script):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = script("run_all.py", "--out", tmp_path / "out")
    assert code == 2 and error.startswith("no GPU") and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def read(path):
    return (CHECKOUT / path).read_text(encoding="utf-8")


def section(path, heading):
    return read(path).split(heading)[1].split("\n## ")[0]


def test_the_readme_has_the_newest_figures():
    """The figures of its chart, in a sentence, and no other."""
    groups = charts.beside_peers(*tables.reports(RESULTS))
    assert list(groups) == list(charts.OVERVIEW)
    ours = [records[0] for records in groups.values()]

    def times(case, peer):
        of_case = {x["implementation"]: x["ms"]["median"] for x in [*groups.values()][case]}
        return number(of_case[peer] / ours[case]["ms"]["median"])

    documents, window, unmasked = 0, 2, 4
    text = " ".join(read("README.md").split())
    flex, cudnn = ([times(x, peer) for x in (documents, window)] for peer in ("flex", "sdpa-cudnn"))
    said = f"{flex[0]} times as fast as FlexAttention on padded documents and {flex[1]} times in a "
    said += f"sliding window; {cudnn[0]} and {cudnn[1]} times as fast as torch's cuDNN attention"
    assert said in text
    assert re.findall(FIGURE, text) == [f"{x} times" for x in (*flex, cudnn[1])]
    assert float(times(unmasked, "sdpa-cudnn")) < 1 and "without a mask" in text
    assert set(re.findall(r"\b[0-9a-f]{7}\b", text)) == {record["commit"] for record in ours}
    dates = set(re.findall(r"\b\d{4}-\d\d-\d\d\b", text))
    assert {record["date"][:10] for record in ours} == dates
    assert ("have changed since" in text) == any(record["stale"] for record in ours)


def test_no_sentence_states_a_figure():
    """Tables and charts are drawn; a sentence would stay as it was."""
    pages = {"docs/performance.md": "## Measured"}
    pages["kernels/hopper/README.md"] = "## Results on an H100"
    notes = (RESULTS / "notes.md").read_text(encoding="utf-8")
    texts = [notes, *(section(*page) for page in pages.items())]
    assert [figure for text in texts for figure in re.findall(FIGURE, text)] == []
