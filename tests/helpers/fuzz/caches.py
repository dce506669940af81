"""Judges of calls on caches: decoding from every kind, packed queries, shared prefixes."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import fastattn
from fastattn import view_of_tensors
from fastattn.cache_view import as_bytes
from fastattn.compat.flash_attn import version_2, version_3
from fastattn.ops.decode import one_memory
from fastattn.quantization import codes_within
from fastattn.rotary import apply_rotary, rotary_tables
from fastattn.testing import assert_within_budget
from fastattn.testing.calls import Draw
from fastattn.testing.decoding import KINDS, Filled, assert_decoded, assert_paged, fill

from .cases import ORDERS, Case
from .integrations import by_flash_attn
from .tensors import assert_nan_stays, inputs, laid
from .values import drawn_options

# What a ring has of its own.
_OF_RINGS = ("window", "keep_first", "stride")
_CODES: tuple[tuple[float, Any], ...] = ((127.0, "int8"), (448.0, "fp8"))
# What a step over shared pages takes.
_OF_SHARED = ("causal", "scale", "softcap", "sinks")


def decode(case: Case, how: dict[str, Any]) -> None:
    """o and lse of the newest tokens of every row."""
    draw = case.random("decode")
    kind = draw.choice(*KINDS)
    T_q = min(case.T_q, 3 if "window" in KINDS[kind] else draw.choice(1, 1, 2, 3, 17))
    _, k, v = inputs(case)
    attend(replace(case, T_q=T_q), draw, fill(kind, k, v, _lengths(case, draw)), how)


def attend(case: Case, draw: Draw, filled: Filled, how: dict[str, Any]) -> None:
    """Judge a call of `decode_attention` on a cache of any kind and history."""
    T_q, view = case.T_q, filled.view
    options = drawn_options(case, case.B)
    if view.window is not None:
        options = {name: x for name, x in options.items() if name not in _OF_RINGS}
    if view.starts is not None:
        options.pop("batch_invariant", None)
    if case.D_v < case.D and one_memory(view.k, view.v, view.k_scale, view.v_scale):
        options.setdefault("scale", 0.3)
    counts = torch.full((case.B,), T_q)
    if draw.chance(0.3):
        counts = draw.integers(-1, T_q + 1, case.B)
        how = {**how, "new_lengths": counts}
    splits = draw.choice({}, {}, {}, {"num_splits": draw.choice(1, 2, 3, 40)})
    splits = {} if "batch_invariant" in options else splits
    q = inputs(case)[0]
    given = {**how, **splits, **options}
    o, lse = case.call_of(fastattn.decode_attention, q, view, return_lse=True, **given)
    decode = partial(fastattn.decode_attention, cache=view, **given)
    real = torch.arange(T_q) < counts.clamp(0, T_q)[:, None, None]
    assert_nan_stays(case, q, decode, options, real=real.expand(q.shape[:-1]))
    if how.get("backend") == "torch":
        o = case.call_of(fastattn.decode_attention, q, view, **given)
    how = {"counts": counts.clamp(0, T_q), "orders": ORDERS}
    assert_decoded((o, lse), q, filled, **how, **options)


def _lengths(case: Case, draw: Draw, least: int = 0) -> Tensor:
    lengths = [draw.choice(least, case.T_k, draw.integer(least, case.T_k)) for _ in range(case.B)]
    return torch.tensor(lengths, dtype=torch.int32).clamp(min=least)


def paged(case: Case, how: dict[str, Any]) -> None:
    """o and lse of packed tokens, as many as a row may have, with a tree mask or without, over
    pages that rows share or over their own.
    """
    case = replace(case, B=max(1, case.B))
    draw, sharing = case.random("paged"), case.random("sharing")
    kinds = [kind for kind, made in KINDS.items() if "window" not in made and "starts" not in made]
    shares = sharing.chance(0.4)
    if shares:
        kinds = [kind for kind in kinds if "page_size" in KINDS[kind]]
        known = tuple(name for name in case.options if name in _OF_SHARED)
        T_k = case.T_k + sharing.integer(0, 20)
        case = replace(case, B=sharing.integer(2, 5), T_k=T_k, options=known)
    options = drawn_options(case, case.B)
    q, k, v = inputs(case)
    some = (0, 1, 1, min(2, case.T_q), draw.integer(0, case.T_q), case.T_q)
    # The slots of a row hold all its new tokens.
    most = min(case.T_q, case.T_k // 2 if shares else case.T_k)
    counts = [min(draw.choice(*some), most) for _ in range(case.B)]
    offsets = torch.tensor([0, *counts], dtype=draw.choice(torch.int32, torch.int64)).cumsum(0)
    rows = [x[:, :n].transpose(0, 1) for x, n in zip(q, counts, strict=True)]
    packed = torch.cat((*rows, q[0, :, : draw.choice(0, 0, 2)].transpose(0, 1)))
    filled = fill(draw.choice(*kinds), k, v, _lengths(case, draw, max(counts) if shares else 0))
    filled = _of_a_server(case.random("server"), filled)
    if shares:
        filled, how = _with_shared_pages(sharing, filled, counts, offsets, how)
    if draw.chance(0.4):
        options["tree_mask"] = _tree(draw, packed.shape[0], counts)
    if draw.chance(0.3):
        how = {**how, "max_seqlen_q": max(counts) + draw.integer(0, 2)}
    if draw.chance(0.3):
        shape = (*packed.shape[:2], case.D_v)
        how = {**how, "out": laid(packed.new_zeros(1, *shape), draw.choice("bthd", "wide"))[0]}
    actual = case.call_of(
        fastattn.attention_paged, packed, filled.view, offsets, return_lse=True, **how, **options
    )
    assert "out" not in how or actual[0] is how["out"]
    given = {name: x for name, x in how.items() if name != "out"} | options
    serve = partial(fastattn.attention_paged, cache=filled.view, cu_seqlens_q=offsets, **given)
    assert_nan_stays(case, packed, serve, options)
    total = sum(counts)
    assert not actual[0][total:].any() and (actual[1][:, total:] == -torch.inf).all(), "of no row"
    actual = (actual[0][:total], actual[1][:, :total])
    assert_paged(actual, packed, filled, offsets, ORDERS, **options)


def with_kvcache(case: Case) -> None:
    """flash-attn's function: it writes new tokens, rotated or not, and attends to all."""
    draw, T_q = case.random("kvcache"), min(case.T_q, case.random("few").choice(1, 1, 2, 3, 17))
    kind = draw.choice(*(x for x, made in KINDS.items() if not {"window", "quantize"} & {*made}))
    case = replace(case, T_q=T_q)
    q, k, v = inputs(case)
    T_new = min(case.T_k, draw.choice(0, T_q, draw.integer(0, T_q)))
    lengths = _lengths(case, draw, T_new)
    before, steps = lengths.long() - T_new, torch.arange(T_q)
    new = (before[:, None] + steps[:T_new])[:, None, :, None]

    def places(x: Tensor) -> Tensor:
        return new.expand(-1, case.H_k, -1, x.shape[-1])

    tokens = [x.gather(2, places(x)) for x in (k, v)]
    options = {"causal": False, **drawn_options(case, case.B)}
    # All queries are turned to the first new place where nothing is hidden by place.
    moving = options["causal"] or options.get("window") not in (None, (None, None))
    at = before[:, None] + steps * moving, before[:, None] + steps[:T_new]
    (q_turned, k_turned), rotary = _rotated(case, draw, (q, tokens[0]), at)
    # The cache as it is to be afterwards, and before.
    written = k.scatter(2, places(k), k_turned), v
    free = [x.scatter(2, places(x), torch.nan) for x in written]
    expected, filled = (
        _of_a_server(case.random("server"), fill(kind, *x, lengths), codes=False)
        for x in (written, free)
    )
    view, rows, pages = filled.view, filled.view.batch_index, None
    if view.block_table is not None:
        rows, pages = None, view.block_table if rows is None else view.block_table[rows.long()]
    module = version_2 if {"alibi_slopes", "sinks"} & {*options} else version_3
    table = "block_table" if module is version_2 else "page_table"
    theirs = by_flash_attn(options) | {table: pages, "cache_batch_idx": rows}
    theirs |= {"cache_seqlens": before.int(), "cache_leftpad": view.starts, **rotary}
    theirs["num_splits"] = draw.choice(0, 1, 3)
    if T_new:
        theirs |= dict(zip("kv", (x.transpose(1, 2) for x in tokens), strict=True))
    memory = [x.transpose(1, 2) for x in (view.k, view.v)]

    def call(q: Tensor, return_lse: bool) -> Any:
        flags = {"return_softmax_lse": return_lse}
        found = module.flash_attn_with_kvcache(q.transpose(1, 2), *memory, **theirs, **flags)
        return (found[0].transpose(1, 2), found[1]) if return_lse else found.transpose(1, 2)

    actual = case.call_of(call, q, return_lse=True)
    assert torch.equal(theirs["cache_seqlens"], before.int())
    _assert_written(view, expected.view)
    assert_nan_stays(case, q, call, options)
    assert_decoded(actual, q_turned, expected, orders=ORDERS, **options)


