"""The block rules against the element rule, by brute force.

Nothing visible is left out of a range, nothing hidden is in a full block, and nothing is loaded
that no query of the tile sees.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.mask import (
    batch_row,
    boundary_block,
    key_blocks,
    query_blocks,
    valid_keys,
    visible,
)
from fastattn.kernels.padding import launch_padding_extents


@triton.jit(do_not_specialize=["left", "right"])
def key_blocks_kernel(
    out_ptr, T_q, T_k, offset, left, right, lengths_ptr, extents_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    _, start, end, solid = batch_row(0, T_k, 0, None, lengths_ptr, extents_ptr)
    q_first = tile * BLOCK_M + offset
    q_last = tl.minimum((tile + 1) * BLOCK_M, T_q) - 1 + offset
    lo, full_lo, full_hi, hi = key_blocks(q_first, q_last, start, end, solid, left, right, BLOCK_N)
    tl.store(out_ptr + 4 * tile, lo)
    tl.store(out_ptr + 4 * tile + 1, full_lo)
    tl.store(out_ptr + 4 * tile + 2, full_hi)
    tl.store(out_ptr + 4 * tile + 3, hi)


@triton.jit(do_not_specialize=["left", "right"])
def query_blocks_kernel(
    out_ptr, T_q, T_k, offset, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tile = tl.program_id(0)
    k_last = tl.minimum((tile + 1) * BLOCK_N, T_k) - 1
    lo, full_lo, full_hi, hi = query_blocks(
        tile * BLOCK_N, k_last, offset, T_q, left, right, BLOCK_M
    )
    tl.store(out_ptr + 4 * tile, lo)
    tl.store(out_ptr + 4 * tile + 1, full_lo)
    tl.store(out_ptr + 4 * tile + 2, full_hi)
    tl.store(out_ptr + 4 * tile + 3, hi)


@triton.jit(do_not_specialize=["left", "right"])
def visible_kernel(
    out_ptr, T_k, offset, left, right, lengths_ptr, padding_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    _, start, end, _ = batch_row(0, T_k, 0, None, lengths_ptr, None)
    rows = tl.arange(0, ROWS)
    k_pos = tl.arange(0, COLS)
    valid = valid_keys(k_pos, 0, start, end, padding_ptr, 0)
    keep = valid[None, :] & visible((rows + offset)[:, None], k_pos[None, :], left, right)
    tl.store(out_ptr + rows[:, None] * COLS + k_pos[None, :], keep.to(tl.int32))


@triton.jit
def boundary_block_kernel(out_ptr, lo, full_lo, full_hi, hi):
    for i in range(0, (full_lo - lo) + (hi - full_hi)):
        tl.store(out_ptr + i, boundary_block(i, lo, full_lo, full_hi))


BANDS = [(None, None), (None, 0), (5, 0), (0, 0), (3, 2), (None, 4), (6, None), (40, 40)]
SIZES = [
    (20, 20, 0),
    (13, 29, 16),
    (29, 13, -16),
    (10, 31, 5),
    (9, 30, -40),
    (9, 30, 60),
    (1, 17, 16),
]
BLOCK_M, BLOCK_N = 4, 8


def seen(T_q: int, T_k: int, offset: int, left: int | None, right: int | None) -> torch.Tensor:
    """bool [T_q, T_k] from the definition, one pair at a time."""
    keep = torch.zeros(T_q, T_k, dtype=torch.bool)
    for i, j in itertools.product(range(T_q), range(T_k)):
        p = i + offset
        keep[i, j] = (left is None or j >= p - left) and (right is None or j <= p + right)
    return keep


def check_range(blocks: list[int], keep: torch.Tensor, BLOCK: int, exists: torch.Tensor) -> None:
    """Judge (lo, full_lo, full_hi, hi) for keep [rows of one tile, columns].

    exists [columns] is False where a column is no key of the row; ranges are then not minimal.
    """
    lo, full_lo, full_hi, hi = blocks
    assert 0 <= lo <= full_lo <= full_hi <= hi
    columns = keep.shape[1]
    used = [bool(keep[:, n : n + BLOCK].any()) for n in range(0, columns, BLOCK)]
    wanted = [n for n, any_seen in enumerate(used) if any_seen]
    assert not wanted or (lo <= min(wanted) and max(wanted) < hi), "a visible block is left out"
    assert all(used[lo:hi]) or not bool(exists.all()), "a block without visible pairs is visited"
    for n in range(full_lo, full_hi):
        assert (n + 1) * BLOCK <= columns, "a full block runs past the end"
        assert keep[:, n * BLOCK : (n + 1) * BLOCK].all(), "a full block hides something"
    whole = [
        n
        for n in range(lo, hi)
        if (n + 1) * BLOCK <= columns and keep[:, n * BLOCK : (n + 1) * BLOCK].all()
    ]
    if bool(exists.all()):
        assert whole == list(range(full_lo, full_hi)), "a full block is masked for nothing"


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_key_blocks(sizes, band, device: str) -> None:
    T_q, T_k, offset = sizes
    keep = seen(T_q, T_k, offset, *band)
    tiles = triton.cdiv(T_q, BLOCK_M)
    out = torch.full((tiles, 4), -1, dtype=torch.int32, device=device)
    key_blocks_kernel[(tiles,)](out, T_q, T_k, offset, *band, None, None, BLOCK_M, BLOCK_N)
    for tile in range(tiles):
        rows = keep[tile * BLOCK_M : (tile + 1) * BLOCK_M]
        check_range(out[tile].tolist(), rows, BLOCK_N, torch.ones(T_k, dtype=torch.bool))


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_query_blocks(sizes, band, device: str) -> None:
    T_q, T_k, offset = sizes
    keep = seen(T_q, T_k, offset, *band)
    tiles = triton.cdiv(T_k, BLOCK_N)
    out = torch.full((tiles, 4), -1, dtype=torch.int32, device=device)
    query_blocks_kernel[(tiles,)](out, T_q, T_k, offset, *band, BLOCK_M, BLOCK_N)
    for tile in range(tiles):
        columns = keep[:, tile * BLOCK_N : (tile + 1) * BLOCK_N].T
        check_range(out[tile].tolist(), columns, BLOCK_M, torch.ones(T_q, dtype=torch.bool))


@pytest.mark.parametrize("length", [0, 1, 13, 20])
@pytest.mark.parametrize("band", [(None, 0), (6, 1)], ids=str)
def test_key_blocks_stop_at_the_length(band, length: int, device: str) -> None:
    T = 20
    exists = torch.arange(T) < length
    keep = seen(T, T, 0, *band) & exists
    lengths = torch.tensor([length], device=device)
    out = torch.full((5, 4), -1, dtype=torch.int32, device=device)
    key_blocks_kernel[(5,)](out, T, T, 0, *band, lengths, None, BLOCK_M, BLOCK_N)
    for tile in range(5):
        check_range(out[tile].tolist(), keep[tile * BLOCK_M :][:BLOCK_M], BLOCK_N, exists)
        lo, _, _, hi = out[tile].tolist()
        assert hi == lo or hi * BLOCK_N < length + BLOCK_N, "keys past the length are visited"


@pytest.mark.parametrize("pattern", ["11110000", "00011100", "01110110", "00000000", "11111111"])
def test_padding_extents(pattern: str, device: str) -> None:
    mask = torch.tensor([[c == "1" for c in pattern]], device=device)
    extents = launch_padding_extents(mask)
    if "1" not in pattern:
        assert extents[0, 1].item() == 0
        assert extents[0, 0].item() == len(pattern)
        return
    first, end = pattern.index("1"), pattern.rindex("1") + 1
    assert extents.tolist() == [[first, end, pattern[first:end].count("0")]]


def test_padding_extents_across_blocks(device: str) -> None:
    mask = torch.zeros(2, 3000, dtype=torch.bool, device=device)
    mask[0, 1500:2900] = True
    mask[1, 7] = mask[1, 2999] = True
    assert launch_padding_extents(mask).tolist() == [[1500, 2900, 0], [7, 3000, 2991]]


def test_padding_with_holes_leaves_no_block_unmasked(device: str) -> None:
    mask = torch.ones(1, 32, dtype=torch.bool, device=device)
    mask[0, 9] = False
    out = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    extents = launch_padding_extents(mask)
    key_blocks_kernel[(1,)](out, 4, 32, 28, None, None, None, extents, BLOCK_M, BLOCK_N)
    lo, full_lo, full_hi, hi = out[0].tolist()
    assert (lo, hi) == (0, 4)
    assert full_lo == full_hi


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("offset", [0, 5, -3])
def test_visible(offset: int, band, device: str) -> None:
    padding = torch.rand(32, generator=torch.Generator().manual_seed(0)) < 0.7
    lengths = torch.tensor([27])
    out = torch.full((16, 32), -1, dtype=torch.int32, device=device)
    visible_kernel[(1,)](out, 32, offset, *band, lengths.to(device), padding.to(device), 16, 32)
    expected = seen(16, 32, offset, *band) & padding & (torch.arange(32) < 27)
    assert torch.equal(out.cpu().bool(), expected)


def test_boundary_blocks_are_those_around_the_full_ones(device: str) -> None:
    out = torch.full((8,), -1, dtype=torch.int32, device=device)
    boundary_block_kernel[(1,)](out, 2, 4, 7, 9)
    assert out.tolist() == [2, 3, 7, 8, -1, -1, -1, -1]
