"""Naive attention in plain torch: the oracle of every test, in any floating dtype.

It defines masks and scores independently of the kernels and of `formula`, so that tests detect a
wrong rule in either.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from einops import rearrange, repeat
from torch import Tensor

from .block_mask import is_python, parts_of
from .checks import FARTHEST
from .options import LAID_AS, Window
from .torch_backend import dropout as dropout_bits
from .torch_backend import triton_language

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import AttentionArguments, AttentionPagedArguments, AttentionVarlenArguments


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_keep: Tensor | None = ...,
    return_lse: Literal[False] = ..., **options: "Unpack[AttentionArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_keep: Tensor | None = ...,
    return_lse: Literal[True], **options: "Unpack[AttentionArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_keys: Tensor | None = None,
    relative_query: Tensor | None = None,
    query2: Tensor | None = None,
    key2: Tensor | None = None,
    attn_bias: Tensor | None = None,
    score_mod: Any = None,
    score_mod_grad: Any = None,
    mod_tensors: tuple[Tensor, ...] = (),
    sinks: Tensor | None = None,
    dropout: float = 0,
    dropout_seed: Tensor | None = None,
    dropout_keep: Tensor | None = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    query_offset: int | Tensor | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    heads: tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    first_row: int = 0,
    **masks: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v, computed literally in the dtype of q.

    Arguments and result as in `fastattn.attention`, without checks. Needs memory for every score,
    [B, H_q, T_q, T_k], and D times as much with relative_keys. lse has q's dtype, or fp32 if that
    is wider. torch differentiates score_mod; score_mod_grad is not used.

    Args:
        dropout_keep: bool [B, H_q, T_q, T_k], True = keep the weight; in place of a seed.
        first_row: b of the first row, for a part of a batch.
    """
    B, H_q, T_q, D = q.shape
    H_k, T_k = v.shape[1:3]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask, attn_bias = None, attn_mask
    places = torch_places(B, H_q, T_q, T_k, query_offset, q.device, first_row, positions, heads)
    p, j = places.q_pos.long(), places.k_pos.long()
    keep = visible_mask(
        T_q,
        T_k,
        query_offset=query_offset,
        positions=positions,
        device=q.device,
        **_positional(masks),
    )
    keep = keep & _other_masks(places, attn_mask, mod_tensors, masks)
    # A key that no query may see must not affect the sums, even if it is NaN.
    exists = existing_keys(
        B,
        T_k,
        masks.get("key_padding_mask"),
        masks.get("key_lengths"),
        q.device,
        _key_documents(masks),
    )
    k, v = (x.masked_fill(~exists[:, None, :, None], 0.0) for x in (k, v))

    grouped = rearrange(q, "b (h g) t d -> b h g t d", h=H_k)
    scores = torch.einsum("bhgid,bhjd->bhgij", grouped, k).flatten(1, 2)
    if relative_keys is not None:
        query = q if relative_query is None else relative_query
        group = H_q // len(relative_keys)
        vectors = repeat(relative_keys.to(q.dtype), "h r d -> (h group) r d", group=group)
        near = _by_distance(vectors, p - j)  # [B or 1, H_q, T_q, T_k, D]
        scores = scores + (query.to(q.dtype)[:, :, :, None] * near).sum(-1)
    if query2 is not None and key2 is not None:
        D += query2.shape[-1]
        key2 = key2.masked_fill(~exists[:, None, :, None], 0.0).to(q.dtype)
        of_head = torch.arange(H_q, device=q.device) * key2.shape[1] // H_q
        scores = scores + query2.to(q.dtype) @ key2[:, of_head].mT
    scores = scores * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).reshape(-1, H_q, 1, 1)
        scores = scores - slopes * (p - j).abs()
    if relative_bias is not None:
        scores = scores + _by_distance(relative_bias.to(q.dtype), p - j)
    if attn_bias is not None:
        scores = scores + attn_bias.to(q.dtype)
    if score_mod is not None:
        seen = scores.masked_fill(~keep, 0.0).to(torch.promote_types(q.dtype, torch.float32))
        scores = applied(score_mod, places, mod_tensors, seen).to(q.dtype)

    scores = scores.masked_fill(~keep, float("-inf"))
    sink = torch.full((H_q,), float("-inf"), dtype=q.dtype, device=q.device)
    sink = sink if sinks is None else sinks.to(q.dtype)
    logits = torch.cat((scores, sink[:, None, None].expand(B, H_q, T_q, 1)), dim=-1)
    blind = logits.isneginf().all(-1, keepdim=True)
    logits = logits.masked_fill(blind, 0.0)
    weights = logits.softmax(-1).masked_fill(blind, 0.0)[..., :T_k]
    if dropout:
        if dropout_keep is None:
            seed = dropout_bits.draw_seed(q.device) if dropout_seed is None else dropout_seed
            dropout_keep = dropout_bits.keep_mask(
                seed, dropout, B, H_q, T_q, T_k, first_row=first_row, positions=positions,
                heads=heads,
            )  # fmt: skip
        weights = weights * dropout_keep / (1 - dropout)
    grouped = rearrange(weights, "b (h g) i j -> b h g i j", h=H_k)
    o = torch.einsum("bhgij,bhjd->bhgid", grouped, v).flatten(1, 2)
    if not return_lse:
        return o
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return o, wide.logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ..., *,
    return_lse: Literal[False] = ..., **options: "Unpack[AttentionVarlenArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ..., *,
    return_lse: Literal[True], **options: "Unpack[AttentionVarlenArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each sequence; arguments as in `fastattn.attention_varlen`."""
    q_lengths = cu_seqlens_q.diff().tolist()
    k_lengths = q_lengths if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
    laid = {name: options.pop(name) for name in LAID_AS if options.get(name) is not None}
    pieces = [_split(x, lengths) for x, lengths in ((q, q_lengths), (k, k_lengths), (v, k_lengths))]
    outputs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for n, parts in enumerate(zip(*pieces, strict=True)):
        own = _of_row(options, n)
        for name, x in laid.items():
            part = _split(x, q_lengths if LAID_AS[name] == "q" else k_lengths)[n]
            own[name] = part.transpose(0, 1)[None]
        one = [x.transpose(0, 1)[None] for x in parts]
        o, lse = attention(*one, return_lse=True, first_row=n, **own)  # type: ignore[call-overload]
        outputs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    unowned = q.shape[0] - sum(q_lengths)
    o = torch.nn.functional.pad(torch.cat(outputs), (0, 0, 0, 0, 0, unowned))
    lse = torch.nn.functional.pad(torch.cat(lses, -1), (0, unowned), value=-torch.inf)
    return (o, lse) if return_lse else o


