"""torch's `flex_attention`, computed by `fastattn.attention`.

    from fastattn.compat.flex_attention import flex_attention

score_mod and mask_mod are translated to the kernels' functions, and the blocks of a `BlockMask`
hold.
"""

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from .. import block_mask as own
from ..functional.fused_attention import attention

# Untyped, as the overloads take only a literal return_lse.
_attention: Any = attention


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: [B, H_q, T_q, D].
        key: [B, H_k, T_k, D]; with a block_mask also [1, H_k, T_k, D], as value.
        value: [B, H_k, T_k, D_v].
        score_mod: score_mod(score, b, h, q_idx, kv_idx) in torch; captured tensors have gradients.
        block_mask: its blocks and its mask_mod, which is translated at the first call with this
            object and its parts. Full blocks are not masked, and blocks without a visible pair are
            skipped. Under torch.compile it is evaluated at all pairs in each call, which takes a
            byte for each, as far as it varies; there `fastattn.attention` with a
            `fastattn.BlockMask` skips blocks.
        scale: default D ** -0.5.
        enable_gqa: whether H_k may divide H_q.
        return_lse, return_aux: also return lse, fp32 [B, H_q, T_q], in natural log, or the largest
            scores.
        kernel_options: of torch's kernels; ignored.

    Returns:
        o [B, H_q, T_q, D_v]; (o, lse) with return_lse; (o, AuxOutput) with return_aux.

    Raises:
        TypeError, ValueError: as `fastattn.attention`, or a block_mask of other sizes.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux both return lse: pass one of them")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} heads of query and {key.shape[1]} of key"
        )
    options: dict[str, Any] = {} if score_mod is None else {"score_mod": score_mod}
    if block_mask is not None:
        options |= mask_options(block_mask, query, key)
        if key.shape[0] == 1:
            key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    wanted = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    flags = {"return_lse": wanted.lse, "return_max": wanted.max_scores}
    results = _attention(query, key, value, scale=scale, query_offset=0, **flags, **options)
    o, *others = results if wanted.lse or wanted.max_scores else (results,)
    if return_aux is None:
        return results
    named = dict(zip((n for n in ("lse", "max_scores") if getattr(wanted, n)), others, strict=True))
    return o, AuxOutput(**named)


# By torch's object, with its parts: kernels keep their tables of blocks in ours.
_translated: "WeakKeyDictionary[BlockMask, tuple[list[Any], own.BlockMask]]" = WeakKeyDictionary()


def mask_options(
    mask: BlockMask, query: Tensor, key: Tensor, *, at_all_pairs: bool = False
) -> dict[str, Any]:
    """Translate a block_mask to options of `fastattn.attention`, for query and key [B, H, T, D].

    at_all_pairs: the mask is evaluated, which takes a byte for each pair, as far as it varies.

    Raises:
        ValueError: it is of other sizes, or its function cannot be translated.
    """
    B, H_q, T_q, T_k = sizes = (*query.shape[:3], key.shape[2])
    if tuple(mask.seq_lengths) != (T_q, T_k):
        raise ValueError(
            f"block_mask must be of {T_q} queries and {T_k} keys, got {tuple(mask.seq_lengths)}"
        )
    rows, heads = mask.kv_num_blocks.shape[:2]
    if rows not in (1, B) or heads not in (1, H_q):
        raise ValueError(
            f"block_mask must be of 1 or {B} rows and 1 or {H_q} heads, got {rows} and {heads}"
        )
    if at_all_pairs or torch.compiler.is_compiling():
        return {"attn_mask": _at_all_pairs(_function_of(mask), sizes, query.device)}
    parts = [mask.mask_mod, mask.kv_num_blocks, mask.kv_indices]
    parts += [mask.full_kv_num_blocks, mask.full_kv_indices]
    known = _translated.get(mask)
    if known is None or any(map(operator.is_not, known[0], parts)):
        with torch._C._DisableFuncTorch():  # a transform would wrap what is kept
            function = _function_of(mask)
        known = _translated[mask] = parts, own.BlockMask(function, rows > 1, heads > 1)
    return {"mask_mod": known[1]}


def _function_of(mask: BlockMask) -> Callable[..., Any]:
    """Get the mask of a `BlockMask`: its function in partial blocks, True in full ones."""
    counts = (mask.kv_num_blocks, mask.full_kv_num_blocks)
    lists = (mask.kv_indices, mask.full_kv_indices)
    (rows, columns), visible = mask.BLOCK_SIZE, mask.mask_mod
    blocks = -(-mask.seq_lengths[1] // columns)
    kinds: Any = sum(
        n * _listed(count, indices, blocks)
        for n, count, indices in zip((1, 2), counts, lists, strict=True)
        if count is not None and indices is not None
    )
    per_batch, per_head = (n > 1 for n in mask.kv_num_blocks.shape[:2])

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = kinds[b if per_batch else 0, h if per_head else 0, q_idx // rows, kv_idx // columns]
        return (kind == 2) | ((kind == 1) & visible(b, h, q_idx, kv_idx))

    return seen


def _at_all_pairs(
    function: Callable[..., Any], sizes: tuple[int, ...], device: torch.device
) -> Tensor:
    """A mask [B, H_q, T_q, T_k], expanded where it is constant."""
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, tuple(0 if n == dim else None for n in range(4)))
    seen: Tensor = function(*(torch.arange(n, device=device) for n in sizes))
    return seen


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Mark the blocks in the first `counts` entries of a row's list: int8; others are no blocks."""
    first = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    kept = first & (indices >= 0) & (indices < blocks)
    marks = indices.new_zeros(*indices.shape[:-1], blocks + 1, dtype=torch.int8)
    return marks.scatter(-1, indices.where(kept, blocks).long(), 1)[..., :-1]
