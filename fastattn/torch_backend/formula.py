"""Attention as a torch formula: every option, differentiable any number of times.

It holds all scores of its queries in memory. It serves options that torch's own attention lacks,
and, in chunks of queries, double backward, also for the kernels. The oracle of both is `reference`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..options import LAID_AS, Options, along
from . import dropout, masks, triton_language


@tracing.without_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    return_lse: bool = False,
    first_row: int = 0,
    first_query: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """o in q's dtype, or unrounded if an option says so, and lse; computed in fp32 or wider.

    Args:
        q, k, v: as in `fastattn.attention`, or packed as in `attention_varlen`.
        options: of the call.
        return_lse: whether to return (o, lse).
        first_row: b of the first batch row; not 0 for a part of a batch.
        first_query: i of the first query; not 0 for a part of the queries.
    """
    if options.cu_seqlens_q is not None:
        return each_sequence(attention, q, k, v, options, return_lse)
    H_k, T_k = v.shape[1:3]
    x = scores(q, k, options, first_row=first_row)
    weights, lse = normalised(x, options.sinks, return_lse)
    weights = dropped(weights, options, first_row=first_row, first_query=first_query)
    v = wide(v, masks.existing_keys(options, T_k, q.device))
    o = torch.einsum("bhgqk,bhkd->bhgqd", torch.unflatten(weights, 1, (H_k, -1)), v).flatten(1, 2)
    o = o if options.fp32_results else o.to(q.dtype)
    return (o, lse) if return_lse else o


def dropped(
    weights: Tensor, options: Options, *, first_row: int = 0, first_query: int = 0
) -> Tensor:
    """Apply dropout to weights [B, H_q, T_q, T_k], differentiably."""
    if not options.dropout:
        return weights
    seed, p = options.dropout_seed, options.dropout
    if seed is None:
        assert not weights.numel(), "drawn before"
        return weights
    positions = None
    if options.q_positions is not None and options.k_positions is not None:
        positions = options.q_positions, options.k_positions
    heads = None if options.all_heads is None else (options.first_head, options.all_heads)
    kept = dropout.keep_mask(
        seed, p, *weights.shape,
        first_row=first_row, first_query=first_query, positions=positions, heads=heads,
    )  # fmt: skip
    return weights * kept / (1 - p)


def scores(q: Tensor, k: Tensor, options: Options, *, first_row: int = 0) -> Tensor:
    """Scores [B, H_q, T_q, T_k] in fp32 or wider, -inf where masked."""
    (B, H_q, T_q, _), T_k = q.shape, k.shape[2]
    exists = masks.existing_keys(options, T_k, q.device)
    # Queries are scaled, not products, of which there are more.
    cap = options.softcap
    factor = options.scale / (cap or 1)
    q, k = wide(q, None) * factor, wide(k, exists)
    products = _of_groups(q, k)
    if options.query2 is not None and options.key2 is not None:
        query = wide(options.query2, None) * factor
        products = products + _of_groups(query, wide(options.key2, exists))
    if options.relative_keys is not None:
        given = options.relative_query
        query = q if given is None else given.to(q.dtype) * factor
        keys = options.relative_keys.to(q.dtype)
        products = products + _relative_products(query, keys, k, options)
    keep = masks.visible(options, B, H_q, T_q, T_k, q.device, first_row=first_row)
    products = products if cap is None else cap * products.tanh()
    x = _scores(products, q, keep, options, first_row)
    return x if keep is None else torch.where(keep, x, float("-inf"))


def _of_groups(q: Tensor, k: Tensor) -> Tensor:
    """Products [B, H_q, T_q, T_k], in views that torch.export takes for all lengths."""
    grouped = torch.unflatten(q, 1, (k.shape[1], -1))
    return torch.einsum("bhgqd,bhkd->bhgqk", grouped, k).flatten(1, 2)


def wide(x: Tensor, exists: Tensor | None) -> Tensor:
    """x [B, H, T, D] in fp32 or wider, 0 in nonexistent rows."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if exists is None else torch.where(exists[:, None, :, None], x, 0.0)


def _scores(
    products: Tensor, q: Tensor, keep: Tensor | None, options: Options, first_row: int
) -> Tensor:
    """Scores of visible keys from products [B, H_q, T_q, T_k] that are scaled and capped."""
    x, (B, H_q, T_q, T_k) = products, products.shape
    if options.biases or options.attn_bias is not None:
        x = x + masks.added_scores(q, T_k, options).bias(options)
    if options.score_mod is not None:
        if keep is not None:
            # Gradients at masked keys, such as of log 0, must not propagate.
            x = torch.where(keep, x, 0.0)
        places = masks.places(options, B, H_q, T_q, T_k, q.device, first_row)
        x = triton_language.score_mod(options.score_mod, x, places, options.mod_tensors)
    return x


