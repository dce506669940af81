"""Attention as a torch formula: every option, differentiable any number of times.

It holds all scores of its queries in memory. It serves options that torch's own attention lacks,
and, in chunks of queries, double backward, also for the kernels. The oracle of both is `reference`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..options import LAID_AS, Options, along
from . import dropout, triton_language


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
    """o in q's dtype, or unrounded by options; lse; computed in fp32 or wider.

    Args:
        q, k, v: as in `fastattn.attention`, or packed as in `attention_varlen`.
        options: of the call.
        return_lse: whether to return (o, lse).
        first_row: b of the first batch row; not 0 for a part of a batch.
        first_query: i of the first query; not 0 for a part of the queries.
    """
    if tracing.autocasting(q.device):
        # Autocast would compute fp32 products in its own dtype.
        with torch.autocast(q.device.type, enabled=False):
            return attention(
                q, k, v, options,
                return_lse=return_lse, first_row=first_row, first_query=first_query,
            )  # fmt: skip
    if options.cu_seqlens_q is not None:
        return each_sequence(attention, q, k, v, options, return_lse)
    B, H_q, T_q, _ = q.shape
    _, H_k, T_k, D_v = v.shape
    x = scores(q, k, options, first_row=first_row)
    weights, lse = normalised(x, options.sinks, return_lse)
    weights = dropped(weights, options, first_row=first_row, first_query=first_query)
    v = wide(v, existing_keys(options, T_k, q.device))
    o = (weights.reshape(B, H_k, H_q // H_k * T_q, T_k) @ v).reshape(B, H_q, T_q, D_v)
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
    elif first_query:
        T_q, T_k = weights.shape[2:]
        places = torch.arange(max(first_query + T_q, T_k), device=weights.device)[None]
        positions = places[:, first_query : first_query + T_q], places[:, :T_k]
    heads = None if options.all_heads is None else (options.first_head, options.all_heads)
    kept = dropout.keep_mask(
        seed, p, *weights.shape, first_row=first_row, positions=positions, heads=heads
    )
    return weights * kept / (1 - p)


def scores(q: Tensor, k: Tensor, options: Options, *, first_row: int = 0) -> Tensor:
    """Scores [B, H_q, T_q, T_k] in fp32 or wider, -inf where masked."""
    B, H_q, T_q, D = q.shape
    _, H_k, T_k, _ = k.shape
    q, k = wide(q, None), wide(k, existing_keys(options, T_k, q.device))
    products = (q.reshape(B, H_k, H_q // H_k * T_q, D) @ k.mT).reshape(B, H_q, T_q, T_k)
    if options.query2 is not None and options.key2 is not None:
        q2, k2 = (
            wide(options.query2, None),
            wide(options.key2, existing_keys(options, T_k, q.device)),
        )
        q2 = q2.reshape(B, k2.shape[1], H_q // k2.shape[1], T_q, q2.shape[-1])
        products = products + torch.einsum("bhgqd,bhkd->bhgqk", q2, k2).reshape(products.shape)
    keep = visible(options, B, H_q, T_q, T_k, q.device, first_row=first_row)
    x = _scores(products, q, H_k, keep, options, first_row)
    return x if keep is None else torch.where(keep, x, float("-inf"))


def wide(x: Tensor, exists: Tensor | None) -> Tensor:
    """x [B, H, T, D] in fp32 or wider, 0 in nonexistent rows."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if exists is None else torch.where(exists[:, None, :, None], x, 0.0)