def _split(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Rows of each sequence."""
    return torch.split(x[: sum(lengths)], lengths)


def _of_row(options: dict[str, Any], n: int) -> dict[str, Any]:
    """The options of packed row n, as a batch of one."""
    own = dict(options)
    for name in ("key_lengths", "prefix_lengths", "alibi_slopes"):
        x = options.get(name)
        if isinstance(x, Tensor) and (name != "alibi_slopes" or x.dim() == 2):
            own[name] = x[n][None]
    return own


@overload
def attention_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, cu_seqlens_q: Tensor, *,
    tree_mask: Tensor | tuple[Tensor, Tensor] | None = ..., return_lse: Literal[False] = ...,
    **options: "Unpack[AttentionPagedArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def attention_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, cu_seqlens_q: Tensor, *,
    tree_mask: Tensor | tuple[Tensor, Tensor] | None = ..., return_lse: Literal[True],
    **options: "Unpack[AttentionPagedArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor,
    *,
    tree_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the newest tokens of each row of a cache, as in `fastattn.attention_paged`.

    q [total, H_q, D]; k [B, H_k, T, D] and v [B, H_k, T, D_v]: the cache by position; row b has
    lengths[b] tokens. Omits the results of tokens outside all rows.
    """
    options = {"causal": True, **options}
    outputs, lses = [], []
    for b, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        n, held = last - first, int(lengths[b])
        own = _of_row(options, b)
        if tree_mask is not None:
            own["attn_mask"] = _in_tree(tree_mask, b, first, n, held)
        row = [q[first:last].transpose(0, 1)[None], k[b : b + 1, :, :held], v[b : b + 1, :, :held]]
        o, lse = attention(*row, return_lse=True, first_row=b, **own)  # type: ignore[call-overload]
        outputs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    return (torch.cat(outputs), torch.cat(lses, -1)) if return_lse else torch.cat(outputs)


def _in_tree(tree: Tensor | tuple[Tensor, Tensor], b: int, first: int, n: int, held: int) -> Tensor:
    """bool [n, held]: whether a new token sees a position under the tree mask."""
    if isinstance(tree, tuple):
        begin = int(tree[1][b])
        own = tree[0][begin : begin + n * n].reshape(n, n)
    else:
        own = tree[first : first + n, :n]
    older = max(held - n, 0)
    # A row with fewer tokens than new ones lacks the first of them.
    return torch.cat((own.new_ones(n, older), own[:, n - (held - older) :]), 1)


def torch_places(
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    query_offset: int | Tensor | None,
    device: torch.device,
    first_row: int = 0,
    positions: tuple[Tensor, Tensor] | None = None,
    heads: tuple[int, int] | None = None,
) -> triton_language.Places:
    """Row, head and positions of every score, for users' functions: q_pos is p, k_pos is j."""

    def count(n: int, *shape: int) -> Tensor:
        return torch.arange(n, device=device, dtype=torch.int32).reshape(shape)

    offset = _within_reach(T_k - T_q if query_offset is None else query_offset, device)
    p, j = count(T_q, 1, 1, T_q, 1) + offset, count(T_k, 1, 1, 1, T_k)
    p = p.to(torch.int32)
    if positions is not None:
        p, j = positions[0][:, None, :, None], positions[1][:, None, None, :]
    return triton_language.Places(first_row, B, 0 if heads is None else heads[0], H_q, p, j)


def _within_reach(offset: int | Tensor, device: torch.device | str | None) -> int | Tensor:
    """An offset of all rows, or int64 [B, 1, 1, 1] within 2^28 of 0, as in `attention`."""
    if not isinstance(offset, Tensor):
        return offset
    return offset.clamp(-FARTHEST, FARTHEST).to(device, torch.int64).reshape(-1, 1, 1, 1)


def _by_distance(table: Tensor, distance: Tensor) -> Tensor:
    """Rows of table [H, 2 R + 1, ...] for distances [B or 1, 1, T_q, T_k], clamped to R."""
    R = table.shape[1] // 2
    index = torch.where(distance > R, R, torch.where(distance < -R, -R, distance)) + R
    return table[:, index[:, 0]].transpose(0, 1)


_POSITIONAL = (
    "causal",
    "window",
    "prefix_lengths",
    "keep_first",
    "stride",
    "key_padding_mask",
    "key_lengths",
)


def _positional(masks: dict[str, Any]) -> dict[str, Any]:
    unknown = masks.keys() - {*_POSITIONAL, "documents", "mask_mod"}
    if unknown:
        raise TypeError(f"attention does not support {', '.join(sorted(unknown))}")
    return {name: masks[name] for name in _POSITIONAL if name in masks}


def _key_documents(masks: dict[str, Any]) -> Tensor | None:
    documents = masks.get("documents")
    return documents[1] if isinstance(documents, tuple) else documents


def _other_masks(
    places: triton_language.Places,
    attn_mask: Tensor | None,
    mod_tensors: tuple[Tensor, ...],
    masks: dict[str, Any],
) -> Tensor:
    """Combine documents, attn_mask and mask_mod into a mask that broadcasts to the scores."""
    keep = torch.ones((), dtype=torch.bool, device=places.q_pos.device)
    documents = masks.get("documents")
    if documents is not None:
        q_ids, k_ids = documents if isinstance(documents, tuple) else (documents, documents)
        q_ids, k_ids = q_ids[:, None, :, None], k_ids[:, None, None, :]
        keep = keep & (q_ids == k_ids) & (k_ids >= 0)
    if attn_mask is not None:
        keep = keep & attn_mask
    if masks.get("mask_mod") is not None:
        keep = keep & applied(masks["mask_mod"], places, mod_tensors)
    return keep


def applied(
    mod: Any, places: triton_language.Places, mod_tensors: tuple[Tensor, ...], *scores: Tensor
) -> Tensor:
    """Result of a mask_mod, or with scores of a score_mod, of any kind, for each pair."""
    function, tensors = parts_of(mod, mod_tensors)
    if not is_python(function):
        apply: Any = triton_language.score_mod if scores else triton_language.mask_mod
        result: Tensor = apply(function, *scores, places, tensors)
        return result
    indices = (x.long() for x in places.arguments())
    at = [x.expand(places.shape).flatten() for x in (*scores, *indices)]
    if not at[0].numel():  # torch.vmap takes none
        return scores[0] if scores else at[0].reshape(places.shape) > 0
    result = torch.vmap(lambda *x: torch.as_tensor(function(*x)))(*at)
    return result.reshape(places.shape)


def visible_mask(
    T_q: int,
    T_k: int,
    *,
    causal: bool = False,
    window: Window = None,
    prefix_lengths: int | Tensor | None = None,
    keep_first: int = 0,
    stride: int | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [B or 1, 1, T_q, T_k], True where the query (row) sees the key (column).

    causal, T_q = 2, T_k = 4    window=2, the same    window=(0, 1), the same
        1 1 1 0                    0 1 1 0                0 0 1 1
        1 1 1 1                    0 0 1 1                0 0 0 1
    """
    offset = _within_reach(T_k - T_q if query_offset is None else query_offset, device)
    rows = torch.arange(T_q, device=device).reshape(1, 1, T_q, 1)
    key = torch.arange(T_k, device=device).reshape(1, 1, 1, T_k)
    distance = key - (rows + offset)
    if positions is not None:
        # In int64: torch wraps a number when it compares it with int32.
        key = positions[1].long()[:, None, None, :]
        distance = key - positions[0].long()[:, None, :, None]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        before, after = (window - 1, 0) if isinstance(window, int) else window
        if before is not None:
            keep = keep & (-distance <= before)
        if after is not None:
            keep = keep & (distance <= after)
    if stride is not None:
        on_stride = distance.abs() % stride == 0
        keep = on_stride if window in (None, (None, None)) else keep | on_stride
    keep = keep | (key < keep_first)
    if causal:
        prefix: int | Tensor = 0 if prefix_lengths is None else prefix_lengths
        if isinstance(prefix, Tensor):
            prefix = prefix.reshape(-1, 1, 1, 1)
        keep = keep & ((distance <= 0) | (key < prefix))
    if key_padding_mask is not None or key_lengths is not None:
        B = (key_padding_mask if key_padding_mask is not None else key_lengths).shape[0]  # type: ignore[union-attr]
        exists = existing_keys(B, T_k, key_padding_mask, key_lengths, device)
        keep = keep & exists[:, None, None, :]
    return keep


def selected_mask(
    indices: Tensor, block: tuple[int, int], H_q: int, T_q: int, T_k: int, counts: Tensor | None
) -> Tensor:
    """bool [B, H_q, T_q, T_k]: keys in the listed blocks, as in `selected_attention`."""
    B, H_s, R, n = indices.shape
    named = torch.zeros(B, H_s, R, T_k, dtype=torch.bool, device=indices.device)
    block_of_key = torch.arange(T_k, device=indices.device) // block[1]
    for column in range(n):
        number = indices[..., column : column + 1]
        if counts is not None:
            number = number.where(counts[..., None] > column, -1)
        named |= number == block_of_key
    return repeat(named, "b h r t -> b (h g) (r q) t", g=H_q // H_s, q=block[0])[:, :, :T_q]


def existing_keys(
    B: int,
    T_k: int,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    device: torch.device | str | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """bool [B, T_k]: keys without padding, keys past the row's length and negative ids."""
    exists = torch.ones(B, T_k, dtype=torch.bool, device=device)
    if key_padding_mask is not None:
        exists = exists & key_padding_mask
    if key_lengths is not None:
        exists = exists & (torch.arange(T_k, device=device) < key_lengths[:, None])
    if documents is not None:
        exists = exists & (documents >= 0)
    return exists
