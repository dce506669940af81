"""The benchmark files as pytest runs them: a case a family of what a machine without a GPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
# One of each kind: the rest of a family differs in its sizes.
ONE_EACH = (
    "forward-B2-H4-T256-D64-full or causal-window63 or fwdbwd-B2 or padded or (decode and paged)"
    " or import"
)
SHORTEST = ("--benchmark-only", "--benchmark-max-time=0.001", "--benchmark-min-rounds=1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these take minutes")
def test_without_a_gpu_the_cpu_is_measured_and_the_rest_skipped_with_a_reason(tmp_path):
    out = tmp_path / "out.json"
    # In what looks like a worker of xdist nothing is measured.
    hidden = ("TRITON_INTERPRET", "PYTEST_XDIST")
    variables = {n: v for n, v in os.environ.items() if not n.startswith(hidden)}
    how = {"cwd": BENCH.parent, "env": variables | {"PYTHONSAFEPATH": "1"}}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SHORTEST, str(BENCH)]
    command += [f"--benchmark-json={out}", "-rs", "-k", ONE_EACH]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, done.stdout
    assert "needs a GPU: torch sees no CUDA device" in done.stdout
    assert "fastattn-triton cannot serve" not in done.stdout  # it is not asked on a CPU
    results = {b["name"]: b for b in json.loads(out.read_text())["benchmarks"]}
    for family in ("forward", "backward", "padded", "masks"):
        compared = [b for name, b in results.items() if name.startswith(f"test_attention[{family}")]
        assert len(compared) == 3 and len({b["group"] for b in compared}) == 1
        for benchmark in compared:
            # The samples of the harness are those that pytest-benchmark shows.
            ms, stats = benchmark["extra_info"]["ms"], benchmark["stats"]
            assert ms["samples"] == stats["rounds"]
            assert 1e3 * stats["median"] == pytest.approx(ms["median"], abs=1e-4)
            assert benchmark["extra_info"]["tflops"] > 0
    cost = results["test_host_cost_of_a_call[decode, paged]"]["extra_info"]
    assert set(cost["us"]) == {"bare launch", "fastattn"} and "us_over_bare_launch" in cost
    assert results["test_import_over_torch_and_triton"]["extra_info"]["import_ms"] > 0