def _rotated(
    case: Case, draw: Draw, tensors: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Queries and new keys at these places, rotated or not, and flash-attn's arguments for that."""
    style, pairs = draw.choice("half", "interleaved"), draw.choice(0, case.D // 2, case.D // 4)
    if not pairs or not tensors[1].shape[2]:
        return tensors, {}
    tables = rotary_tables(torch.arange(case.T_k + case.T_q), 2 * pairs)
    cos, sin = (x.to(case.dtype) for x in tables)
    turned = tuple(
        apply_rotary(x, cos.float()[rows], sin.float()[rows], style=style)
        for x, rows in zip(tensors, at, strict=True)
    )
    flags = {"rotary_interleaved": style == "interleaved"}
    return turned, {"rotary_cos": cos, "rotary_sin": sin, **flags}


def _assert_written(view: Any, expected: Any) -> None:
    """Check what a cache holds: values bit by bit, keys as they are rotated."""
    for name in "kv":
        cached, exact = (getattr(x, name) for x in (view, expected))
        assert torch.equal(cached.isnan(), exact.isnan())
        cached, exact = cached.nan_to_num(), exact.nan_to_num()
        assert name == "k" or torch.equal(cached, exact)
        assert_within_budget(f"{name}_cache", cached, exact.double(), exact)


def _of_a_server(draw: Draw, filled: Filled, codes: bool = True) -> Filled:
    """The pages in the layout of a server, whose rows start anywhere, or by one scale for a head or
    for all; some numbers are past the largest code, and become it.
    """
    view, k, v = filled.view, filled.k, filled.v
    scales: dict[str, Any] = {}
    if view.k_scale is not None:
        scales = {"k_scale": view.k_scale, "v_scale": view.v_scale}
    elif codes and draw.chance(0.3) and k.numel():
        dims, largest, kind = draw.choice((0, 2, 3), (0, 1, 2, 3)), *draw.choice(*_CODES)
        numbers = []
        for name, x, pool in (("k", k, view.k), ("v", v, view.v)):
            scale = 0.8 / largest * x.float().abs().amax(dims).reshape(-1).clamp(min=1e-6)
            scales[f"{name}_scale"], per_head = scale, scale.view(-1, 1, 1)
            view = view._replace(**{name: codes_within(pool, per_head, kind)})
            numbers.append(codes_within(x, per_head, kind).float() * per_head)
        k, v = numbers
    bytes_of = torch.cat((as_bytes(view.k), as_bytes(view.v)), -1)
    layout, layers = draw.choice("own", "heads first", "tokens first"), draw.choice(1, 3)
    # Rows that start anywhere, between multiples of 16 bytes too.
    before, behind = draw.choice((0, 0), (0, 1), (1, 0), (1, 1), (0, 16))
    bytes_of = pad(bytes_of, (before, behind))
    if layout == "tokens first":
        bytes_of = bytes_of.transpose(1, 2).contiguous().transpose(1, 2)
    bytes_of = torch.stack((bytes_of,) * layers, 1)[:, -1]
    D, D_v = view.k.shape[3], view.v.shape[3]
    pools = bytes_of[..., before : before + D + D_v].view(view.k.dtype).split((D, D_v), -1)
    return replace(filled, k=k, v=v, view=view_of_tensors(
        *((view.k, view.v) if layout == "own" else pools), view.lengths, **scales,
        block_table=view.block_table, starts=view.starts, batch_index=view.batch_index,
        dtype=view.dtype,
    ))  # fmt: skip


def _with_shared_pages(
    draw: Draw, filled: Filled, counts: list[int], offsets: Tensor, how: dict[str, Any]
) -> tuple[Filled, dict[str, Any]]:
    """The rows in another order, in up to three groups, some of them empty, and rows of no group.

    A group shares the first pages of its longest row: they hold older tokens of all its rows.
    """
    B, size = len(counts), filled.view.page_size
    order = draw.normal(B).argsort()
    k, v, lengths = (x[order] for x in (filled.k, filled.v, filled.lengths))
    assert filled.view.block_table is not None
    table, held = filled.view.block_table.clone(), lengths.tolist()
    rows = [0, *sorted(draw.integer(0, B) for _ in range(draw.choice(0, 1, 1, 2, 2, 3)))]
    shared = []
    for first, last in pairwise(rows):
        group = range(first, last)
        longest = max(group, key=held.__getitem__, default=0)
        older = [held[b] - counts[b] for b in group if counts[b]]
        most = min([held[longest], *older]) if group else 0
        shared.append(draw.choice(most, most, draw.integer(0, most)))
        pages = -(-shared[-1] // size)
        table[order[first:last], :pages] = table[order[longest], :pages]
        for x in (k, v):
            x[first:last, :, : pages * size] = x[longest, :, : pages * size].clone()
    view = filled.view._replace(block_table=table, batch_index=order.int())
    dtype = draw.choice(torch.int32, torch.int64)
    groups = (torch.tensor(x, dtype=dtype) for x in (rows, shared))
    how = {**how, "shared": fastattn.shared_pages(view, offsets, *groups)}
    return Filled(view, k, v, lengths, {}), how


def _tree(draw: Draw, total: int, counts: list[int]) -> Any:
    share = draw.choice(0.2, 0.7, 1.0)
    if draw.chance(0.5):
        return draw.bools(share, total, max(counts) + draw.choice(0, 3))
    sizes = [n * n + draw.choice(0, 2) for n in counts]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return draw.bools(share, sum(sizes)), starts.to(draw.choice(torch.int32, torch.int64))


def cascade(case: Case, how: dict[str, Any]) -> None:
    """A prefix that all rows share, and their own tokens behind it."""
    draw = case.random("cascade")
    kinds = [kind for kind, made in KINDS.items() if "window" not in made and "starts" not in made]
    T_q = min(case.T_q, case.T_k, 3)
    options = drawn_options(case, case.B)
    q, k, v = inputs(case)
    q = q[:, :, :T_q]
    lengths = _lengths(case, draw, T_q)
    own = fill(draw.choice(*kinds), k, v, lengths)
    P = draw.integer(1, 20)
    shape = (1, case.H_k, P)
    start = [draw.normal(*shape, width).to(case.dtype) for width in (case.D, case.D_v)]
    prefix = fill(draw.choice("contiguous", "pages-of-3"), *start, torch.tensor([P]))
    actual = case.call_of(
        fastattn.cascade_attention, q, prefix.view, own.view, return_lse=True, **how, **options
    )
    keys, values = (
        torch.cat((x.to(y.dtype).expand(case.B, -1, -1, -1), y), 2)
        for x, y in ((prefix.k, own.k), (prefix.v, own.v))
    )
    both = Filled(own.view, keys, values, lengths + P, {})
    assert_decoded(actual, q, both, orders=ORDERS, **options)
