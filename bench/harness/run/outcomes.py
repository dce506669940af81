"""A pytest plugin for runs that may be killed: it appends each outcome to a file as it comes.

    pytest -p fastattn.bench.run.outcomes --outcomes FILE --settled FILE ...

An outcome is a line of JSON. Failures are printed at once. Tests with an outcome are left out. A
worker whose CUDA context is lost exits, so that its later tests do not fail too; pytest-xdist then
starts another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..failures import LOST

if TYPE_CHECKING:
    import pytest


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
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


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