def _relative_products(query: Tensor, keys: Tensor, k: Tensor, options: Options) -> Tensor:
    """[B, H_q, T_q, T_k]: products of queries with the vectors of their distances to keys."""
    (B, H_q, T_q, _), (_, H_k, T_k, _) = query.shape, k.shape
    if keys.shape[0] == H_k:
        keys = keys.repeat_interleave(H_q // H_k, dim=0)
    every = query @ keys.mT  # [B, H_q, T_q, 2 R + 1]
    index = masks.table_index(options, T_q, T_k, keys.shape[1], query.device)
    return every.gather(-1, index.expand(B, H_q, T_q, T_k))


def normalised(x: Tensor, sinks: Tensor | None, with_lse: bool = True) -> tuple[Tensor, Any]:
    """softmax of scores (-inf: masked) with sinks, and the log of its denominators if requested.

    A fully masked row has weights 0 and lse -inf, with gradients 0.
    """
    T_k = x.shape[-1]
    if sinks is not None:
        column = sinks.to(x.dtype)[:, None, None].expand(*x.shape[:-1], 1)
        x = torch.cat((x, column), dim=-1)
    if not x.shape[-1]:
        return x, x.new_full(x.shape[:-1], float("-inf")) + x.sum(-1)
    blind = x.detach().amax(-1, keepdim=True) == float("-inf")
    if tracing.host_knows(x) and not blind.any():
        weights, lse = _softmax(x, with_lse)
        return weights[..., :T_k], lse
    weights, lse = _softmax(torch.where(blind, 0.0, x), with_lse)
    weights = torch.where(blind, 0.0, weights)[..., :T_k]
    return weights, lse if lse is None else torch.where(blind[..., 0], float("-inf"), lse)


def _softmax(x: Tensor, with_lse: bool) -> tuple[Tensor, Any]:
    """softmax and, if requested, logsumexp of the last dim."""
    if not (tracing.in_forward_mode() and tracing.has_tangent(x)):
        return x.softmax(-1), x.logsumexp(-1) if with_lse else None
    # The tangents of torch's functions are computed in place, so they have no backward.
    largest = x.detach().amax(-1, keepdim=True)
    weights = (x - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total, (total.log() + largest)[..., 0]


def denominator_gradients(
    fields: Mapping[str, Tensor], lse: Tensor, delta: Tensor
) -> dict[str, Tensor]:
    """Gradients of fields that only add to the softmax denominators."""
    if "sinks" not in fields:
        return {}
    # A sink is one more key with value 0: its ds is its weight times (0 - delta).
    return {"sinks": -weighed_by_column(fields["sinks"], lse, delta)}


def weighed_by_column(column: Tensor, lse: Tensor, x: Tensor) -> Tensor:
    """Sums [H_q] of x [B, H_q, T_q] times the weights of a column of scores [H_q], without rows of
    no packed sequence.
    """
    weight = torch.exp(column.to(lse.dtype)[:, None] - lse)
    # Only those rows have no score at all. Their x may be undefined.
    return torch.where(lse == float("-inf"), 0.0, weight * x).sum((0, 2))


def with_column(o: Tensor, lse: Tensor, column: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse with one more key for each head, of value 0 and these scores [H_q]."""
    if column is None:
        return o, lse
    whole = torch.logaddexp(lse, column.to(lse.dtype)[:, None])
    share = torch.where(whole == float("-inf"), 0.0, (lse - whole).exp())
    return (o * share[..., None]).to(o.dtype), whole


Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def each_sequence(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a packed call as calls of `attend`, each of the rows of some sequences of equal lengths.

    Raises:
        ValueError: as `sequences`, which reads the offsets on the host.
    """
    assert options.cu_seqlens_q is not None
    outputs = [q.new_empty(0, q.shape[1], v.shape[2])]
    lses = [q.new_empty(q.shape[1], 0, dtype=torch.float32)]
    if options.cu_seqlens_q.shape[0] == 1:
        # Without sequences, keep the inputs in the graph, with gradients of 0.
        inputs = (q, k, v, *options.differentiable)
        nothing = torch.stack([0 * x.sum().float() for x in inputs if x is not None]).sum()
        outputs, lses = [outputs[0] + nothing], [lses[0] + nothing]
    scores = _TOGETHER // max(1, q.shape[1]) if tracing.host_knows(q) else 0
    every = [*sequences(options, q.shape[0], k.shape[0], scores)]
    rows, keys = [x[2] for x in every], [x[3] for x in every]
    parts = zip(cut(q, rows), cut(k, keys), cut(v, keys), strict=True)
    for (n, count, *_, own), part in zip(every, parts, strict=False):
        batch = [as_rows(x, count) for x in part]
        results = attend(*batch, own, return_lse=return_lse, first_row=n)
        if isinstance(results, tuple):
            lses.append(results[1].transpose(0, 1).flatten(1))
        o = results[0] if isinstance(results, tuple) else results
        outputs.append(o.transpose(1, 2).flatten(0, 1))
    o = torch.cat(outputs)
    unowned = q.shape[0] - o.shape[0]
    if unowned:
        o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, unowned))
        lses.append(lses[0].new_full((q.shape[1], unowned), float("-inf")))
    return (o, torch.cat(lses, dim=1)) if return_lse else o


# Scores of sequences that are computed together: 4 MiB in fp32.
_TOGETHER = 2**20


def sequences(
    options: Options, total_q: int, total_k: int, scores: int = 0
) -> Iterator[tuple[int, int, slice, slice, Options]]:
    """Iterate over a packed call's sequences: (number, count, queries, keys, options).

    Reads the offsets on the host. Sequences of equal lengths that follow one another come together,
    as many as have so many scores of a head, as the rows of a batch.

    Raises:
        ValueError: offsets do not rise from 0, or exceed the total.
    """
    assert options.cu_seqlens_q is not None and options.cu_seqlens_k is not None
    checks.check_offset_values("cu_seqlens_q", options.cu_seqlens_q, total_q)
    checks.check_offset_values("cu_seqlens_k", options.cu_seqlens_k, total_k)
    starts = {"q": options.cu_seqlens_q.tolist(), "k": options.cu_seqlens_k.tolist()}
    runs = [*_runs(starts["q"], starts["k"], scores)]
    parts = {of: [slice(x[n], x[n + count]) for n, count in runs] for of, x in starts.items()}
    fields = [(name, of, getattr(options, name)) for name, of in LAID_AS.items()]
    laid = {name: cut(x, parts[of]) for name, of, x in fields if x is not None}
    for i, (n, count) in enumerate(runs):
        rows, keys = parts["q"][i], parts["k"][i]
        own = {name: as_rows(x[i], count) for name, x in laid.items()}
        yield n, count, rows, keys, _of_sequences(options, n, count, rows, keys, own)


def _runs(q_starts: Sequence[int], k_starts: Sequence[int], scores: int) -> Iterator[Sequence[int]]:
    """(number, count) of sequences that come together; see `sequences`."""
    lengths = zip(*([b - a for a, b in pairwise(x)] for x in (q_starts, k_starts)), strict=True)
    if not scores:
        yield from ((n, 1) for n, _ in enumerate(lengths))
        return
    n = 0
    for (T_q, T_k), alike in groupby(lengths):
        most, left = max(1, scores // max(1, T_q * T_k)), len([*alike])
        for first in range(0, left, most):
            yield n + first, min(most, left - first)
        n += left


def as_rows(x: Tensor, count: int = 1) -> Tensor:
    """Packed x [count T, H, ...] as [count, H, T, ...]."""
    return torch.unflatten(x, 0, (count, x.shape[0] // count)).transpose(1, 2)


def cut(x: Tensor, parts: Sequence[slice]) -> Sequence[Tensor]:
    """Rows of packed sequences, with one gradient for all: that of a slice is as large as x."""
    sizes = [part.stop - part.start for part in parts]
    return x.split_with_sizes([*sizes, x.shape[0] - sum(sizes)])


_BY_SEQUENCE = along("B")


def _of_sequences(
    options: Options, n: int, count: int, rows: slice, keys: slice, own: dict[str, Any]
) -> Options:
    """Options of sequences n.. of a packed call, with their own rows of what is laid as q or k."""
    for name, behind in _BY_SEQUENCE.items():
        x = getattr(options, name)
        if x is not None and x.dim() == behind + 1:
            own[name] = x[n : n + count]
    offset = ((keys.stop - keys.start) - (rows.stop - rows.start)) // count
    return options._replace(cu_seqlens_q=None, cu_seqlens_k=None, query_offset=offset, **own)
