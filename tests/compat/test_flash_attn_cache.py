"""flash-attn's caches, written and read in place, against the naive reference."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calls_of_flash_attn import check, check_parts, offsets

from fastattn.compat import flash_attn
from fastattn.compat.flash_attn import flash_attn_with_kvcache, passes
from fastattn.rotary import apply_rotary
from fastattn.testing.budget import assert_within_budget
from fastattn.testing.option_examples import sets_that_cover_pairs, together

pytestmark = pytest.mark.usefixtures("models_on_torch")


S, D = 12, 8


def test_lengths_as_a_number_and_by_default(draw):
    q, k_cache, v_cache = draw(3, 1, 4, D), draw(3, S, 2, D), draw(3, S, 2, D)
    check(flash_attn_with_kvcache(q, k_cache, v_cache), q, k_cache, v_cache)
    numbers = {"cache_seqlens": np.int64(6), "softmax_scale": np.float32(0.3)}
    numbers |= {"causal": np.bool_(True), "window_size": torch.tensor([3, -1])}
    actual = flash_attn_with_kvcache(q, k_cache, v_cache, **numbers)
    check(actual, q, k_cache[:, :6], v_cache[:, :6], scale=0.3, window=(3, None))


def test_varlen_over_pages(draw, device):
    """Pages [P, 4, 2, D] in any order; the first row has more queries than its pages have slots."""
    q, k_pages, v_pages = draw(15, 4, D), draw(10, 4, 2, D), draw(10, 4, 2, D)
    table = torch.tensor([[7, 1, 4], [0, 9, 2]], dtype=torch.int32, device=device)
    cu_q, cu_k = offsets((14, 1), device), offsets((6, 11), device)
    given = {"causal": True, "block_table": table, "return_attn_probs": True}
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 14, 11, **given)
    keys, values = (x[table.long()].flatten(1, 2) for x in (k_pages, v_pages))
    parts = [(slice(0, 14), slice(0, 6)), (slice(14, 15), slice(12, 23))]
    check_parts((o, lse), q, keys.flatten(0, 1), values.flatten(0, 1), parts, causal=True)
    used = cu_k.diff()
    given = {"seqused_k": used, "max_seqlen_q": 14, "causal": True, "page_table": table}
    again = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, return_lse=True, **given)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)
    call = (q, k_pages, v_pages, cu_q, cu_k, 14, 11, 0.0, D**-0.5, True)
    again = passes._flash_attn_varlen_forward(*call, block_table=table)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)


# What differs from a call that reads 16-bit rows of 32 in order, by axis of the grid.
SETTINGS: dict[str, dict[str, Any]] = {
    "leftpad": {"place": "leftpad"},
    "paged": {"place": "paged"},
    "by-index": {"place": "index"},
    "views": {"views": True},
    "new": {"new": "as many as q"},
    "fewer-new": {"new": "fewer than q"},
    "rotary-half": {"rotary": 0.5},
    "rotary-whole": {"rotary": 1.0},
    "interleaved": {"interleaved": True},
    "causal": {"causal_mask": True},
    "local": {"local": True},
    "alibi": {"alibi": True},
    "gqa": {"H_k": 3},
    "mqa": {"H_k": 1},
    "one-split": {"num_splits": 1},
    "59": {"D": 59},
    "80": {"D": 80},
    "one-query": {"sizes": (1, 39)},
    "chunk": {"sizes": (16, 33)},
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("place", "new")),
    **dict.fromkeys(("views", "interleaved", "causal_mask", "local", "alibi"), False),
    **{"rotary": 0.0, "H_k": 6, "num_splits": 0, "D": 32, "sizes": (3, 40)},
}
GRID = sets_that_cover_pairs(SETTINGS, largest=8)
B, H_q, PAGE = 2, 6, 8


def drawn_case(names: tuple[str, ...], device: str) -> SimpleNamespace:
    """The arguments of a call, and the cache as it is to be afterwards, row by row."""
    case = SimpleNamespace(**{**DEFAULTS, **together(SETTINGS, names)})
    generator = torch.Generator().manual_seed(len(names) + 7 * case.D)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.float16)

    def integers(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator, dtype=torch.int32).to(device)

    T_q, S = case.sizes
    if case.rotary and case.new is None:
        case.new = "as many as q"
    T_new = {None: 0, "as many as q": T_q, "fewer than q": max(1, T_q // 2)}[case.new]
    case.q = draw(B, T_q, H_q, case.D)
    case.k, case.v = (draw(B, T_new, case.H_k, case.D) if T_new else None for _ in "kv")
    pages = math.ceil(S / PAGE)
    rows = {"paged": (3 * B * pages, PAGE), "index": (2 * B, S)}.get(case.place, (B, S))
    case.k_cache, case.v_cache = (draw(*rows, case.H_k, case.D) for _ in "kv")
    if case.views:  # of one memory
        both = torch.cat((case.k_cache, case.v_cache), -1)
        case.k_cache, case.v_cache = both[..., : case.D], both[..., case.D :]
    case.lengths = integers(0 if T_new else 1, S - max(T_q, T_new) + 1, B)
    case.first = torch.zeros_like(case.lengths)
    case.options = {"cache_seqlens": case.lengths.clone()}
    shuffled = torch.randperm(rows[0], generator=generator, dtype=torch.int32).to(device)
    if case.place == "leftpad":
        case.first = (case.lengths * torch.rand(B, generator=generator).to(device)).int()
        case.options["cache_leftpad"] = case.first
    elif case.place == "paged":
        case.options["block_table"] = shuffled[: B * pages].view(B, pages)
    elif case.place == "index":
        case.options["cache_batch_idx"] = shuffled[:B]
    if case.rotary:
        pairs = int(case.rotary * case.D) // 16 * 8
        angle = 2 * math.pi * torch.rand(S, pairs, generator=generator)
        case.tables = tuple(x.to(device, torch.float16) for x in (angle.cos(), angle.sin()))
        case.options.update(zip(("rotary_cos", "rotary_sin"), case.tables, strict=True))
    if case.alibi:
        case.options["alibi_slopes"] = 0.3 * torch.rand(B, H_q, generator=generator).to(device)
    case.masks = {"causal": case.causal_mask}
    if case.local:
        case.masks["window"] = case.options["window_size"] = tuple(integers(0, S, 2).tolist())
    return case


def rotated(case: SimpleNamespace, x: torch.Tensor, *, moving: bool) -> torch.Tensor:
    """x [B, T, H, D] turned to places from cache_seqlens on; moving=False: all to the first."""
    if not case.rotary:
        return x
    steps = torch.arange(x.shape[1], device=x.device) * int(moving)
    cos, sin = (table.float()[case.lengths[:, None] + steps] for table in case.tables)
    style = "interleaved" if case.interleaved else "half"
    return apply_rotary(x.transpose(1, 2), cos, sin, style=style).transpose(1, 2)


def rows_in_order(case: SimpleNamespace, cache: torch.Tensor) -> torch.Tensor:
    """[B, S, H_k, D]: what a cache holds for the rows of the batch."""
    if case.place == "paged":
        return cache[case.options["block_table"].long()].flatten(1, 2)
    if case.place == "index":
        return cache[case.options["cache_batch_idx"].long()]
    return cache


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("names", GRID, ids="+".join)
def test_grid(names, backend, device, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", backend)
    case = drawn_case(names, device)
    k_rows, v_rows = (rows_in_order(case, x).clone() for x in (case.k_cache, case.v_cache))
    places = torch.arange(k_rows.shape[1], device=device)
    ends = case.lengths
    if case.k is not None:
        ends = case.lengths + case.k.shape[1]
        written = (places >= case.lengths[:, None]) & (places < ends[:, None])
        k_rows[written] = rotated(case, case.k, moving=True).flatten(0, 1)
        v_rows[written] = case.v.flatten(0, 1)
    actual = flash_attn_with_kvcache(
        case.q, case.k_cache, case.v_cache, case.k, case.v, causal=case.causal_mask,
        rotary_interleaved=case.interleaved, num_splits=case.num_splits,
        return_softmax_lse=True, **case.options,
    )  # fmt: skip
    assert torch.equal(case.options["cache_seqlens"], case.lengths)
    assert torch.equal(rows_in_order(case, case.v_cache), v_rows)
    assert_within_budget("k_cache", rows_in_order(case, case.k_cache), k_rows, k_rows)
    options = dict(case.masks, query_offset=ends - case.q.shape[1], key_lengths=ends)
    options["key_padding_mask"] = places >= case.first[:, None]
    if case.alibi:
        options["alibi_slopes"] = case.options["alibi_slopes"]
    q = rotated(case, case.q, moving=case.causal_mask or case.local)
    check(actual, q, k_rows, v_rows, **options)
