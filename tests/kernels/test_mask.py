"""The block rules against the element rule, by brute force."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn.kernels.launch import interpreter
from fastattn.kernels.launch.arguments import kernel_mask
from fastattn.kernels.rules.mask import valid_keys, visible
from fastattn.kernels.rules.plans import (
    boundary_block,
    full_block,
    key_plan,
    masked_block,
    query_plan,
)
from fastattn.kernels.rules.tile import batch_row
from fastattn.options import Options
from fastattn.testing import make_qkv

BLOCK_M, BLOCK_N = 4, 8
interpreter.mend()


@triton.jit
def plan_kernel(
    counts_ptr, blocks_ptr, mask, T_q, T_k, width,
    OF_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Plan of tile program_id(0), batch row program_id(1): two counts, and blocks in order."""
    tile = tl.program_id(0)
    b = tl.program_id(1)
    row = batch_row(b, T_q, T_k, mask)
    if OF_KEYS:
        m_first = tile * BLOCK_M
        m_last = tl.minimum(m_first + BLOCK_M, row.T_q) - 1
        full, boundary, place = key_plan(tile, m_first, m_last, 0, row, mask, BLOCK_N)
    else:
        k_first = tl.maximum(tile * BLOCK_N, row.start)
        k_last = tl.minimum((tile + 1) * BLOCK_N, row.end) - 1
        full, boundary, place = query_plan(tile, k_first, k_last, 0, row, mask, BLOCK_M)
    at = b * tl.num_programs(0) + tile
    tl.store(counts_ptr + 2 * at, full)
    tl.store(counts_ptr + 2 * at + 1, boundary)
    for i in range(0, full):
        tl.store(blocks_ptr + at * width + i, full_block(i, place, mask))
    for i in range(0, boundary):
        tl.store(blocks_ptr + at * width + full + i, masked_block(i, place, mask))


@triton.jit
def visible_kernel(out_ptr, mask, T_q, T_k, ROWS: tl.constexpr, COLS: tl.constexpr):
    """visible & valid_keys of batch row program_id(0), head program_id(1): [ROWS, COLS]."""
    row = batch_row(tl.program_id(0), T_q, T_k, mask)
    rows = tl.arange(0, ROWS)
    k_pos = tl.arange(0, COLS)
    keep = visible(rows[:, None], k_pos[None, :], tl.program_id(1), row, mask)
    keep = keep & valid_keys(k_pos, row, mask)[None, :]
    # As dK/dV asks, which transposes.
    across = visible(rows[None, :], k_pos[:, None], tl.program_id(1), row, mask)
    across = tl.trans(across & valid_keys(k_pos, row, mask)[:, None])
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    places = (place * ROWS + rows)[:, None] * COLS + k_pos[None, :]
    tl.store(out_ptr + places, keep.to(tl.int32) + 2 * across.to(tl.int32))


@triton.jit
def boundary_block_kernel(out_ptr, lo, full_lo, full_hi, hi):
    for i in range(0, (full_lo - lo) + (hi - full_hi)):
        tl.store(out_ptr + i, boundary_block(i, lo, full_lo, full_hi))


def plans(options: Options, T_q: int, T_k: int, B: int, device: str, *, of_keys: bool) -> list:
    """[b][tile] -> (full blocks, boundary blocks), each in the order of the visit."""
    lengths = (T_q, T_k)
    if options.cu_seqlens_q is not None:
        lengths = tuple(int(x.diff().max()) for x in (options.cu_seqlens_q, options.cu_seqlens_k))
    blocks_q, blocks_k = triton.cdiv(lengths[0], BLOCK_M), triton.cdiv(lengths[1], BLOCK_N)
    tiles, width = (blocks_q, blocks_k) if of_keys else (blocks_k, blocks_q)
    counts = torch.full((B, tiles, 2), -1, dtype=torch.int32, device=device)
    blocks = torch.full((B, tiles, 2 * width + 1), -1, dtype=torch.int32, device=device)
    plan_kernel[(tiles, B)](
        counts, blocks, kernel_mask(options), T_q, T_k, blocks.shape[2], of_keys, BLOCK_M, BLOCK_N
    )
    return [
        [
            (blocks[b, tile, :full].tolist(), blocks[b, tile, full : full + boundary].tolist())
            for tile, (full, boundary) in enumerate(counts[b].tolist())
        ]
        for b in range(B)
    ]


