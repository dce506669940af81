"""The numeric tests of a full run: kernels against the error budget on a GPU, within a time.

    pytest -p fastattn.bench.time.numeric_tests --outcomes FILE --settled FILE ...

As a plugin of pytest, for runs that may be killed, it appends each outcome to a file as it comes, a
line of JSON, and prints failures at once. Tests with an outcome are left out. A worker whose CUDA
context is lost exits, so that its later tests do not fail too; pytest-xdist then starts another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .failures import LOST
from .supervise import Process

if TYPE_CHECKING:
    import pytest

# The most important first. None of them compiles for other GPUs.
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
# Seconds that pytest gets to write its summary.
_GRACE = 15.0
_NO_TESTS_LEFT = 5


def command(checkout: Path) -> list[str]:
    """pytest over FILES, in order, in parallel where pytest-xdist is installed."""
    files = [str(checkout / "tests" / file) for file in FILES]
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
    if find_spec("xdist") is not None:
        options += ["-n", str(min(12, os.cpu_count() or 1)), "--maxschedchunk", "1"]
    if find_spec("pytest_timeout") is not None:
        options += ["--timeout", "60", "--timeout-method", "thread"]
    return [sys.executable, "-m", "pytest", *files, *options]


def run(
    command: Sequence[str],
    found: Path,
    seconds: float,
    *,
    start: Callable[[list[str]], Process],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run pytest within a time: interrupt it shortly before the end, then kill it.

    Args:
        command: pytest and its arguments.
        found: file of outcomes; a test with an outcome there is not run again.
        seconds: for everything.
        start: starts a process, given its command.
        sleep, clock: of the host.

    Returns:
        status ("finished", "the time was up" or the exit code), passed, failed, skipped, and
        failures, the names of failed tests: of this call and the earlier ones.
    """
    begin = clock()
    with tempfile.TemporaryDirectory() as folder:
        # Every worker that xdist starts must leave out the same tests.
        settled = Path(folder) / "settled.jsonl"
        if found.exists():
            shutil.copy(found, settled)
        plugin = ["-p", __name__, "--outcomes", str(found), "--settled", str(settled)]
        process = start([*command, *plugin])
        status = None
        while process.poll() is None and clock() - begin <= seconds:
            if status is None and clock() - begin > seconds - _GRACE:
                status = "the time was up"
                process.interrupt()
            sleep(0.2)
    code = process.poll()
    process.kill()
    by_test = read(found)
    counts = Counter(by_test.values())
    ended = "finished" if code in (0, 1, _NO_TESTS_LEFT) else f"pytest ended with code {code}"
    return {
        "status": status or ended,
        "seconds": round(clock() - begin, 1),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(name for name, outcome in by_test.items() if outcome == "failed")[:40],
    }


def read(path: Path) -> dict[str, str]:
    """Outcomes by test, "passed", "failed" or "skipped"; a failure outweighs a pass."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut by a kill
        if found.get(entry["test"]) != "failed":
            found[entry["test"]] = entry["outcome"]
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", metavar="FILE", help="JSON lines to append outcomes to")
    group.addoption("--settled", metavar="FILE", help="JSON lines of tests to leave out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_LostDevice())
    path = config.getoption("outcomes")
    # Workers of xdist report to their controller, which writes.
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config, Path(path)))
        # A process started in the background of a shell ignores SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("settled")
    settled = read(Path(path)) if path else {}
    left_out = [item for item in items if item.nodeid in settled]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in settled]


class _Writer:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}\n")


class _LostDevice:
    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if self._failed and _device_is_lost():
            sys.stdout.flush()
            os._exit(LOST)
        self._failed = False


def _device_is_lost() -> bool:
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except Exception:
        return True
    return False
