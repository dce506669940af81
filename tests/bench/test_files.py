"""The benchmark files as pytest runs them: a case a family of what a machine without a GPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from fastattn.bench.time import overhead

BENCH = Path(__file__).resolve().parents[2] / "bench"
# One of each kind: the rest of a family differs in its sizes.
ONE_EACH = (
    "forward-B2-H4-T256-D64-full or causal-window63 or fwdbwd-B2 or padded or (decode and paged)"
    " or import or dispatch or module_cpu"
)
SHORTEST = ("--benchmark-only", "--benchmark-max-time=0.001", "--benchmark-min-rounds=1")


def run_bench(*arguments):
    # In what looks like a worker of xdist nothing is measured.
    hidden = ("TRITON_INTERPRET", "PYTEST_XDIST")
    variables = {n: v for n, v in os.environ.items() if not n.startswith(hidden)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SHORTEST, *arguments],
        cwd=BENCH.parent,
        env=variables | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these take minutes")
def test_without_a_gpu_the_cpu_is_measured_and_the_rest_skipped_with_a_reason(tmp_path):
    out = tmp_path / "out.json"
    done = run_bench(str(BENCH), f"--benchmark-json={out}", "-rs", "-k", ONE_EACH)
    assert done.returncode == 0, done.stdout
    assert "needs a GPU: torch sees no CUDA device" in done.stdout
    assert "fastattn-triton cannot serve" not in done.stdout  # it is not asked on a CPU
    found = {b["name"]: b for b in json.loads(out.read_text())["benchmarks"]}
    for family in ("forward", "backward", "padded", "masks"):
        compared = [b for name, b in found.items() if name.startswith(f"test_attention[{family}")]
        assert len(compared) == 3 and len({b["group"] for b in compared}) == 1
        for benchmark in compared:
            # The samples of the harness are those that pytest-benchmark shows.
            ms, stats = benchmark["extra_info"]["ms"], benchmark["stats"]
            assert ms["samples"] == stats["rounds"]
            assert 1e3 * stats["median"] == pytest.approx(ms["median"], abs=1e-4)
            assert benchmark["extra_info"]["tflops"] > 0
    cost = found["test_host_cost_of_a_call[decode, paged]"]["extra_info"]
    assert set(cost["us"]) == {"bare launch", "fastattn"} and "us_over_bare_launch" in cost
    assert found["test_import_over_torch_and_triton"]["extra_info"]["import_ms"] > 0


class Observer:
    """A plugin that keeps what a session of pytest collects and reports."""

    def __init__(self):
        self.items, self.reports = [], []

    def pytest_collection_finish(self, session):
        self.items += session.items

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)


def observed(*arguments):
    """A session of pytest in this process."""
    seen = Observer()
    quiet = ["-q", "-p", "no:cacheprovider", "--benchmark-disable"]
    assert pytest.main([*quiet, *arguments], plugins=[seen]) == pytest.ExitCode.OK
    return seen


@pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)
def test_interpreting_processes_do_not_measure_launches():
    file = str(BENCH / "bench_overhead.py")
    found = observed("-k", "host_cost", file).reports
    skipped = [report for report in found if report.skipped]
    # Each row, and the doors.
    assert len(skipped) == len(overhead.ROWS) + 1
    for report in skipped:
        assert "TRITON_INTERPRET=1: kernels are interpreted" in str(report.longrepr)


# A device that is made up: the second of three benchmarks breaks it.
SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_it(run, n, lost):
    run(lambda: lost.append(n) if n == 1 else None, "cuda")

@pytest.fixture
def lost(request):
    return request.config.lost
"""


def test_a_lost_context_ends_the_run_with_one_line(tmp_path, monkeypatch, capsys):
    from fastattn.bench.time import samples
    from fastattn.bench.time.samples import Bench, Effort, HostTimer

    lost = []

    def synchronize():
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    class Plugin:
        def pytest_configure(self, config):
            config.lost = lost

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    bench = Bench(HostTimer(), Effort(warm_up=1, pause=0))
    monkeypatch.setattr(samples, "gpu_bench", lambda which: bench)
    (tmp_path / "conftest.py").write_text((BENCH / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tmp_path / "test_it.py").write_text(SUITE)
    ini = str(tmp_path / "pytest.ini")
    command = ["-v", "-c", ini, "--import-mode=importlib", "--benchmark-disable", str(tmp_path)]
    code = pytest.main(command, plugins=[Plugin()])
    said = capsys.readouterr().out
    assert code == 3, said
    assert "test_it[1] has broken the CUDA context" in said
    assert "test_it.py::test_it[0] PASSED" in said
    assert "test_it[2]" not in said
