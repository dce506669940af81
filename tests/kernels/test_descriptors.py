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
from fastattn.testing import assert_matches_reference, assert_within_budget, make_qkv, worst_naive
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


MASKS = {
    "window": {"window": (30, 2)},
    "lengths": {"key_lengths": torch.tensor([40, 0])},
    # Rows of 53 numbers, which TMA cannot walk.
    "hidden": {"attn_bias": torch.where(torch.arange(T) < 20, -torch.inf, 0.0).expand(1, 1, T, T)},
}


@pytest.mark.parametrize("n", range(len(MASKS)), ids=list(MASKS))
def test_results_are_right(n: int, described: list[Tensor], device: str) -> None:
    # 24 columns, of which blocks have 32.
    layout = ("bhtd", "bthd")[n % 2]
    q, k, v = make_qkv(B, 4, 2, T, T, 24, 40, layout=layout, device=device)
    arguments = to_device(list(MASKS.values())[n], device)
    with tiles.forced(forward=TileConfig(16, 16, descriptors=True, sum_parts=4)):
        o, lse = by_triton(q, k, v, return_lse=True, **arguments)
    exact = reference.attention(*(x.double() for x in (q, k, v)), return_lse=True, **arguments)
    naive = worst_naive(exact, lambda: reference.attention(q, k, v, return_lse=True, **arguments))
    for name, ours, ref, plain in zip(("o", "lse"), (o, lse), exact, naive, strict=True):
        assert_within_budget(name, ours, ref, plain)
    assert {x.data_ptr() for x in described} == {k.data_ptr(), v.data_ptr()}


def test_a_packed_sequence_reads_nothing_of_the_next(tile: TileConfig, device: str) -> None:
    starts = torch.tensor([0, 13, T], device=device)
    q, k, v = make_qkv(1, 4, 2, T, layout="bthd", device=device, requires_grad=False)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    expected = reference.attention_varlen(q, k, v, starts, starts, causal=True)
    torch.testing.assert_close(by_triton(q, k, v, starts, starts, causal=True), expected)
    k[13:], v[13:] = torch.nan, torch.nan
    o = by_triton(q, k, v, starts, starts, causal=True)
    torch.testing.assert_close(o[:13], expected[:13])


def test_keys_behind_a_length_may_be_nan(tile: TileConfig, device: str) -> None:
    q, k, v = make_qkv(B, 4, 2, T, device=device, requires_grad=False)
    lengths = torch.tensor([21, 48], device=device)
    behind = (torch.arange(T, device=device) >= lengths[:, None])[:, None, :, None]
    o = by_triton(
        q, k.masked_fill(behind, torch.nan), v.masked_fill(behind, torch.nan), key_lengths=lengths
    )
    torch.testing.assert_close(o, reference.attention(q, k, v, key_lengths=lengths))


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


@pytest.mark.parametrize(
    ("bias", "calls"),
    [
        (torch.empty(1, 4, 64, 128), "bias"),
        (torch.empty(1, 4, 64, 128).expand(3, 4, 64, 128), "bias"),
        (torch.empty(1, 4, 64, 127), "scores"),
        (torch.empty(1, 4, 1, 128), "scores"),
        (torch.empty(1, 4, 64, 1), "scores"),
        (torch.empty(1, 4, 128, 64).mT, "scores"),
        (torch.empty(4, 64 * 128 + 1).view(-1)[1:-3].view(1, 4, 64, 128), "scores"),
    ],
    ids=["whole", "expanded", "odd", "of-keys", "of-queries", "transposed", "begins-between"],
)
def test_biases_that_tma_cannot_walk_take_the_tiles_of_those_by_distance(
    bias: Tensor, calls: str
) -> None:
    q = torch.empty(3, 4, 64, 64, dtype=torch.bfloat16)
    requested: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "lookup", lambda *a: requested.append(a[3]))
        for streams in (True, False):
            tile_for("forward", Options(attn_bias=bias), q, 64, streams_bias=streams)
    assert requested == [calls, "heavy"]


def test_what_tma_cannot_walk_comes_by_pointers(described: list[Tensor], device: str) -> None:
    """One K/V head for all, expanded by the caller: its stride of heads is 0."""
    q, k, v = make_qkv(B, 4, 1, T, device=device, requires_grad=False)
    k = k.expand(B, 4, T, 32)
    v = v.expand(B, 4, T, 32).contiguous()
    with tiles.forced(forward=TileConfig(16, 16, descriptors=True)):
        o = by_triton(q, k, v)
    torch.testing.assert_close(o, reference.attention(q, k, v))
    assert [x.data_ptr() for x in described] == [v.data_ptr()]


def test_a_call_like_an_earlier_one_describes_its_own_tensors(device: str) -> None:
    first = make_qkv(B, 4, 2, T, seed=1, device=device, requires_grad=False)
    second = make_qkv(B, 4, 2, T, seed=2, device=device, requires_grad=False)
    with tiles.forced(forward=TileConfig(16, 16, descriptors=True, sum_parts=4)):
        for q, k, v in (first, second, first):
            torch.testing.assert_close(by_triton(q, k, v), reference.attention(q, k, v))


def test_strides_of_dims_that_are_never_walked_are_made_whole() -> None:
    x = torch.empty(1, 2, 5, 16).as_strided((1, 2, 5, 16), (7, 80, 16, 1))
    assert tma_strides(x) == [4, 80, 16, 1]
    assert tma_strides(x.bfloat16().as_strided((1, 1, 5, 16), (3, 3, 16, 1))) == [8, 8, 16, 1]


def test_tensors_without_rows_or_of_stride_0_have_no_descriptor() -> None:
    assert descriptor_like(torch.empty(2, 2, 0, 16), 16, 16) is None
    assert descriptor_like(torch.empty(2, 1, 4, 16).expand(2, 3, 4, 16), 16, 16) is None


def test_a_kept_descriptor_keeps_no_tensor() -> None:
    x = torch.empty(2, 2, 5, 24)
    like = descriptor_like(x, 16, 32)
    assert like is not None and like.base is None
    assert (like.block_shape, like.shape) == ([1, 1, 16, 32], [2, 2, 5, 24])
    other = torch.empty_like(x)
    assert descriptor_of(other, like).base is other
    assert like.base is None


def test_the_hopper_kernels_get_a_copy_of_an_expanded_tensor() -> None:
    plain = torch.randn(2, 1, 5, 64).bfloat16()
    assert walkable(plain) is plain
    actual = walkable(plain.expand(2, 3, 5, 64))
    assert torch.equal(actual, plain.expand(2, 3, 5, 64))
    like = describe(actual, 64)
    assert min(like.strides) > 0 and like.base is None