def sees(i: int, j: int, T_q: int, T_k: int, b: int, mask: dict[str, Any]) -> bool:
    """The definition, for one pair of batch row b."""
    given = mask.get("query_offset", T_k - T_q)
    p = i + (int(given[b]) if isinstance(given, torch.Tensor) else given)
    left, right = mask.get("window", (None, None))
    near = (left is None or p - j <= left) and (right is None or j - p <= right)
    if "stride" in mask:
        on_stride = (p - j) % mask["stride"] == 0
        near = on_stride if left is None and right is None else near or on_stride
    near = near or j < mask.get("keep_first", 0)
    prefix = int(mask["prefix_lengths"][b]) if "prefix_lengths" in mask else 0
    in_time = not mask.get("causal") or j <= p or j < prefix
    length = int(mask["key_lengths"][b]) if "key_lengths" in mask else T_k
    padded = "key_padding_mask" in mask and not mask["key_padding_mask"][b, j]
    return near and in_time and j < length and not padded


def seen(T_q: int, T_k: int, b: int, mask: dict[str, Any]) -> torch.Tensor:
    """bool [T_q, T_k] of one batch row."""
    keep = [[sees(i, j, T_q, T_k, b, mask) for j in range(T_k)] for i in range(T_q)]
    return torch.tensor(keep, dtype=torch.bool).reshape(T_q, T_k)


def options_of(mask: dict[str, Any], T_q: int, T_k: int, B: int, device: str) -> Options:
    q, k, v = make_qkv(B, 1, 1, T_q, T_k, 4, device=device, requires_grad=False)
    mask = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in mask.items()}
    return fastattn.functional.call_options.dense_options(q, k, v, **mask)


def hand_count(keep: torch.Tensor, exists: torch.Tensor, BLOCK: int) -> tuple[list, list]:
    """Blocks of columns of keep [rows of a tile, columns]: wholly seen ones, and others seen."""
    full, part = [], []
    for n, start in enumerate(range(0, keep.shape[1], BLOCK)):
        columns = slice(start, start + BLOCK)
        whole = start + BLOCK <= keep.shape[1] and bool(exists[columns].all())
        if keep.shape[0] and keep[:, columns].all() and whole:
            full.append(n)
        elif keep[:, columns].any():
            part.append(n)
    return full, part


def check_plan(
    plan: tuple[list, list], keep: torch.Tensor, exists: torch.Tensor, BLOCK: int, *, exact: bool
) -> None:
    full, boundary = plan
    must_full, must_part = hand_count(keep, exists, BLOCK)
    assert len({*full, *boundary}) == len(full) + len(boundary), "a block is visited twice"
    assert {*must_full, *must_part} <= {*full, *boundary}, "a visible block is left out"
    assert {*full} <= {*must_full}, "a full block hides something"
    assert all(0 <= n * BLOCK < keep.shape[1] for n in boundary), "a block that does not exist"
    if exact:
        assert sorted(full) == must_full, "a full block is masked for nothing"
        assert sorted(boundary) == must_part, "a block without visible pairs is visited"


def check_plans_of_row(
    of_keys: list, of_queries: list, T_q: int, T_k: int, b: int, mask: dict[str, Any], exact: bool
) -> None:
    """The plans of every tile of queries, and those of every tile of keys, of batch row b."""
    keep = seen(T_q, T_k, b, mask)
    existence = {n: x for n, x in mask.items() if n in ("key_lengths", "key_padding_mask")}
    exists = seen(1, T_k, b, existence)[0]
    for tile, plan in enumerate(of_keys):
        check_plan(plan, keep[tile * BLOCK_M :][:BLOCK_M], exists, BLOCK_N, exact=exact)
    every_row = torch.ones(T_q, dtype=torch.bool)
    for tile, plan in enumerate(of_queries):
        # Keys that do not exist are no reason to mask: their gradients are not kept.
        keys = torch.arange(T_k)[tile * BLOCK_N :][:BLOCK_N]
        keys = keys[exists[keys]]
        if len(keys):
            check_plan(plan, keep[:, keys].T, every_row, BLOCK_M, exact=exact)


def check_plans(mask: dict[str, Any], T_q: int, T_k: int, device: str, *, exact: bool) -> None:
    """Both directions, of both batch rows."""
    options = options_of(mask, T_q, T_k, 2, device)
    both_plans = [plans(options, T_q, T_k, 2, device, of_keys=of_keys) for of_keys in (True, False)]
    for b in range(2):
        check_plans_of_row(both_plans[0][b], both_plans[1][b], T_q, T_k, b, mask, exact)


