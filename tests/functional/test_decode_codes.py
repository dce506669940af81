"""Decoding from 8-bit caches: numbers of any size, rows of any width, sums in parts."""

from dataclasses import replace

import pytest
import torch

from fastattn import decode_attention
from fastattn.cache.views import view_of_tensors
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.decode_splits import load_bytes
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.testing.decoding import assert_decodes, fill

HOW = {"backend": "triton", "num_splits": 2}
NARROW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
CODES = pytest.mark.parametrize("codes", ["int8", "fp8", "pages-int8"])


def tokens(
    device: str, dtype: torch.dtype, T_q: int = 1, D: int = 16, D_v: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of four heads, k and v of two; rows of 37 and 70 tokens."""
    generator = torch.Generator().manual_seed(1)

    def draw(H: int, T: int, width: int) -> torch.Tensor:
        return torch.randn(2, H, T, width, generator=generator).to(device, dtype)

    lengths = torch.tensor([37, 70], dtype=torch.int32, device=device)
    return draw(4, T_q, D), draw(2, 70, D), draw(2, 70, D_v), lengths


@CODES
@NARROW
@pytest.mark.parametrize("smallest", [-20, -8])
def test_values_of_very_different_size(
    smallest: int, dtype: torch.dtype, codes: str, device: str
) -> None:
    """Weights with the scales of values in them would be past fp16 on either side."""
    q, k, v, lengths = tokens(device, dtype)
    powers = torch.linspace(smallest, 8, 70, device=device).exp2()
    for order in (powers, powers.flip(0)):
        scaled = (v.float() * order[:, None]).to(dtype)
        assert_decodes(q, fill(codes, k, scaled, lengths), how=HOW)


@CODES
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_values_past_the_range_of_fp16(factor: float, codes: str, device: str) -> None:
    q, k, v, lengths = tokens(device, torch.bfloat16)
    assert_decodes(q, fill(codes, k, v * factor, lengths), how=HOW)


@CODES
@NARROW
def test_a_sink_beside_tiny_values(dtype: torch.dtype, codes: str, device: str) -> None:
    """The weights of keys are small beside the sink's; their products with scales more so."""
    q, k, v, lengths = tokens(device, dtype)
    sinks = torch.tensor([4.0, 0.0, -3.0, 8.0], device=device)
    filled = fill(codes, k, (v.float() * 2.0**-14).to(dtype), lengths)
    assert_decodes(q, filled, how=HOW, sinks=sinks)


@CODES
def test_queries_past_the_range_of_fp16(codes: str, device: str) -> None:
    """Heads of very different size share a tile."""
    q, k, v, lengths = tokens(device, torch.bfloat16, T_q=2)
    q = q * torch.tensor([1e6, 1.0, 1e6, 1.0], device=device, dtype=q.dtype)[:, None, None]
    assert_decodes(q, fill(codes, k * 1e-6, v, lengths), how=HOW)


def test_a_query_that_is_not_finite_leaves_its_neighbours_be(device: str) -> None:
    q, k, v, lengths = tokens(device, torch.bfloat16)
    view = fill("int8", k, v, lengths).view
    expected = decode_attention(q, view, **HOW)
    q[:, 0, 0, 3] = float("inf")
    actual = decode_attention(q, view, **HOW)
    assert torch.equal(actual[:, 1:], expected[:, 1:])


@pytest.mark.parametrize(("first", "D", "by_twos"), [(0, 30, True), (1, 30, False), (1, 31, False)])
def test_rows_that_are_parts_of_longer_ones(first: int, D: int, by_twos: bool, device: str) -> None:
    """Where the last ends with its storage, or the first starts between two codes."""
    q, k, v, lengths = tokens(device, torch.bfloat16, D=D, D_v=D)
    filled = fill("int8", k, v, lengths)
    own = filled.view
    parts = []
    for x in (own.k, own.v):
        longer = torch.full((*x.shape[:3], 32), 77, dtype=torch.int8, device=device)
        longer[..., first : first + D] = x
        parts.append(longer[..., first : first + D])
    scales = (own.k_scale, own.v_scale)
    cache = CacheTensors(*parts, *scales, None, own.lengths, own.lengths, None, None)
    assert load_bytes(cache) == (16 if by_twos else 1)
    view = view_of_tensors(*parts, own.lengths, k_scale=scales[0], v_scale=scales[1], dtype=q.dtype)
    assert_decodes(q, replace(filled, view=view), how=HOW)


@pytest.mark.parametrize("parts", [4, 16])
@pytest.mark.parametrize("kind", ["int8", "contiguous"])
def test_sums_in_parts(kind: str, parts: int, device: str) -> None:
    """A block of 16 keys has at most 8 parts: each takes two neighbours."""
    q, k, v, lengths = tokens(device, torch.bfloat16)
    sinks = torch.tensor([4.0, 0.0, -3.0, 8.0], device=device)
    with tiles.forced(decode=TileConfig(16, 16, 4, 1, sum_parts=parts)):
        assert_decodes(q, fill(kind, k, v, lengths), how=HOW, sinks=sinks)
