"""The numeric tests of a full run: kernels against the error budget on a GPU, within a time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import outcomes
from .supervise import Process, ProcessGroup

# The most important first. None of them compiles for other GPUs.
FILES = (
    "kernels/test_descriptors.py",
    "functional/test_attention.py",
    "kernels/test_hopper_gpu.py",
    "kernels/test_hopper_gpu_fp8.py",
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
    log: Path,
    found: Path,
    seconds: float,
    *,
    start: Callable[..., Process] = ProcessGroup,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run pytest within a time: interrupt it shortly before the end, then kill it.

    Args:
        command: pytest and its arguments.
        log: file that its output is appended to.
        found: file of outcomes, see `outcomes`; a test with an outcome there is not run again.
        seconds: for everything.
        start: starts a process, given its command and log.
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
        plugin = ["-p", outcomes.__name__, "--outcomes", str(found), "--settled", str(settled)]
        process = start([*command, *plugin], log)
        status = None
        while process.poll() is None:
            spent = clock() - begin
            if spent > seconds:
                process.kill()
                break
            if status is None and spent > seconds - _GRACE:
                status = "the time was up"
                process.interrupt()
            sleep(0.2)
    code = process.poll()
    process.kill()
    by_test = outcomes.read(found)
    counts = Counter(by_test.values())
    ended = "finished" if code in (0, 1, _NO_TESTS_LEFT) else f"pytest ended with code {code}"
    return {
        "status": status or ended,
        "seconds": round(clock() - begin, 1),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(name for name, outcome in by_test.items() if outcome == "failed")[:40],
    }