BANDS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window-left": {"window": (5, 0)},
    "window-one": {"window": (0, 0)},
    "window-both": {"window": (3, 2)},
    "window-right": {"window": (None, 4)},
    "window-past": {"window": (6, None)},
    "window-wide": {"window": (40, 40)},
    "window-causal": {"window": (6, 9), "causal": True},
    "prefix": {"causal": True, "prefix_lengths": torch.tensor([9, 0])},
    "prefix-long": {"causal": True, "prefix_lengths": torch.tensor([16, 99])},
    "prefix-past": {"causal": True, "prefix_lengths": torch.tensor([13, -2]), "window": (7, None)},
    "prefix-both": {"causal": True, "prefix_lengths": torch.tensor([13, 24]), "window": (12, 3)},
}
FIRST: dict[str, dict[str, Any]] = {
    "first": {"window": (5, 0), "keep_first": 3},
    "first-ahead": {"window": (2, 1), "keep_first": 20},
    "first-causal": {"window": (9, None), "keep_first": 8, "causal": True},
    "first-prefix": {
        "window": (4, 0), "keep_first": 17,
        "causal": True, "prefix_lengths": torch.tensor([13, 24]),
    },
}  # fmt: skip
# Of these, ranges know where blocks lie, and `block_table` which of them are full.
STRIDES: dict[str, dict[str, Any]] = {
    "stride": {"stride": 5},
    "stride-causal": {"stride": 7, "causal": True},
    "stride-first": {"stride": 4, "window": (2, 0), "keep_first": 2, "causal": True},
}
MASKS = {**BANDS, **FIRST, **STRIDES}
# T_q, T_k, query_offset
SIZES = [
    (20, 20, 0),
    (13, 29, 16),
    (29, 13, -16),
    (10, 31, 5),
    (9, 30, -40),
    (9, 30, 60),
    (1, 17, 16),
]


def plan_cases() -> Iterator[tuple[str, dict[str, Any], int, int, bool]]:
    """Masks by name, T_q, T_k, and whether ranges know all of the mask."""
    for name, (T_q, T_k, offset) in itertools.product((*BANDS, *FIRST), SIZES):
        yield name, {"query_offset": offset}, T_q, T_k, name in BANDS
    ends = torch.zeros(2, 40, dtype=torch.bool)
    ends[0, 11:30] = ends[1, 16:] = True
    for name in ("all", "causal", "window-both", "window-causal", "prefix"):
        for lengths in ((0, 1), (13, 20), (16, 99), (-4, 8)):
            yield name, {"key_lengths": torch.tensor(lengths)}, 20, 20, True
        yield name, {"key_padding_mask": ends}, 24, 40, True
    holes = torch.ones(2, 40, dtype=torch.bool)
    holes[0, 9:18] = holes[1, 39] = holes[1, 5] = False
    for name in ("all", "causal", "window-left", "window-both", "first"):
        beside = {"key_padding_mask": holes, "key_lengths": torch.tensor([35, 99])}
        yield name, beside, 24, 40, False
    for name in ("causal", "window-left", "prefix-both", *FIRST):
        yield name, {"query_offset": torch.tensor([3, 20])}, 11, 30, False


@pytest.mark.parametrize(("mask", "beside", "T_q", "T_k", "exact"), list(plan_cases()))
def test_plans(
    mask: str, beside: dict[str, Any], T_q: int, T_k: int, exact: bool, device: str
) -> None:
    check_plans({**MASKS[mask], **beside}, T_q, T_k, device, exact=exact)


def test_first_keys_cost_their_own_blocks_alone(device: str) -> None:
    mask = {"window": (3, 0), "keep_first": 9, "query_offset": 60}
    options = options_of(mask, 4, 64, 1, device)
    [[(full, boundary)]] = plans(options, 4, 64, 1, device, of_keys=True)
    assert full == []
    assert boundary == [0, 1, 7]


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
@pytest.mark.parametrize("mask", STRIDES)
def test_ranges_of_strides(mask: str, sizes: tuple[int, int, int], device: str) -> None:
    T_q, T_k, offset = sizes
    given = {**STRIDES[mask], "query_offset": offset}
    keep = seen(T_q, T_k, 0, given)
    options = options_of(given, T_q, T_k, 2, device)
    for of_keys in (True, False):
        actual = plans(options, T_q, T_k, 2, device, of_keys=of_keys)[0]
        rows, BLOCK = (BLOCK_M, BLOCK_N) if of_keys else (BLOCK_N, BLOCK_M)
        for tile, (full, boundary) in enumerate(actual):
            part = (keep if of_keys else keep.T)[tile * rows :][:rows]
            every = torch.ones(part.shape[1], dtype=torch.bool)
            seen_full, seen_part = hand_count(part, every, BLOCK)
            assert {*seen_full, *seen_part} <= {*full, *boundary}


