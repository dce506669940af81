"""FLOPs, bytes and figures of cases against numbers computed by hand; the sets of cases."""

from dataclasses import replace

import pytest

from fastattn.bench.cases import case as cases
from fastattn.bench.cases import figures
from fastattn.bench.cases.case import Case

PLAIN = Case("forward", "forward", 2, 4, 2, 8, 8, 16)
CAUSAL = replace(PLAIN, causal=True)
# Of 2 rows, 4 heads, 64 pairs, 2 products of 2 * 16 operations.
FLOPS = 2 * 4 * 64 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("case", "flops"),
    [
        (PLAIN, FLOPS),
        (CAUSAL, FLOPS / 2),
        (replace(PLAIN, direction="backward"), 2.5 * FLOPS),
        (replace(PLAIN, direction="forward_backward"), 3.5 * FLOPS),
        # Rows of 4 queries over 8 keys see 5, 6, 7, 8; the convention takes (8 + 4) / 2 each.
        (replace(CAUSAL, T_q=4), FLOPS * 4 * 6 / 64),
        (replace(CAUSAL, T_q=1), FLOPS * 8 / 64),
        # A window is counted exactly, and padding is work.
        (replace(CAUSAL, window=(1, 0)), FLOPS * (1 + 7 * 2) / 64),
        (replace(PLAIN, window=(None, 1)), FLOPS * (2 + 3 + 4 + 5 + 6 + 7 + 8 + 8) / 64),
        (replace(PLAIN, lengths=(1, 1)), FLOPS),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_operations(case, flops):
    assert figures.flops(case) == flops


def test_bytes():
    assert figures.key_value_bytes(PLAIN) == 2 * (2 * 8) * 2 * 16 * 2
    assert figures.key_value_bytes(replace(PLAIN, lengths=(3, 8))) == 2 * 11 * 2 * 16 * 2
    queries, keys, lse = 2 * 4 * 8 * 16 * 2, 2 * 2 * 8 * 16 * 2, 2 * 4 * 8 * 4
    assert figures.least_memory(PLAIN) == 2 * queries + 2 * keys + lse
    backward = replace(PLAIN, direction="backward")
    assert figures.least_memory(backward) == 4 * queries + 4 * keys + lse


def test_figures_of_a_time():
    # 4 rows, 16 heads, 4096^2 / 2 pairs, 4 * 128 operations, in a millisecond.
    tflops = pytest.approx(4 * 16 * 4096**2 / 2 * 512 / 1e9)
    case = cases.sweep("forward", 128, 4096, causal=True)
    assert figures.figures(case, ms=1.0) == {"tflops": tflops}
    results = figures.figures(cases.decode(32, 4096), ms=0.5)
    assert results["kv_gbps"] == pytest.approx(2 * 32 * 4096 * 8 * 128 * 2 / 0.5e-3 / 1e9)


def test_full_set_holds_the_quick_one_and_all_of_its_sweeps():
    full, quick = cases.gpu_cases("full"), cases.gpu_cases("quick")
    assert {case.name for case in quick} < {case.name for case in full}
    for some in (full, quick):
        assert len({case.name for case in some}) == len(some)
        assert {case.family for case in some} == set(cases.FAMILIES)
        assert some[0].D == 128 and some[0].causal
    for c in full:
        assert max(c.lengths or (0,)) <= c.T_k and len(c.lengths or range(c.B)) == c.B
    assert sum(case.slow_peers for case in quick) == 6
    sweep = [c for c in full if c.B * c.T_q == 16384 and c.H_q * c.D == 2048]
    shapes = {(c.D, c.T_q, c.causal) for c in sweep if c.family == "forward"}
    grid = [(c.B, c.T_k, c.H_q, c.graph) for c in full if c.family == "decode"]
    assert len(shapes) == 3 * 6 * 2 and len(set(grid)) == len(grid) == 64
