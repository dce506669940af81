"""Blocks that come by TMA and sums that are kept in parts: the same results for every layout."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.kernels.hopper.host import describe, walkable
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.arguments import tile_for
from fastattn.kernels.launch.descriptors import descriptor_like, descriptor_of, tma_strides
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import to_device

B, T = 2, 53  # three full blocks of 16 keys and a part


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that were loaded by descriptor."""
    tensors: list[Tensor] = []

    def note(x, like):
        tensors.append(x)
        return descriptor_of(x, like)

    monkeypatch.setattr(launches, "descriptor_of", note)
    return tensors


@pytest.fixture(params=[(True, 1), (False, 4), (True, 4)], ids=["tma", "parts", "both"])
def tile(request: pytest.FixtureRequest) -> Iterator[TileConfig]:
    descriptors, parts = request.param
    tile = TileConfig(16, 16, descriptors=descriptors, sum_parts=parts)
    with tiles.forced(forward=tile):
        yield tile


def by_triton(q, k, v, *positional, **arguments):
    function = fastattn.attention_varlen if positional else fastattn.attention
    return function(q, k, v, *positional, backend="triton", **arguments)


BIAS = torch.where(torch.arange(T) < 20, -torch.inf, 0.0).expand(1, 1, T, T)
# The last has rows of 53 numbers, which TMA cannot walk.
OPTIONS = {
    "window": {"window": (30, 2)},
    "lengths": {"key_lengths": torch.tensor([40, 0])},
    "hidden": {"attn_bias": BIAS},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_results_are_right(
    option: str, tile: TileConfig, described: list[Tensor], device: str
) -> None:
    """Rows have 24 columns, blocks 32; keys past a length are NaN."""
    layout = "bthd" if option == "lengths" else "bhtd"
    clean = make_qkv(B, 4, 2, T, T, 24, 40, layout=layout, device=device)
    q, k, v = (x.detach().clone().requires_grad_() for x in clean)
    if option == "lengths":
        k.data[0, :, 40:] = v.data[0, :, 40:] = k.data[1] = v.data[1] = torch.nan
    arguments = to_device(OPTIONS[option], device)
    assert_matches_reference(by_triton, q, k, v, clean=clean, backward=False, **arguments)
    known = {k.data_ptr(), v.data_ptr()} if tile.descriptors else set()
    assert {x.data_ptr() for x in described} == known


def test_a_packed_sequence_reads_nothing_of_the_next(tile: TileConfig, device: str) -> None:
    starts = torch.tensor([0, 13, T], device=device)
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv(1, 4, 2, T, layout="bthd", device=device))
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    how = {"oracle": reference.attention_varlen, "causal": True, "backward": False}
    assert_matches_reference(by_triton, q, k, v, starts, starts, **how)
    o = by_triton(q, k, v, starts, starts, causal=True)
    k.data[13:] = v.data[13:] = torch.nan
    assert torch.equal(by_triton(q, k, v, starts, starts, causal=True)[:13], o[:13])


@pytest.mark.parametrize("shape", [(B, 4), (B, 1), (1, 4), (1, 1)], ids=str)
def test_a_bias_comes_by_tma(shape: tuple[int, int], described: list[Tensor], device: str) -> None:
    """Rows of 56 numbers, to every kernel; what is the same for all rows or heads comes once."""
    q, k, v = make_qkv(B, 4, 2, 20, 56, device=device)
    bias = torch.randn(*shape, 20, 56, device=device).expand(B, -1, 20, 56).requires_grad_()
    tile = TileConfig(16, 16, descriptors=True)
    with tiles.forced(forward=tile, backward_dq=tile, backward_dkv=tile):
        assert_matches_reference(by_triton, q, k, v, attn_bias=bias, causal=True)
    # Forward, dQ, dK/dV and the gradient of the bias.
    assert [x.shape for x in described].count(bias.shape) == 4


def test_biases_that_tma_cannot_walk_take_the_tiles_of_those_by_distance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.empty(1, 4, 64, 128)
    between = torch.empty(4, 64 * 128 + 1).view(-1)[1:-3].view(whole.shape)
    by_calls = {
        "bias": [whole, whole.expand(3, -1, -1, -1)],
        "scores": [whole[..., 1:], whole[:, :, :1], whole[..., :1], whole.mT, between],
    }
    q = torch.empty(3, 4, 64, 64, dtype=torch.bfloat16)
    requested: list[str] = []
    monkeypatch.setattr(tiles, "lookup", lambda *a: requested.append(a[3]))
    for calls, biases in by_calls.items():
        for bias in biases:
            for streams in (True, False):
                tile_for("forward", Options(attn_bias=bias), q, 64, streams_bias=streams)
            assert requested[-2:] == [calls, "heavy"]


def test_what_tma_cannot_walk_comes_by_pointers(described: list[Tensor], device: str) -> None:
    """One K/V head for all, expanded by the caller: its stride of heads is 0."""
    q, k, v = make_qkv(B, 4, 1, T, device=device, requires_grad=False)
    k, v = k.expand(B, 4, T, 32), v.expand(B, 4, T, 32).contiguous()
    with tiles.forced(forward=TileConfig(16, 16, descriptors=True)):
        assert_matches_reference(by_triton, q, k, v, backward=False)
    assert {x.data_ptr() for x in described} == {v.data_ptr()}
    assert descriptor_like(torch.empty(2, 2, 0, 16), 16, 16) is None, "no rows"
    x = torch.empty(1, 2, 5, 16).as_strided((1, 2, 5, 16), (7, 80, 16, 1))
    assert tma_strides(x) == [4, 80, 16, 1], "whole, of dims that are never walked"
    assert tma_strides(x.bfloat16().as_strided((1, 1, 5, 16), (3, 3, 16, 1))) == [8, 8, 16, 1]
    plain = torch.randn(2, 1, 5, 64).bfloat16()
    copied = walkable(plain.expand(2, 3, 5, 64))
    assert walkable(plain) is plain and torch.equal(copied, plain.expand(2, 3, 5, 64))
    assert min(describe(copied, 64).strides) > 0
    assert copied.stride(1) < copied.stride(2), "results have the layout that its fake has"


def test_a_kept_descriptor_keeps_no_tensor(device: str) -> None:
    """A call like an earlier one describes its own tensors."""
    first, second = (make_qkv(B, 4, 2, T, seed=n, device=device) for n in (1, 2))
    with tiles.forced(forward=TileConfig(16, 16, descriptors=True, sum_parts=4)):
        for inputs in (first, second, first):
            assert_matches_reference(by_triton, *inputs, backward=False)
    x = torch.empty(2, 2, 5, 24)
    like = descriptor_like(x, 16, 32)
    assert like is not None and like.base is None
    assert (like.block_shape, like.shape) == ([1, 1, 16, 32], [2, 2, 5, 24])
    other = torch.empty_like(x)
    assert descriptor_of(other, like).base is other
    assert like.base is None