PACKED_Q, PACKED_K = (0, 7, 7, 20), (0, 20, 25, 29)


@pytest.mark.parametrize("mask", ["all", "causal", "window-both", "prefix", "prefix-both", *FIRST])
def test_plans_of_packed_sequences(mask: str, device: str) -> None:
    """More tiles are asked for than the shorter sequences have: those visit nothing."""
    given = {**MASKS[mask], "key_lengths": torch.tensor([18, 5, 9])}
    if "prefix_lengths" in given:
        given["prefix_lengths"] = torch.tensor([9, 0, 3])
    q, k = torch.zeros(20, 1, 4), torch.zeros(29, 1, 4)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (PACKED_Q, PACKED_K))
    options = fastattn.functional.call_options.packed_options(q, k, k, cu_q, cu_k, **given)
    options = Options(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in options))
    both_plans = [plans(options, 20, 29, 3, device, of_keys=of_keys) for of_keys in (True, False)]
    for b in range(3):
        T_q, T_k = (x[b + 1] - x[b] for x in (PACKED_Q, PACKED_K))
        check_plans_of_row(both_plans[0][b], both_plans[1][b], T_q, T_k, b, given, exact=False)
        assert all(plan == ([], []) for plan in both_plans[0][b][triton.cdiv(T_q, BLOCK_M) :])


@pytest.mark.parametrize("mask", MASKS)
def test_visible(mask: str, device: str) -> None:
    T_q, T_k = 16, 32
    padding = torch.rand(2, T_k, generator=torch.Generator().manual_seed(0)) < 0.7
    for offset in (0, 5, -3):
        given = {**MASKS[mask], "query_offset": offset, "key_padding_mask": padding}
        given["key_lengths"] = torch.tensor([27, 40])
        out = torch.full((2, 1, T_q, T_k), -1, dtype=torch.int32, device=device)
        options = options_of(given, T_q, T_k, 2, device)
        visible_kernel[(2, 1)](out, kernel_mask(options), T_q, T_k, T_q, T_k)
        for b in range(2):
            assert torch.equal(out[b, 0].cpu(), 3 * seen(T_q, T_k, b, given).int())


@triton.jit
def of_places(b, h, q_pos, k_pos, table):
    return (q_pos + 2 * k_pos + b) % 3 != tl.load(table + h)


def test_visible_of_tensors_and_functions(device: str) -> None:
    """Documents, an attn_mask and a mask_mod, each of batch row, head, query and key."""
    B, H, T_q, T_k = 2, 2, 16, 32
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(-1, 3, (B, T), generator=generator) for T in (T_q, T_k)]
    attn_mask = torch.rand(B, H, T_q, T_k, generator=generator) < 0.8
    table = torch.tensor([0, 2], dtype=torch.int32)
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    options = fastattn.functional.call_options.dense_options(
        q, k, v, documents=tuple(x.to(device) for x in ids), attn_mask=attn_mask.to(device),
        mask_mod=of_places, mod_tensors=(table.to(device),), query_offset=4,
    )  # fmt: skip
    out = torch.full((B, H, T_q, T_k), -1, dtype=torch.int32, device=device)
    visible_kernel[(B, H)](out, kernel_mask(options), T_q, T_k, T_q, T_k)
    expected = attn_mask & (ids[0][:, None, :, None] == ids[1][:, None, None, :])
    expected &= (ids[1] >= 0)[:, None, None, :]
    b, h, i, j = torch.meshgrid(*map(torch.arange, (B, H, T_q, T_k)), indexing="ij")
    expected &= (i + 4 + 2 * j + b) % 3 != table[h]
    assert torch.equal(out.cpu(), 3 * expected.int())
    assert expected.any()


def test_boundary_blocks_are_those_around_the_full_ones(device: str) -> None:
    out = torch.full((8,), -1, dtype=torch.int32, device=device)
    boundary_block_kernel[(1,)](out, 2, 4, 7, 9)
    assert out.tolist() == [2, 3, 7, 8, -1, -1, -1, -1]
