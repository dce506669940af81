"""Numeric tests of a full run: kernels against the error budget on a GPU, within a time.

As a pytest plugin, it appends each outcome to a file as a line of JSON, for runs that may be
killed, and skips tests with an outcome. A worker with a lost CUDA context exits, so that its later
tests do not fail; pytest-xdist starts another.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .failures import LOST

if TYPE_CHECKING:
    import pytest

# The most important first, without compilation for other GPUs.
FILES = (
    "kernels/test_descriptors.py",
    "functional/test_attention.py",
    "kernels/test_hopper_gpu.py",
    "kernels/test_one_pass.py",
    "ops/test_ecosystem.py",
    "generation/test_graph.py",
    "ops/test_attend.py",
    "ops/test_attend_hopper.py",
    "functional/test_decode.py",
    "kernels/test_mask.py",
    "kernels/test_key_extents.py",
)
# Variables: the file of outcomes, and the number of its lines from earlier runs.
OUTCOMES, SETTLED = "FASTATTN_TEST_OUTCOMES", "FASTATTN_TESTS_SETTLED"
_LONGEST = 4000  # characters of a failure


def command(checkout: Path) -> list[str]:
    """pytest over FILES in order, in parallel if pytest-xdist is installed."""
    files = [str(checkout / "tests" / file) for file in FILES]
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default", "-p", __name__]
    if find_spec("xdist") is not None:
        options += ["-n", str(min(12, os.cpu_count() or 1)), "--maxschedchunk", "1"]
    if find_spec("pytest_timeout") is not None:
        options += ["--timeout", "60", "--timeout-method", "thread"]
    return [sys.executable, "-m", "pytest", *files, *options]


def variables(path: Path) -> dict[str, str]:
    """Settings of the plugin for a run that continues a file of outcomes."""
    path.touch()
    lines = path.read_text(encoding="utf-8").count("\n")
    return {OUTCOMES: str(path), SETTLED: str(lines)}


def summary(path: Path, code: int | None) -> dict[str, Any]:
    """Counts of a file's outcomes, names of failures, and how the last run ended.

    code: pytest's exit code; None: its time was up.
    """
    outcomes = read(path)
    counts = Counter(outcomes.values())
    ended = "finished" if code in (0, 1, 5) else f"pytest ended with code {code}"
    return {
        "status": "the time was up" if code is None else ended,
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(name for name, verdict in outcomes.items() if verdict == "failed")[:40],
    }


def read(path: Path, lines: int | None = None) -> dict[str, str]:
    """Outcomes by test, "passed", "failed" or "skipped"; a failure outweighs a pass."""
    outcomes: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines()[:lines]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut by a kill
        if outcomes.get(entry["test"]) != "failed":
            outcomes[entry["test"]] = entry["outcome"]
    return outcomes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    settled = read(Path(os.environ[OUTCOMES]), int(os.environ[SETTLED]))
    items[:] = [item for item in items if item.nodeid not in settled]


_failed = False  # in the current test


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failed
    _failed |= report.failed
    # xdist's workers report to their controller, which writes.
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    entry = {"test": report.nodeid, "outcome": report.outcome}
    if report.failed:
        entry["why"] = report.longreprtext[-_LONGEST:]
    with Path(os.environ[OUTCOMES]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")


def pytest_runtest_logfinish() -> None:
    global _failed
    failed, _failed = _failed, False
    if failed and _device_is_lost():
        sys.stdout.flush()
        os._exit(LOST)


def _device_is_lost() -> bool:
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except Exception:
        return True
    return False
