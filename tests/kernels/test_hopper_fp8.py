"""The Hopper forward in 8 bits, in the emulator: within its bound, and exact where weights are."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import quantize_fp8, reference
from fastattn.bench.tune.candidates import hopper_candidates
from fastattn.functional.fp8.codes import E4M3
from fastattn.kernels.hopper.tile_table import HopperConfig
from fastattn.kernels.launch import tiles
from fastattn.ops import fp8, schema
from fastattn.options import Options
from fastattn.testing import assert_within_budget, make_qkv
from fastattn.testing.fp8 import (
    assert_packed_within_fp8_bounds,
    assert_within_fp8_bounds,
    dequantized,
)

pytestmark = pytest.mark.usefixtures("emulated")


def drawn(
    B: int, H_q: int, H_k: int, T_q: int, T_k: int, D: int, lengths: list[int] | None = None,
    layout: str = "bhtd",
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:  # fmt: skip
    """Codes and scales; every head has a size of its own. Keys past `lengths` are NaN."""
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, layout=layout, requires_grad=False)
    grow = 3.0 ** torch.arange(H_q)
    q = q * grow[:, None, None]
    k = k / grow[:: H_q // H_k, None, None]
    v = v * grow[:H_k, None, None]
    ends = None if lengths is None else torch.tensor(lengths)
    q, q_scale = quantize_fp8(q)
    (k, k_scale), (v, v_scale) = quantize_fp8(k, ends), quantize_fp8(v, ends)
    for b, length in enumerate(lengths or ()):
        k[b, :, length:] = v[b, :, length:] = torch.full((), math.nan).to(E4M3)
    return (q, k, v), {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}


attention = partial(fastattn.attention_fp8, return_lse=True, backend="hopper")


def check(
    B: int = 1, H_q: int = 2, H_k: int = 1, T_q: int = 150, T_k: int | None = None, D: int = 64,
    *, lengths: list[int] | None = None, layout: str = "bhtd", packed: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, **arguments: Any,
) -> None:  # fmt: skip
    """o and lse within the bound."""
    codes, scales = drawn(B, H_q, H_k, T_q, T_q if T_k is None else T_k, D, lengths, layout)
    if lengths is not None:
        arguments["key_lengths"] = torch.tensor(lengths, dtype=torch.int32)
    arguments = {"causal": True} | arguments
    given = (*codes[:2], fastattn.pack_values(codes[2])) if packed else codes
    o, lse = attention(*given, **scales, out_dtype=out_dtype, **arguments)
    assert o.dtype == out_dtype
    assert_within_fp8_bounds(o, lse, codes, tuple(scales.values()), **arguments)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(T_q=256), id="causal-whole-tiles"),
        pytest.param(dict(T_q=1, T_k=300), id="one-query"),
        pytest.param(dict(T_q=200, T_k=133), id="rows-before-the-first-key"),
        pytest.param(dict(causal=False, T_q=70, T_k=1100), id="full-every-stage-used-again"),
        pytest.param(dict(T_q=200, window=(70, 0), keep_first=3), id="window"),
        pytest.param(dict(B=2, T_q=90, prefix_lengths=torch.tensor([70, 0])), id="prefix"),
        pytest.param(dict(H_q=6, H_k=2, layout="bthd", packed=True), id="gqa-strided-packed"),
        pytest.param(dict(D=128, T_k=290, out_dtype=torch.float16), id="d128-fp16"),
        pytest.param(dict(D=256, T_q=80, T_k=150, lengths=[140]), id="d256-lengths"),
        pytest.param(dict(B=3, H_q=1, T_k=300, lengths=[300, 171, 0]), id="lengths"),
        pytest.param(dict(B=2, H_q=1, T_k=200, query_offset=torch.tensor([5, 90])), id="offsets"),
        pytest.param(dict(D=128, softcap=0.5, scale=0.5, causal=False), id="d128-softcap"),
        pytest.param(dict(T_q=70, T_k=40, sinks=torch.tensor([0.5, -9.0])), id="sinks"),
        pytest.param(dict(T_q=70, sinks=torch.tensor([12.0, 30.0])), id="sinks-above-all-keys"),
    ],
)
def test_is_within_the_bound(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        pytest.param((2, 4, 2, 150, 300, 64), {"causal": True}, id="causal"),
        pytest.param((1, 2, 1, 100, 1000, 128), {}, id="full"),
        pytest.param((1, 1, 1, 140, 200, 256), {"window": (60, 9)}, id="window"),
        pytest.param(
            (2, 1, 1, 70, 200, 64), {"key_lengths": torch.tensor([150, 67])}, id="lengths"
        ),
    ],
)
def test_weights_that_e4m3_holds_cost_nothing(sizes: Any, arguments: dict[str, Any]) -> None:
    """Scores are integers: times ln 2, weights are powers of two. Then o is exact to sums in fp32
    and its own rounding: every key and value in its place.
    """
    B, H_q, H_k, T_q, T_k, D = sizes
    generator = torch.Generator().manual_seed(0)
    q = torch.eye(D)[torch.randint(D, (B, H_q, T_q), generator=generator)]
    k = torch.randint(-8, 1, (B, H_k, T_k, D), generator=generator)
    v = torch.randn(B, H_k, T_k, D, generator=generator)
    codes = [x.to(E4M3) for x in (q, k, v)]
    # Scales differ by head, and those of q and k cancel.
    of_keys = 2.0 ** torch.arange(B * H_k).view(B, H_k)
    of_queries = of_keys.repeat_interleave(H_q // H_k, 1)
    scales = {"q_scale": of_queries, "k_scale": 1 / of_keys, "v_scale": 3 * of_keys}
    arguments = {"scale": math.log(2)} | arguments
    o, lse = attention(*codes, **scales, out_dtype=torch.float16, **arguments)
    numbers = (dequantized(x, scale) for x, scale in zip(codes, scales.values(), strict=True))
    exact, exact_lse = reference.attention(*numbers, return_lse=True, **arguments)
    assert_within_budget("o", o, exact, exact.half())
    assert_within_budget("lse", lse, exact_lse, exact_lse.float())


@pytest.mark.parametrize("config", hopper_candidates("hopper_fp8", 64)[::8], ids=str)
def test_other_shapes_are_within_the_bound(config: HopperConfig) -> None:
    """Some of those that the tuner tries: consumers that take turns, three of them, stages."""
    with tiles.forced(hopper_fp8=config):
        check(T_q=300, T_k=410)


def drawn_packed(
    q_lengths: list[int], k_lengths: list[int], D: int
) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """Codes and scales of 2 heads of queries and 1 of keys, and offsets."""
    starts = [
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)
    ]
    coded = []
    for lengths, cu_seqlens, H in ((q_lengths, starts[0], 2), *((k_lengths, starts[1], 1),) * 2):
        # Every sequence has a size of its own, so that another's scale shows.
        size = torch.cat([torch.full((n,), 3.0**i) for i, n in enumerate(lengths)])
        x = torch.randn(sum(lengths), H, D) * size[:, None, None] ** (-1 if H == 2 else 1)
        coded.append(quantize_fp8(x, cu_seqlens=cu_seqlens))
    codes, scales = zip(*coded, strict=True)
    return codes, scales, (starts[0], starts[1])


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "D", "options"),
    [
        pytest.param([150, 0, 3, 130], [150, 0, 3, 130], 64, {"causal": True}, id="causal"),
        pytest.param([1, 20, 5], [300, 0, 17], 64, {}, id="full-one-without-keys"),
        pytest.param([70, 90], [113, 200], 128, {"window": (40, 3), "keep_first": 2}, id="window"),
        pytest.param(
            [40, 60], [129, 200], 64, {"key_lengths": torch.tensor([70, 191])}, id="lengths"
        ),
    ],
)
def test_packed_sequences_are_within_the_bound(
    q_lengths: list[int], k_lengths: list[int], D: int, options: dict[str, Any]
) -> None:
    """Their values begin anywhere, and what stands between them in packed values is NaN."""
    codes, scales, offsets = drawn_packed(q_lengths, k_lengths, D)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    call = partial(fastattn.attention_varlen_fp8, **named, **options, backend="hopper")
    o, lse = call(*codes, *offsets, return_lse=True)
    assert_packed_within_fp8_bounds(o, lse, codes, scales, offsets, **options)
    packed = fastattn.pack_values(codes[2], offsets[1])
    spoilt = torch.full(packed.codes.shape, math.nan).to(E4M3).view(torch.uint8)
    places = fp8.places_of_packed(offsets[1], packed.length)
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]).argsort()
    places = places // 16 * 16 + order[places % 16]
    spoilt[..., places] = packed.codes.view(torch.uint8)[..., places]
    again = call(*codes[:2], packed._replace(codes=spoilt.view(E4M3)), *offsets)
    assert torch.equal(again, o)


def test_scales_that_vanish_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of zeros: their scales' product is below what fp32 has. A NaN stays one."""
    codes, scales = drawn(1, 2, 2, 70, 70, 64)
    codes[0][:, 1] = codes[1][:, 1] = 0
    tiny = torch.tensor([[1.0, 2.0**-100]])
    scales |= {"q_scale": tiny, "k_scale": tiny}
    o, lse = attention(*codes, **scales, causal=True)
    assert_within_fp8_bounds(o, lse, codes, tuple(scales.values()), causal=True)
    monkeypatch.setattr("fastattn.tracing.host_knows", lambda x: False)
    scales["q_scale"] = torch.tensor([[1.0, math.nan]])
    o, _ = attention(*codes, **scales, causal=True)
    assert o[:, 0].isfinite().all() and o[:, 1].isnan().all()


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_traced_calls_go_through_the_op(layout: str) -> None:
    """It gives the same bits, and its fake the same shapes, strides and dtypes."""
    codes, scales = drawn(1, 2, 1, 70, 90, 64, layout=layout)
    values = fp8.pack_values.op(codes[2], None)
    tensors = (*codes[:2], values, *scales.values())
    options = schema.flat(Options(right=20, scale=0.2))
    results = fp8.hopper_forward_fp8.op(*tensors, torch.bfloat16, *options)
    for x, y in zip(results, attention(*codes, **scales, causal=True, scale=0.2), strict=True):
        assert torch.equal(x, y)
    fakes = (
        *fp8.hopper_forward_fp8.op(*(x.to("meta") for x in tensors), torch.bfloat16, *options),
        fp8.pack_values.op(codes[2].to("meta"), None),
    )
    for fake, real in zip(fakes, (*results, values), strict=True):
        described = (fake.shape, fake.stride(), fake.dtype)
        assert described == (real.shape, real.stride(), real.dtype)
