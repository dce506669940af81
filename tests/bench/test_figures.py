"""FLOPs, bytes and figures of benchmark cases, against numbers computed by hand."""

from dataclasses import replace

import pytest

from fastattn import reference
from fastattn.bench import cases, figures
from fastattn.bench.cases import Case

PLAIN = Case("forward", "forward", 2, 4, 2, 8, 8, 16)


def test_operations_of_a_full_forward():
    # 2 rows, 4 heads, 64 pairs, 2 products of 2 * 16 operations.
    assert figures.flops(PLAIN) == 2 * 4 * 64 * 2 * 2 * 16
    assert figures.visible_flops(PLAIN) == figures.flops(PLAIN)


def test_causal_counts_half_by_convention_and_the_diagonal_when_visible():
    causal = replace(PLAIN, causal=True)
    assert figures.flops(causal) == figures.flops(PLAIN) / 2
    assert figures.visible_pairs(causal) == 2 * (8 * 9 // 2)


@pytest.mark.parametrize(("direction", "passes"), [("backward", 2.5), ("forward_backward", 3.5)])
def test_passes(direction, passes):
    assert figures.flops(replace(PLAIN, direction=direction)) == passes * figures.flops(PLAIN)


def test_causal_with_more_keys_than_queries():
    # Rows of 4 queries over 8 keys see 5, 6, 7, 8; the convention takes (8 + 4) / 2 each.
    case = replace(PLAIN, T_q=4, causal=True)
    assert figures.visible_pairs(case) == 2 * 26
    assert figures.conventional_pairs(case) == 4 * 6


def test_one_query_sees_every_key():
    case = cases.decode(3, 100)
    assert figures.visible_pairs(case) == 3 * 100
    assert figures.conventional_pairs(case) == 100


@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, window=(2, 0), causal=True),
        replace(PLAIN, window=(1, 3)),
        replace(PLAIN, window=(None, 1)),
        replace(PLAIN, lengths=(3, 8)),
        replace(PLAIN, lengths=(3, 8), causal=True),
        replace(PLAIN, lengths=(3, 8), causal=True, padding_side="left"),
        replace(PLAIN, lengths=(5, 1), window=(2, 1), padding_side="left"),
        replace(PLAIN, T_q=12, causal=True),
    ],
    ids=lambda case: f"{case.name}-{case.padding_side}",
)
def test_visible_pairs_are_those_of_the_oracle(case):
    from fastattn.bench.inputs import make_inputs

    inputs = make_inputs(replace(case, device="cpu", dtype="float32"))
    mask = reference.visible_mask(
        case.T_q, case.T_k, causal=case.causal, window=case.window, **inputs.padding()
    )
    assert figures.visible_pairs(case) == int(mask.expand(case.B, -1, -1, -1).sum())


def test_window_is_counted_exactly_and_padding_is_not():
    window = replace(PLAIN, window=(1, 0), causal=True)
    assert figures.conventional_pairs(window) == 1 + 7 * 2
    assert figures.conventional_pairs(replace(PLAIN, lengths=(1, 1))) == 64


def test_bytes():
    assert figures.key_value_bytes(PLAIN) == 2 * (2 * 8) * 2 * 16 * 2
    assert figures.key_value_bytes(replace(PLAIN, lengths=(3, 8))) == 2 * 11 * 2 * 16 * 2
    queries, keys, lse = 2 * 4 * 8 * 16 * 2, 2 * 2 * 8 * 16 * 2, 2 * 4 * 8 * 4
    assert figures.least_memory(PLAIN) == 2 * queries + 2 * keys + lse
    backward = replace(PLAIN, direction="backward")
    assert figures.least_memory(backward) == 4 * queries + 4 * keys + lse


def test_figures_of_a_time():
    found = figures.figures(cases.sweep("forward", 128, 4096, causal=True), ms=1.0)
    # 4 rows, 16 heads, 4096^2 / 2 pairs, 4 * 128 operations, in a millisecond.
    assert found["tflops"] == pytest.approx(4 * 16 * 4096**2 / 2 * 512 / 1e9)
    assert found["tflops_visible"] / found["tflops"] == pytest.approx(4097 / 4096)
    assert "kv_gbps" not in found
    found = figures.figures(cases.decode(32, 4096), ms=0.5)
    assert found["kv_gbps"] == pytest.approx(2 * 32 * 4096 * 8 * 128 * 2 / 0.5e-3 / 1e9)


def test_exponential_limit():
    # A multiprocessor at 1 GHz: 16e9 exponentials, each for 4 * 64 operations.
    assert figures.exponential_limit(64, 1, 1000) == pytest.approx(16e9 * 256 / 1e12)


def test_ratio():
    def timed(name, ms):
        return {
            "case": {"name": "c"},
            "implementation": name,
            "status": "timed",
            "ms": {"median": ms},
        }

    results = [timed("ours", 2.0), timed("theirs", 3.0)]
    assert figures.ratio(results, "c", "ours", "theirs") == 1.5
    assert figures.ratio(results, "c", "ours", "nobody") is None


@pytest.mark.parametrize("which", cases.SETS)
def test_sets_name_each_case_once_and_keep_the_sizes_of_the_sweep(which):
    found = cases.gpu_cases(which)
    names = [case.name for case in found]
    assert len(names) == len(set(names))
    assert {case.family for case in found} == set(cases.FAMILIES)
    assert found[0].D == 128 and found[0].causal
    for case in found:
        assert case.H_q % case.H_k == 0
        assert case.lengths is None or (
            len(case.lengths) == case.B and min(case.lengths) > 0 and max(case.lengths) <= case.T_k
        )


def test_full_set_holds_the_quick_one():
    quick = {case.name for case in cases.gpu_cases("quick")}
    full = {case.name for case in cases.gpu_cases("full")}
    assert quick < full
    sweep = [c for c in cases.gpu_cases("full") if c.B * c.T_q == 16384 and c.H_q * c.D == 2048]
    shapes = {(c.D, c.T_q, c.causal) for c in sweep if c.family == "forward"}
    assert len(shapes) == 3 * 6 * 2


def test_unknown_set():
    with pytest.raises(ValueError, match="case set must be one of minute, quick, full, got 'slow'"):
        cases.gpu_cases("slow")
