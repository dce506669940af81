"""FLOPs, bytes and figures of cases against numbers computed by hand; the sets of cases."""

from dataclasses import replace

import pytest

from fastattn.bench.cases import case as cases
from fastattn.bench.cases import figures, sets
from fastattn.bench.cases.case import Case
from fastattn.bench.cases.registry import BY_NAME, CUDNN, OURS

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
    codes, latents = (replace(PLAIN, option=cache) for cache in ("int8", "latent"))
    assert figures.key_value_bytes(codes) == 2 * (2 * 8) * 2 * (16 + 4)
    assert figures.key_value_bytes(latents) == (2 * 8) * 2 * 16 * 2
    backward = replace(PLAIN, direction="backward")
    assert figures.least_memory(backward) == 4 * queries + 4 * keys + lse


def test_figures_of_a_time():
    # 4 rows, 16 heads, 4096^2 / 2 pairs, 4 * 128 operations, in a millisecond.
    tflops = pytest.approx(4 * 16 * 4096**2 / 2 * 512 / 1e9)
    case = cases.sweep("forward", 128, 4096, causal=True)
    assert figures.figures(case, ms=1.0) == {"tflops": tflops}
    results = figures.figures(cases.decode(32, 4096), ms=0.5)
    assert results["kv_gbps"] == pytest.approx(2 * 32 * 4096 * 8 * 128 * 2 / 0.5e-3 / 1e9)


def test_sets_begin_with_the_aims_and_full_holds_all_sweeps():
    short, full = (list(sets.every_row(which)) for which in ("short", "full"))
    assert full[: len(short)] == short and len(set(full)) == len(full)
    plain = [(row.case.D, row.case.direction, row.implementations) for row in short[:20]]
    assert {x[2] for x in plain} == {(OURS, CUDNN)} and len(set(plain)) == 6
    families = [*dict.fromkeys(row.case.family for row in short)]
    assert families == ["forward", "backward", "decode", "masks"]
    options = {row.case.kernels[-1] for row in short if row.case.family == "masks"}
    assert len(options) == 13 * 2 * 2
    for case, names in full:
        assert max(case.lengths or (0,)) <= case.T_k
        assert len(case.lengths or range(case.B)) == case.B
        assert {*names} <= BY_NAME.keys()
    sweep = [case for case, _ in full if case.B * case.T_q == 16384 and case.H_q * case.D == 2048]
    shapes = {(c.D, c.T_q, c.causal) for c in sweep if c.family == "forward"}
    assert len(shapes) == 3 * 6 * 2


def test_classes_of_kernels_name_what_they_are_compiled_for():
    assert PLAIN.kernels == ("forward D 16 bfloat16",)
    backward = replace(PLAIN, direction="backward", padding_side="left", lengths=(8, 8), D=64)
    assert backward.kernels == ("forward D 64 bfloat16 padding", "backward D 64 bfloat16 padding")
    window = replace(PLAIN, dtype="float16", window=(3, 0), option="softcap")
    assert window.kernels == ("forward D 16 float16 softcap window",)
    assert cases.decode(1, 64, cache="latent").kernels == ("decode D 576 bfloat16 latent",)
    sides = [cases.masked("forward", 64, x).padding_side for x in ("lengths", "padding")]
    assert sides == ["right", "left"]
