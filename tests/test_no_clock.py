"""No test depends on how fast the machine is, or on what else it has to do."""

import re
from pathlib import Path

import pytest

# In programs that a test runs in another process too, which are strings here.
CLOCKS = re.compile(
    r"\b(perf_counter|monotonic|process_time|thread_time|clock_gettime)(_ns)?\("
    r"|from time import (?!sleep$)|\btime\.time(_ns)?\b|\btimeit\b|datetime\.(now|utcnow|today)\b"
)
FILES = sorted(set(Path(__file__).parent.glob("**/*.py")) - {Path(__file__)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_test_reads_a_clock(path: Path) -> None:
    """Count compilations, launches or rounds instead, or give the code under test a fake clock."""
    found = [line for line in path.read_text().splitlines() if CLOCKS.search(line)]
    assert not found, f"{path.name} reads a clock: {found[0].strip()}"


@pytest.mark.parametrize(
    "line",
    [
        "begin = time.perf_counter()",
        "from time import monotonic",
        "from time import sleep, time",
        "from time import time",
        "clock = time.time",
        "if time.time() > end:",
        "assert datetime.now() < end",
        "seconds = timeit.timeit(run)",
    ],
)
def test_clocks_are_recognised(line: str) -> None:
    assert CLOCKS.search(line)


@pytest.mark.parametrize(
    "line",
    ["from time import sleep", "fake = SimpleNamespace(monotonic=lambda: 3.0)", "time.sleep(1)"],
)
def test_fake_clocks_are_allowed(line: str) -> None:
    assert not CLOCKS.search(line)
