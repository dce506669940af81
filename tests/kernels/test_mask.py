"""Blocks that kernels visit, by ranges and by tables, against the masks by brute force."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn import block_mask, reference
from fastattn.functional.call_options import dense_options, packed_options
from fastattn.kernels.launch import interpreter, tiles
from fastattn.kernels.launch.arguments import kernel_mask
from fastattn.kernels.launch.block_sparsity import mask_for_keys, mask_for_queries
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.kernels.rules.plans import full_block, key_plan, masked_block, query_plan
from fastattn.kernels.rules.tile import batch_row
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import to_device

Blocks = list[tuple[list[int], list[int]]]
BLOCK_M, BLOCK_N = 4, 8
B, H, T_q, T_k = 2, 2, 14, 27
TILE = TileConfig(BLOCK_M, BLOCK_N)
LARGE_TILE = TileConfig(16, 16)
interpreter.patch_interpreter()


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


def plans(
    options: Options, T_q: int, T_k: int, B: int, device: str, *, of_keys: bool
) -> list[Blocks]:
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


def expected(keep: torch.Tensor, hidden: torch.Tensor, tile: int, block: int) -> Blocks:
    """Full blocks and others that are seen, for each tile of rows: pairs that are seen, and pairs
    that must be hidden, [rows, columns].
    """
    surplus = -keep.shape[1] % block
    hidden = torch.nn.functional.pad(hidden, (0, surplus), value=True)
    rows_of_blocks = []
    for rows in map(slice, range(0, len(keep), tile), range(tile, len(keep) + tile, tile)):
        used = [n for n, x in enumerate(keep[rows].split(block, 1)) if x.any()]
        full = [n for n, x in enumerate(hidden[rows].split(block, 1)) if n in used and not x.any()]
        rows_of_blocks.append((full, [n for n in used if n not in full]))
    return rows_of_blocks


def both_ways(keep: torch.Tensor, exists: torch.Tensor) -> tuple[Blocks, Blocks]:
    """Blocks of keys for tiles of queries, and of queries for tiles of those keys."""
    # Gradients of keys that do not exist are not kept, so nothing of them has to be hidden.
    hidden = ~keep.T & exists[:, None]
    return expected(keep, ~keep, BLOCK_M, BLOCK_N), expected(keep.T, hidden, BLOCK_N, BLOCK_M)


def check_plans_of_row(
    actual: list[Blocks], T_q: int, T_k: int, b: int, mask: dict[str, Any], exact: bool | None
) -> None:
    """The plans of all tiles of queries, and of keys, of batch row b; exact: that they visit
    nothing else, nor mask it; None: of strides, that they leave out nothing.
    """
    existence = {n: x for n, x in mask.items() if n in ("key_lengths", "key_padding_mask")}
    masks = (reference.visible_mask(T_q, T_k, **mask), reference.visible_mask(1, T_k, **existence))
    keep, exists = (x[b % len(x), 0] for x in masks)
    for way, wanted in enumerate(both_ways(keep, exists[0])):
        for tile, (must_full, must_part) in enumerate(wanted):
            if way and not exists[0, tile * BLOCK_N :][:BLOCK_N].any():
                continue
            full, boundary = actual[way][tile]
            assert len({*full, *boundary}) == len(full) + len(boundary), "a block is visited twice"
            assert {*must_full, *must_part} <= {*full, *boundary}, "a visible block is left out"
            blocks = -(-(T_q if way else T_k) // (BLOCK_M if way else BLOCK_N))
            assert all(0 <= n < blocks for n in boundary), "a block that does not exist"
            if exact is not None:
                assert {*full} <= {*must_full}, "a full block hides something"
            if exact:
                assert sorted(full) == must_full, "a full block is masked for nothing"
                assert sorted(boundary) == must_part, "a block without visible pairs is visited"


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
        "window": (4, 0),
        "keep_first": 17,
        "causal": True,
        "prefix_lengths": torch.tensor([13, 24]),
    },
}
# Of these, ranges know where blocks are, and `block_table` which of them are full.
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


def plan_cases() -> Iterator[tuple[str, dict[str, Any], int, int, bool | None]]:
    """Masks by name, T_q, T_k, and whether ranges know all of the mask."""
    for name, (T_q, T_k, offset) in itertools.product((*BANDS, *FIRST), SIZES):
        yield name, {"query_offset": offset}, T_q, T_k, name in BANDS
    for name, (T_q, T_k, offset) in itertools.product(STRIDES, SIZES[:4]):
        yield name, {"query_offset": offset}, T_q, T_k, None
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
    mask: str, beside: dict[str, Any], T_q: int, T_k: int, exact: bool | None, device: str
) -> None:
    given = {**MASKS[mask], **beside}
    qkv = make_qkv(2, 1, 1, T_q, T_k, 4, device=device, requires_grad=False)
    options = dense_options(*qkv, **to_device(given, device))
    ways = [plans(options, T_q, T_k, 2, device, of_keys=of_keys) for of_keys in (True, False)]
    for b in range(2):
        check_plans_of_row([of_rows[b] for of_rows in ways], T_q, T_k, b, given, exact)


def test_first_keys_cost_their_own_blocks_alone(device: str) -> None:
    qkv = make_qkv(1, 1, 1, 4, 64, 4, device=device, requires_grad=False)
    options = dense_options(*qkv, window=(3, 0), keep_first=9, query_offset=60)
    assert plans(options, 4, 64, 1, device, of_keys=True) == [[([], [0, 1, 7])]]


PACKED_Q, PACKED_K = (0, 7, 7, 20), (0, 20, 25, 29)


@pytest.mark.parametrize("mask", ["all", "causal", "window-both", "prefix", "prefix-both", *FIRST])
def test_plans_of_packed_sequences(mask: str, device: str) -> None:
    """More tiles are requested than the shorter sequences have: those visit nothing."""
    given = {**MASKS[mask], "key_lengths": torch.tensor([18, 5, 9])}
    if "prefix_lengths" in given:
        given["prefix_lengths"] = torch.tensor([9, 0, 3])
    q, k = torch.zeros(20, 1, 4), torch.zeros(29, 1, 4)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (PACKED_Q, PACKED_K))
    options = packed_options(q, k, k, cu_q, cu_k, **given)
    options = Options(**to_device(options._asdict(), device))
    ways = [plans(options, 20, 29, 3, device, of_keys=of_keys) for of_keys in (True, False)]
    for b in range(3):
        T_q, T_k = (x[b + 1] - x[b] for x in (PACKED_Q, PACKED_K))
        check_plans_of_row([of_rows[b] for of_rows in ways], T_q, T_k, b, given, exact=False)
        assert all(plan == ([], []) for plan in ways[0][b][triton.cdiv(T_q, BLOCK_M) :])


def chance(*shape: int, of: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < of


def patches(*shape: int) -> torch.Tensor:
    """A mask whose True and False come in patches, so that blocks of every kind are found."""
    rows, columns = -(-T_q // 5), -(-T_k // 11)
    coarse = chance(*shape[:2], rows, columns)
    wide = coarse.repeat_interleave(5, 2).repeat_interleave(11, 3)
    return wide[:, :, : shape[2], : shape[3]].clone()


@triton.jit
def by_key(b, h, q_pos, k_pos):
    return (k_pos // 7) % 2 == 0


@triton.jit
def by_head(b, h, q_pos, k_pos, table):
    return (q_pos - k_pos >= tl.load(table + h)) | (k_pos < 8)


@triton.jit
def by_row(b, h, q_pos, k_pos):
    return (q_pos // 6 + k_pos // 9) % 2 == b


def ids(T: int) -> torch.Tensor:
    rows = [[0] * 9 + [1] * 8 + [2] * 10, [3] * 17 + [5] * 4 + [-1] * 6]
    return torch.tensor(rows)[:, :T]


HEADS = (torch.tensor([3, 17], dtype=torch.int32),)
# A name, what is given, and whether the table has rows for each batch row and for each head.
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "mask": ({"attn_mask": patches(B, H, T_q, T_k)}, True, True),
    "mask-of-rows": ({"attn_mask": patches(B, 1, T_q, T_k)}, True, False),
    "mask-of-heads": ({"attn_mask": patches(1, H, T_q, T_k)}, False, True),
    "mask-of-pairs": ({"attn_mask": patches(1, 1, T_q, T_k)[0, 0]}, False, False),
    "mask-of-queries": ({"attn_mask": patches(1, H, T_q, 1)}, False, True),
    "documents": ({"documents": (ids(T_q), ids(T_k))}, True, False),
    "documents-window": (
        {"documents": (ids(T_q), ids(T_k)), "window": (9, 2), "query_offset": 0}, True, False,
    ),
    "stride": ({"stride": 5}, False, False),
    "stride-window": ({"stride": 16, "window": 5, "keep_first": 3}, False, False),
    "offsets": ({"stride": 9, "query_offset": torch.tensor([0, 30])}, True, False),
    "lengths": ({"stride": 2, "key_lengths": torch.tensor([20, 3])}, True, False),
    "prefix": (
        {"stride": 1, "causal": True, "prefix_lengths": torch.tensor([20, 3])}, True, False,
    ),
    "padding": ({"attn_mask": patches(1, 1, T_q, T_k), "key_padding_mask": chance(B, T_k, of=0.9)},
                True, False),
    "function": ({"mask_mod": by_row}, True, True),
    "function-of-keys": (
        {"mask_mod": fastattn.BlockMask(by_key, per_batch=False, per_head=False)}, False, False,
    ),
    "function-of-heads": (
        {"mask_mod": fastattn.BlockMask(by_head, per_batch=False), "mod_tensors": HEADS},
        False, True,
    ),
    "function-of-rows": ({"mask_mod": fastattn.BlockMask(by_row, per_head=False)}, True, False),
}  # fmt: skip


def shown(given: dict[str, Any]) -> torch.Tensor:
    """bool [B, H, T_q, T_k]: which pairs the oracle weighs."""
    zeros = torch.zeros(B, H, T_q, 1), torch.zeros(B, 1, T_k, 1)
    one_hot = torch.eye(T_k).expand(B, 1, T_k, T_k)
    weights = reference.attention(*zeros, one_hot, **given)
    return weights > 0


def existing(given: dict[str, Any]) -> torch.Tensor:
    """bool [B, T_k]: the keys that are there."""
    documents = given.get("documents", (None, None))[1]
    return reference.existing_keys(
        B, T_k, given.get("key_padding_mask"), given.get("key_lengths"), documents=documents
    )


def lists(mask: Any, tiles: int, b: int, h: int) -> Blocks:
    """For each tile its full blocks and the others, as the kernels read them."""
    to_b, to_h, width = (x >> 2 for x in mask.table_strides)
    counts, blocks = mask.counts_ptr.reshape(-1, 2).tolist(), mask.blocks_ptr.reshape(-1, width)
    rows_of_blocks = []
    for tile in range(tiles):
        n = b * to_b + h * to_h + tile
        full, part = counts[n]
        row = blocks[n].tolist()
        rows_of_blocks.append((row[:full], row[width - part :][::-1]))
    return rows_of_blocks


@pytest.mark.parametrize("case", CASES)
def test_tables_list_what_is_seen(case: str, device: str) -> None:
    given, per_batch, per_head = CASES[case]
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    options = dense_options(q, k, v, **to_device(given, device))
    tables = mask_for_queries(options, q, k, TILE), mask_for_keys(options, q, k, TILE)
    for mask in tables:
        assert mask.counts_ptr.shape[0] == (B if per_batch else 1) * (H if per_head else 1)
    seen, exists = shown(given), existing(given)
    for b, h in itertools.product(range(B), range(H)):
        for mask, wanted in zip(tables, both_ways(seen[b, h], exists[b]), strict=True):
            assert lists(mask, len(wanted), b, h) == wanted
    assert seen.any() and not seen.all()


def test_tables_of_packed_sequences(device: str) -> None:
    starts_q, starts_k = torch.tensor([0, 5, 5, 14]), torch.tensor([0, 18, 22, 27])
    q, k = torch.zeros(14, H, 4, device=device), torch.zeros(27, 1, 4, device=device)
    starts = starts_q.to(device), starts_k.to(device)
    options = packed_options(q, k, k, *starts, mask_mod=by_row, causal=True)
    q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    tables = mask_for_queries(options, q, k, TILE), mask_for_keys(options, q, k, TILE)
    for b, h in itertools.product(range(3), range(H)):
        rows, keys = (int(x[b + 1] - x[b]) for x in (starts_q, starts_k))
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        p = i + keys - rows
        pairs = (j <= p) & ((p // 6 + j // 9) % 2 == b)
        ways = both_ways(pairs, torch.ones(keys, dtype=torch.bool))
        for mask, wanted in zip(tables, ways, strict=True):
            assert lists(mask, len(wanted), b, h) == wanted


@pytest.mark.parametrize("starts", [(0, 8, 16), (0, 32)], ids=str)
def test_packed_sequences_that_fill_their_last_tile(starts: tuple[int, ...], device: str) -> None:
    """A program then has a slot past the end of its sequence: its row of the table is empty."""
    offsets = torch.tensor(starts, device=device)
    q, k, v = (
        x[0].detach().transpose(0, 1)
        for x in make_qkv(1, 2, 1, starts[-1], starts[-1], 16, device=device)
    )
    with tiles.forced(**dict.fromkeys(tiles.KINDS, LARGE_TILE)):
        assert_matches_reference(
            partial(fastattn.attention_varlen, backend="triton"), q, k, v, offsets, offsets,
            oracle=reference.attention_varlen, stride=2,
        )  # fmt: skip


def test_masks_that_ranges_describe_have_no_table(device: str) -> None:
    q, k, _ = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    padding = chance(B, T_k).to(device)
    options = Options(key_padding_mask=padding, left=3, right=0, keep_first=2)
    assert mask_for_queries(options, q, k, TILE).counts_ptr is None
    assert mask_for_keys(options, q, k, TILE).counts_ptr is None


def test_a_block_mask_keeps_its_tables(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something changes that they were made from. A graph neither keeps nor takes any."""
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    heads = HEADS[0].to(device, copy=True)
    mod = fastattn.BlockMask(by_head, per_batch=False)

    def table(T_q: int = T_q, of_keys: bool = False, **arguments: Any) -> torch.Tensor:
        rows = q[:, :, :T_q]
        options = dense_options(rows, k, v, mask_mod=mod, mod_tensors=(heads,), **arguments)
        make = mask_for_keys if of_keys else mask_for_queries
        return make(options, rows, k, LARGE_TILE).blocks_ptr

    def recorded() -> torch.Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(block_mask, "may_keep", lambda device: False)
            return table()

    recorded()
    assert mod.tables == {}
    first = table()
    assert table() is first and recorded() is not first
    assert table(T_q=9) is not first
    assert table(causal=True) is not first
    assert table(query_offset=3) is not first
    assert table() is first
    heads[0] = 20
    changed = table()
    assert not torch.equal(changed, first)
    assert table(of_keys=True).shape != changed.shape
