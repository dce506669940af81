"""The numeric tests of a full run: they resume, and a lost device ends one process alone."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from fastattn.bench.time import numeric_tests
from fastattn.bench.time.failures import LOST

CHECKOUT = Path(__file__).resolve().parents[3]


TESTS = """
import pytest, torch
def test_good(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x == 1
@pytest.mark.skip
def test_absent(): pass
def test_last():
    LAST
def test_innocent(): pass
"""


def test_a_second_call_goes_on_with_the_tests_that_have_no_outcome(tmp_path, monkeypatch, capsys):
    """The first is interrupted in a test; then a test loses the device, which ends its process."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    file, path = tmp_path / "test_it.py", tmp_path / "tests.jsonl"
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # It would be for good.
    monkeypatch.setattr(numeric_tests.os, "_exit", lambda code: pytest.exit("lost", code))

    def run(last):
        file.write_text(TESTS.replace("LAST", last))
        sys.modules.pop("test_it", None)
        for name, value in numeric_tests.variables(path).items():
            monkeypatch.setenv(name, value)
        options = ["-c", str(tmp_path / "pytest.ini"), "--import-mode=importlib", "-q"]
        plugins = ["-p", numeric_tests.__name__, "-p", "no:cacheprovider"]
        code = pytest.main([*options, *plugins, str(file)])
        return numeric_tests.summary(path, int(code))

    said = run("raise KeyboardInterrupt")
    assert said["status"] == "pytest ended with code 2"
    assert (said["passed"], said["failed"], said["skipped"]) == (2, 1, 1)
    assert "assert 2 == 1" in path.read_text()

    def lost():
        raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    said = run("raise RuntimeError('illegal access')")
    assert said["status"] == f"pytest ended with code {LOST}"
    assert [name.partition("::")[2] for name in said["failures"]] == ["test_bad[2]", "test_last"]
    capsys.readouterr()
    said = run("pass")
    assert (said["status"], said["passed"], said["failed"]) == ("finished", 3, 2)
    assert "1 passed" in capsys.readouterr().out
    assert run("pass")["status"] == "finished"  # no test is left


def test_a_line_that_a_kill_has_cut_is_no_outcome(tmp_path):
    path = tmp_path / "tests.jsonl"
    lines = [{"test": "a", "outcome": "failed"}, {"test": "a", "outcome": "passed"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "b", "outc')
    assert numeric_tests.read(path) == {"a": "failed"}


def test_the_tests_that_are_run_exist_and_compile_for_no_other_gpu():
    files = [Path(word) for word in numeric_tests.command(CHECKOUT) if word.endswith(".py")]
    assert files == [CHECKOUT / "tests" / name for name in numeric_tests.FILES]
    for file in files:
        assert not re.search(r"compile_pool\b[,:)]", file.read_text(encoding="utf-8"))
