"""Tables of blocks against the masks that they were made from, by brute force."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn import block_mask, reference
from fastattn.kernels.launch import interpreter, tiles
from fastattn.kernels.launch.block_sparsity import mask_for_keys, mask_for_queries
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv

B, H, T_q, T_k = 2, 2, 14, 27
TILE = TileConfig(4, 8)
LARGE_TILE = TileConfig(16, 16)
interpreter.mend()


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


def on(device: str, given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(on(device, x) for x in given)
    return given.to(device) if isinstance(given, torch.Tensor) else given


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


def lists(mask: Any, tiles: int, b: int, h: int) -> list[tuple[list[int], list[int]]]:
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


def expected(
    seen: torch.Tensor, hidden: torch.Tensor, tile: int, block: int
) -> list[tuple[list[int], list[int]]]:
    """The same lists, from pairs that are seen and pairs that must be hidden, [rows, columns]."""
    surplus = -seen.shape[1] % block
    hidden = torch.nn.functional.pad(hidden, (0, surplus), value=True)
    rows_of_blocks = []
    for start in range(0, seen.shape[0], tile):
        rows = slice(start, start + tile)
        used = [bool(x.any()) for x in seen[rows].split(block, 1)]
        whole = [not bool(x.any()) for x in hidden[rows].split(block, 1)]
        full = [n for n, (some, all_) in enumerate(zip(used, whole, strict=True)) if some and all_]
        part = [n for n, some in enumerate(used) if some and n not in full]
        rows_of_blocks.append((full, part))
    return rows_of_blocks


@pytest.mark.parametrize("case", CASES)
def test_tables_list_what_is_seen(case: str, device: str) -> None:
    given, per_batch, per_head = CASES[case]
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    moved = {name: on(device, x) for name, x in given.items()}
    options = fastattn.functional.call_options.dense_options(q, k, v, **moved)
    of_keys = mask_for_queries(options, q, k, TILE)
    of_queries = mask_for_keys(options, q, k, TILE)
    for mask in (of_keys, of_queries):
        assert mask.counts_ptr.shape[0] == (B if per_batch else 1) * (H if per_head else 1)
    seen, exists = shown(given), existing(given)
    kinds = set()
    for b, h in itertools.product(range(B), range(H)):
        pairs = seen[b, h]
        forward = expected(pairs, ~pairs, TILE.BLOCK_M, TILE.BLOCK_N)
        assert lists(of_keys, len(forward), b, h) == forward
        # Gradients of keys that do not exist are not kept, so nothing of them has to be hidden.
        backward = expected(pairs.T, ~pairs.T & exists[b][:, None], TILE.BLOCK_N, TILE.BLOCK_M)
        assert lists(of_queries, len(backward), b, h) == backward
        kinds |= {(bool(full), bool(part)) for full, part in forward + backward}
    assert kinds != {(False, False)}


def test_tables_of_packed_sequences(device: str) -> None:
    starts_q, starts_k = torch.tensor([0, 5, 5, 14]), torch.tensor([0, 18, 22, 27])
    q = torch.zeros(14, H, 4, device=device)
    k = torch.zeros(27, 1, 4, device=device)
    options = fastattn.functional.call_options.packed_options(
        q, k, k, starts_q.to(device), starts_k.to(device), mask_mod=by_row, causal=True
    )
    q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    of_keys, of_queries = mask_for_queries(options, q, k, TILE), mask_for_keys(options, q, k, TILE)
    for b, h in itertools.product(range(3), range(H)):
        rows, keys = (int(x[b + 1] - x[b]) for x in (starts_q, starts_k))
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        p = i + keys - rows
        pairs = (j <= p) & ((p // 6 + j // 9) % 2 == b)
        forward = expected(pairs, ~pairs, TILE.BLOCK_M, TILE.BLOCK_N)
        assert lists(of_keys, len(forward), b, h) == forward
        backward = expected(pairs.T, ~pairs.T, TILE.BLOCK_N, TILE.BLOCK_M)
        assert lists(of_queries, len(backward), b, h) == backward


@pytest.mark.parametrize("starts", [(0, 8, 16), (0, 32)], ids=str)
def test_packed_sequences_that_fill_their_last_tile(starts: tuple[int, ...], device: str) -> None:
    """A program then has a slot past the end of its sequence: its row of the table is empty."""
    offsets = torch.tensor(starts, device=device)
    q, k, v = (
        x[0].detach().transpose(0, 1)
        for x in make_qkv(1, 2, 1, starts[-1], starts[-1], 16, device=device)
    )
    small = dict.fromkeys(("forward", "backward_dq", "backward_dkv"), LARGE_TILE)
    with tiles.forced(**small):
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


def test_a_block_mask_keeps_its_tables(device: str) -> None:
    """Until something changes that they were made from."""
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    heads = HEADS[0].to(device, copy=True)
    mod = fastattn.BlockMask(by_head, per_batch=False)

    def table(T_q: int = T_q, **arguments: Any) -> torch.Tensor:
        options = fastattn.functional.call_options.dense_options(
            q[:, :, :T_q], k, v, mask_mod=mod, mod_tensors=(heads,), **arguments
        )
        return mask_for_queries(options, q[:, :, :T_q], k, LARGE_TILE).blocks_ptr

    first = table()
    assert table() is first
    assert table(T_q=9) is not first
    assert table(causal=True) is not first
    assert table(query_offset=3) is not first
    assert table() is first
    heads[0] = 20
    changed = table()
    assert changed is not first
    assert not torch.equal(changed, first)
    options = fastattn.functional.call_options.dense_options(
        q, k, v, mask_mod=mod, mod_tensors=(heads,)
    )
    assert mask_for_keys(options, q, k, LARGE_TILE).blocks_ptr.shape != changed.shape


def test_tables_that_a_graph_records_are_not_kept(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make_qkv(B, H, 1, T_q, T_k, 4, device=device, requires_grad=False)
    heads = HEADS[0].to(device, copy=True)
    mod = fastattn.BlockMask(by_head, per_batch=False)
    options = fastattn.functional.call_options.dense_options(
        q, k, v, mask_mod=mod, mod_tensors=(heads,)
    )
    with monkeypatch.context() as patched:
        patched.setattr(block_mask, "may_keep", lambda device: False)
        recorded = mask_for_queries(options, q, k, LARGE_TILE).blocks_ptr
    assert mod.tables == {}
    assert mask_for_queries(options, q, k, LARGE_TILE).blocks_ptr is not recorded