def _scores(
    products: Tensor, q: Tensor, H_k: int, keep: Tensor | None, options: Options, first_row: int
) -> Tensor:
    """Scores of visible keys from q.k [B, H_q, T_q, T_k]."""
    B, H_q, T_q, T_k = products.shape
    x = products
    if options.relative_keys is not None:
        query = q if options.relative_query is None else options.relative_query.to(q.dtype)
        x = x + _relative_products(query, options.relative_keys.to(q.dtype), T_k, H_k, options)
    x = x * options.scale
    if options.softcap is not None:
        x = options.softcap * torch.tanh(x / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(x.dtype)
        x = x - slopes[..., None, None] * distances(options, T_q, T_k, q.device).abs()
    if options.relative_bias is not None:
        bias = options.relative_bias.to(x.dtype)
        index = _table_index(options, T_q, T_k, bias.shape[1], q.device)[:, 0]
        x = x + bias[:, index].transpose(0, 1)
    if options.attn_bias is not None:
        x = x + options.attn_bias.to(x.dtype)
    if options.score_mod is not None:
        if keep is not None:
            # Gradients at masked keys, such as of log 0, must not propagate.
            x = torch.where(keep, x, 0.0)
        places = _places(options, B, H_q, T_q, T_k, q.device, first_row)
        x = triton_language.score_mod(options.score_mod, x, places, options.mod_tensors)
    return x


def _relative_products(query: Tensor, keys: Tensor, T_k: int, H_k: int, options: Options) -> Tensor:
    """[B, H_q, T_q, T_k]: products of queries with the vectors of their distances to keys."""
    B, H_q, T_q, _ = query.shape
    if keys.shape[0] == H_k:
        keys = keys.repeat_interleave(H_q // H_k, dim=0)
    every = query @ keys.mT  # [B, H_q, T_q, 2 R + 1]
    index = _table_index(options, T_q, T_k, keys.shape[1], query.device)
    return every.gather(-1, index.expand(B, H_q, T_q, T_k))


def normalised(x: Tensor, sinks: Tensor | None, with_lse: bool = True) -> tuple[Tensor, Any]:
    """softmax of scores (-inf: masked) with sinks, and the log of its denominators, if asked for.

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
    """softmax and, if asked for, logsumexp of the last dim."""
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


def visible(
    options: Options,
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    device: torch.device,
    *,
    first_row: int = 0,
) -> Tensor | None:
    """bool, broadcasting to [B, H_q, T_q, T_k], as small as possible; None = all visible."""
    exists = existing_keys(options, T_k, device)
    parts = [_near(options, T_q, T_k, device), options.attn_mask]
    parts.append(None if exists is None else exists[:, None, None, :])
    if options.q_documents is not None and options.k_documents is not None:
        same = options.q_documents[:, :, None] == options.k_documents[:, None, :]
        parts.append(same[:, None])
    if options.mask_mod is not None:
        places = _places(options, B, H_q, T_q, T_k, device, first_row)
        parts.append(triton_language.mask_mod(options.mask_mod, places, options.mod_tensors))
    keep = None
    for part in parts:
        if part is not None:
            keep = part if keep is None else keep & part
    return keep


def _near(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor | None:
    """Mask by position: bool [B or 1, 1, T_q, T_k], or None if all is visible."""
    if options.band is None:
        return _pattern(options, T_q, T_k, device)
    (left, right), offset = options.band, options.query_offset
    if left is None and right is None:
        return None
    if options.query_offsets is not None or options.q_positions is not None or offset is None:
        return _window(distances(options, T_q, T_k, device), left, right)
    if sees_all(options, T_q, T_k):
        return None
    near = torch.ones(1, 1, T_q, T_k, dtype=torch.bool, device=device)
    if right is not None:
        near = near.tril(offset + right)
    return near if left is None else near.triu(offset - left)


def sees_all(options: Options, T_q: int, T_k: int) -> bool:
    """Whether the band alone hides no key, as from the query of a decoding step."""
    if options.band is None or options.query_offset is None:
        return False
    (left, right), offset = options.band, options.query_offset
    reaches_last = right is None or offset + right >= T_k - 1
    return reaches_last and (left is None or T_q - 1 + offset - left <= 0)


def _window(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    near = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        near = near & (distance >= -right)
    return near if left is None else near & (distance <= left)


def _pattern(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor:
    """Mask by patterns other than a band: strides, kept first keys, bidirectional prefixes."""
    distance = distances(options, T_q, T_k, device)
    key = _key_positions(options, T_k, device)
    near = _window(distance, options.left, options.right)
    if options.stride is not None:
        if options.left is None and options.right is None:
            near = torch.zeros_like(near)
        near = near | (distance % options.stride == 0)
    if options.keep_first:
        near = near | (key < options.keep_first)
    if options.causal:
        past = distance >= 0
        if options.prefix_lengths is not None:
            past = past | (key < options.prefix_lengths[:, None, None, None])
        near = near & past
    return near


def existing_keys(options: Options, T_k: int, device: torch.device) -> Tensor | None:
    """bool [B, T_k]: keys except padding; None = all exist."""
    exists = options.key_padding_mask
    if options.key_lengths is not None:
        inside = torch.arange(T_k, device=device) < options.key_lengths[:, None]
        exists = inside if exists is None else exists & inside
    if options.k_documents is not None:
        real = options.k_documents >= 0
        exists = real if exists is None else exists & real
    return exists


def distances(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor:
    """p - j, int64 [B or 1, 1, T_q, T_k]."""
    return _query_positions(options, T_q, device) - _key_positions(options, T_k, device)


def _query_positions(options: Options, T_q: int, device: torch.device) -> Tensor:
    """Position of each query among the keys, int64 [B or 1, 1, T_q, 1]."""
    if options.q_positions is not None:
        return options.q_positions.long()[:, None, :, None]
    rows = torch.arange(T_q, device=device)[None, None, :, None]
    if options.query_offsets is not None:
        offsets = options.query_offsets.clamp(-checks.FARTHEST, checks.FARTHEST)
        return rows + offsets[:, None, None, None]
    assert options.query_offset is not None, "packed calls are split before"
    return rows + options.query_offset


def _key_positions(options: Options, T_k: int, device: torch.device) -> Tensor:
    """Position of each key, int64 [B or 1, 1, 1, T_k]."""
    if options.k_positions is not None:
        return options.k_positions.long()[:, None, None, :]
    return torch.arange(T_k, device=device)[None, None, None]


def _table_index(
    options: Options, T_q: int, T_k: int, entries: int, device: torch.device
) -> Tensor:
    """Index in a table of 2 R + 1 distances: int64 [B or 1, 1, T_q, T_k]."""
    R = entries // 2
    return distances(options, T_q, T_k, device).clamp(-R, R) + R


def _places(
    options: Options, B: int, H_q: int, T_q: int, T_k: int, device: torch.device, first_row: int
) -> triton_language.Places:
    """Indices of a call's scores, for the user's functions."""
    q_pos = _query_positions(options, T_q, device).to(torch.int32)
    k_pos = _key_positions(options, T_k, device).to(torch.int32)
    return triton_language.Places(first_row, B, options.first_head, H_q, q_pos, k_pos)


Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def each_sequence(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a packed call as one call of `attend` per sequence, each a batch of one row.

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
    for n, rows, keys, of_sequence in sequences(options, q.shape[0], k.shape[0]):
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        results = attend(*one, of_sequence, return_lse=return_lse, first_row=n)
        if isinstance(results, tuple):
            lses.append(results[1][0])
        outputs.append((results[0] if isinstance(results, tuple) else results)[0].transpose(0, 1))
    o = torch.cat(outputs)
    unowned = q.shape[0] - o.shape[0]
    if unowned:
        o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, unowned))
        lses.append(lses[0].new_full((q.shape[1], unowned), float("-inf")))
    return (o, torch.cat(lses, dim=1)) if return_lse else o


def sequences(
    options: Options, total_q: int, total_k: int
) -> Iterator[tuple[int, slice, slice, Options]]:
    """Iterate over a packed call's sequences: (number, queries, keys, options).

    Reads the offsets on the host.

    Raises:
        ValueError: offsets do not rise from 0, or exceed the total.
    """
    assert options.cu_seqlens_q is not None and options.cu_seqlens_k is not None
    checks.check_offset_values("cu_seqlens_q", options.cu_seqlens_q, total_q)
    checks.check_offset_values("cu_seqlens_k", options.cu_seqlens_k, total_k)
    q_starts, k_starts = options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist()
    for n in range(len(q_starts) - 1):
        rows = slice(q_starts[n], q_starts[n + 1])
        keys = slice(k_starts[n], k_starts[n + 1])
        yield n, rows, keys, _of_sequence(options, n, rows, keys)


_BY_SEQUENCE = along("B")


def _of_sequence(options: Options, n: int, rows: slice, keys: slice) -> Options:
    """Options of sequence n of a packed call."""
    own: dict[str, Any] = {}
    for name, behind in _BY_SEQUENCE.items():
        x = getattr(options, name)
        if x is not None and x.dim() == behind + 1:
            own[name] = x[n : n + 1]
    for name, of in LAID_AS.items():
        if (x := getattr(options, name)) is not None:
            own[name] = x[rows if of == "q" else keys].transpose(0, 1)[None]
    return options._replace(
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        query_offset=(keys.stop - keys.start) - (rows.stop - rows.start),
        **own,
    )
