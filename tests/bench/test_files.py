"""The benchmark files as pytest runs them on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from fastattn.bench import overhead
from fastattn.bench.cases import FAMILIES, cpu_cases
from fastattn.bench.implementations.registry import side_by_side

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run_bench(*arguments):
    # In what looks like a worker of xdist nothing is measured.
    variables = {
        name: value
        for name, value in os.environ.items()
        if name != "TRITON_INTERPRET" and not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=BENCH.parent,
        env=variables | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these take minutes")
def test_without_a_gpu_the_cpu_is_measured_and_the_rest_skipped_with_a_reason(tmp_path):
    out = tmp_path / "out.json"
    shortest = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=1")
    done = run_bench(str(BENCH), "--benchmark-only", *shortest, f"--benchmark-json={out}", "-rs")
    assert done.returncode == 0, done.stdout
    assert "needs a GPU: torch sees no CUDA device" in done.stdout
    found = {b["name"]: b["extra_info"] for b in json.loads(out.read_text())["benchmarks"]}
    for case in cpu_cases():
        names = [name for name in found if f"[{case.name}-" in name]
        assert len(names) == len(side_by_side("cpu"))
        ours = next(name for name in names if name.endswith("-fastattn-torch]"))
        assert "time_over_sdpa" in found[ours]
    costs = [name for name in found if name.startswith("test_host_cost_of_a_call")]
    with_gradients = [row for row in overhead.ROWS if "decode" not in row]
    assert len(costs) == 2 * len(overhead.ROWS) + len(with_gradients)
    assert all("us_over_bare_launch" in found[name] for name in costs)
    assert {"empty cache", "warm cache"} == set(found["test_first_call"])
    generated = [name for name in found if name.startswith("test_generate_cpu")]
    assert len(generated) == 2


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
    code = pytest.main(
        ["-p", "no:cacheprovider", "-q", "--benchmark-disable", *arguments], plugins=[seen]
    )
    assert code == pytest.ExitCode.OK
    return seen


def test_the_set_of_a_minute_is_single_calls():
    found = observed(str(BENCH), "--collect-only", "--case-set", "minute").items
    assert {item.path.stem for item in found} == {f"bench_{family}" for family in FAMILIES}
    assert len(found) < 150


@pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)
def test_interpreting_processes_do_not_measure_launches():
    found = observed("-k", "bare", str(BENCH / "bench_overhead.py")).reports
    skipped = [report for report in found if report.skipped]
    assert len(skipped) == len(overhead.ROWS)
    for report in skipped:
        assert "TRITON_INTERPRET=1: kernels are interpreted" in str(report.longrepr)


def test_every_family_has_a_file():
    for family in FAMILIES:
        text = (BENCH / f"bench_{family}.py").read_text(encoding="utf-8")
        assert f'FAMILY = "{family}"' in text
        assert f"def test_{family}(" in text
