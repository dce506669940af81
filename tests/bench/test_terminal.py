"""`pytest bench` on a fake GPU: what it prints, and how it ends when the context is lost."""

import os
import subprocess
import sys
from pathlib import Path

from fastattn.bench.terminal import Row, estimate, table

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_implementations_are_listed_by_case_beside_the_best_peer():
    rows = [
        Row("a", "sdpa-math", 8.0, 12.5, "TFLOP/s"),
        Row("a", "fastattn-triton", 1.0, 100.0, "TFLOP/s"),
        Row("b", "fastattn-triton", 0.5, 2000.0, "GB/s"),
        Row("a", "sdpa-flash", 2.0, 50.0, "TFLOP/s"),
    ]
    found = [line.split() for line in table(rows)]
    assert [line[0] for line in found] == [
        "a",
        "fastattn-triton",
        "sdpa-flash",
        "sdpa-math",
        "b",
        "fastattn-triton",
    ]
    assert " ".join(found[1]) == "fastattn-triton 1.0000 ms 100 TFLOP/s 2.00 x best peer"
    assert " ".join(found[3]) == "sdpa-math 8.0000 ms 12.5 TFLOP/s 0.25 x best peer"
    assert " ".join(found[5]) == "fastattn-triton 0.5000 ms 2000 GB/s"


def test_how_long_it_takes():
    assert "688 benchmarks on the GPU: about 11 min" in estimate(688)
    assert "5 benchmarks on the GPU: about 1 min" in estimate(5)


# A device that is made up: the second of three benchmarks breaks it.
SUITE = """
import dataclasses, pytest, torch
from fastattn.bench.run import suite
from fastattn.bench.attention import Bench
from fastattn.bench.cases import cpu_cases
from fastattn.bench.implementations.registry import side_by_side
from fastattn.bench.measure import Effort, HostTimer

LOST = []
def synchronize():
    if LOST:
        raise RuntimeError("an illegal memory access was encountered")

torch.cuda.is_available = lambda: True
torch.cuda.synchronize = synchronize
HostTimer.flush = lambda self: None
suite.gpu_bench = lambda which: Bench(HostTimer(), Effort(warm_up=1, pause=0))

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_it(run, n):
    def call():
        if n == 1:
            LOST.append(n)
    run(call, "cuda")
"""


def test_a_lost_context_ends_the_run_with_one_line(tmp_path):
    (tmp_path / "conftest.py").write_text((BENCH / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tmp_path)]
    variables = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, "--benchmark-only", "--benchmark-max-time=0.001", "--benchmark-min-rounds=1"],
        env=variables | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stdout
    assert "3 benchmarks on the GPU: about 1 min" in done.stdout
    assert "test_it[1] has broken the CUDA context" in done.stdout
    assert "test_it.py::test_it[0] PASSED" in done.stdout
    assert "test_it[2]" not in done.stdout
