"""xformers' `memory_efficient_attention` and its bias classes, recognised by name.

The contract is xformers/ops/fmha/attn_bias.py of xformers 0.0.35; xformers need not be installed.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import attention, attention_varlen
from .sdpa import bounded_bias


class _Blocks(NamedTuple):
    """A class of block-diagonal biases: mask within a block, and layout of the keys.

    first: query 0 of a block is at key 0; else the last is at the last key. local: the fields of a
    window. keys: "packed", "slots" with starts and lengths, "pages", or "gappy pages".
    """

    causal: bool = False
    first: bool = False
    local: str = ""
    keys: str = "packed"


_BLOCKS = {
    "BlockDiagonalMask": _Blocks(),
    "BlockDiagonalCausalMask": _Blocks(True, first=True),
    "BlockDiagonalCausalFromBottomRightMask": _Blocks(True),
    "BlockDiagonalCausalLocalAttentionMask": _Blocks(True, first=True, local="size"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _Blocks(True, local="size"),
    "BlockDiagonalPaddedKeysMask": _Blocks(keys="slots"),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _Blocks(True, keys="slots"),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _Blocks(local="sides", keys="slots"),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _Blocks(True, local="size", keys="slots"),
    "BlockDiagonalGappyKeysMask": _Blocks(keys="slots"),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _Blocks(True, keys="slots"),
    "PagedBlockDiagonalPaddedKeysMask": _Blocks(keys="pages"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _Blocks(True, keys="pages"),
    "PagedBlockDiagonalGappyKeysMask": _Blocks(keys="gappy pages"),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _Blocks(True, keys="gappy pages"),
}


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `xformers.ops.memory_efficient_attention` by these kernels; differentiable.

    Args:
        query: [B, M, H, K] or grouped [B, M, G, H, K], fp16, bf16 or fp32. Packed blocks: B = 1.
        key, value: as query, with N for M; value's last dim may differ.
        attn_bias: None; a float tensor that broadcasts to [B, H, M, N] or [B, G, H, M, N]; or one
            of xformers' biases. Keys of padded, gappy and paged blocks are gathered.
        p: probability to drop a weight.
        scale: factor on the scores; default K ** -0.5.
        op, output_dtype: only None; output_dtype may be query's.

    Returns:
        Query's shape with value's last dim, contiguous. A query that sees no key has 0.

    Raises:
        TypeError: a bias of another class, or a non-float tensor.
        ValueError: shapes that do not fit, or an unsupported option.
    """
    if op is not None:
        raise ValueError(f"op must be None: xformers' operators are not supported, got {op!r}")
    if output_dtype not in (None, query.dtype):
        raise ValueError(f"output_dtype must be None or {query.dtype}, got {output_dtype}")
    if query.dim() not in (4, 5) or not query.dim() == key.dim() == value.dim():
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ValueError(f"query, key and value must have 4 or 5 dims each, got {shapes}")
    if not query.shape[2:-1] == key.shape[2:-1] == value.shape[2:-1]:
        raise ValueError(
            f"key and value must have query's heads {tuple(query.shape[2:-1])}, got "
            f"{tuple(key.shape[2:-1])} and {tuple(value.shape[2:-1])}"
        )
    q, k, v = (x.flatten(2, -2) for x in (query, key, value))
    options: dict[str, Any] = {"dropout": p, "scale": scale}
    name = type(attn_bias).__name__
    if name in _BLOCKS:
        o = _by_blocks(q, k, v, attn_bias, _BLOCKS[name], options)
    else:
        options |= _dense(attn_bias, name, query)
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    return o.reshape(*query.shape[:-1], value.shape[-1]).contiguous()


def _dense(bias: Any, name: str, query: Tensor) -> dict[str, Any]:
    """Translate a bias without blocks to options of `attention`."""
    if bias is None:
        return {}
    if isinstance(bias, Tensor):
        return {"attn_bias": _added(bias, query)}
    if name == "LowerTriangularMask":
        return {"causal": True, "query_offset": 0}
    if name == "LowerTriangularMaskWithTensorBias":
        return {"causal": True, "query_offset": 0, "attn_bias": _added(bias._bias, query)}
    if name == "LowerTriangularFromBottomRightMask":
        return {"causal": True}
    if name == "LowerTriangularFromBottomRightLocalAttentionMask":
        return {"causal": True, "window": (bias._window_size - 1, 0)}
    if name == "LocalAttentionFromBottomRightMask":
        return {"window": (bias.window_left, bias.window_right)}
    raise TypeError(f"attn_bias must be None, a tensor or a known bias of xformers, got {name}")


def _added(bias: Tensor, query: Tensor) -> Tensor:
    if not bias.dtype.is_floating_point:
        raise TypeError(f"attn_bias must be a tensor of floats, added to scores, got {bias.dtype}")
    if bias.dim() != query.dim():
        raise ValueError(f"attn_bias must have {query.dim()} dims, got {tuple(bias.shape)}")
    if bias.dim() == 5:
        bias = bias.expand(-1, *query.shape[2:4], -1, -1).flatten(1, 2)
    return bounded_bias(bias)


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, kind: _Blocks, options: dict[str, Any]
) -> Tensor:
    """Attend from packed queries [1, total, H, K] within blocks."""
    starts_q, starts = bias.q_seqinfo.seqstart_py, bias.k_seqinfo.seqstart_py
    if q.shape[0] != 1 or k.shape[0] != 1 or q.shape[1] != starts_q[-1]:
        raise ValueError(
            f"query must be [1, {starts_q[-1]}, ...] and key [1, ...] with {type(bias).__name__}, "
            f"got {q.shape[0]}, {q.shape[1]} and {k.shape[0]}"
        )
    if "pages" not in kind.keys and k.shape[1] != starts[-1]:
        raise ValueError(f"key must have {starts[-1]} rows by attn_bias, got {k.shape[1]}")
    new = [end - start for start, end in itertools.pairwise(starts_q)]
    held = _lengths(bias, kind)
    if kind.causal:
        options["causal"] = True
    if kind.local == "size":
        options["window"] = (bias._window_size - 1, 0)
    elif kind.local == "sides":
        options["window"] = (bias.window_left, bias.window_right)
    # Packed queries end at the last key, so with equal lengths they start at the first one.
    spans = new if kind.first else held
    q, k, v = q[0], k[0], v[0]
    if spans != held or kind.keys != "packed":
        places = _places(bias, kind, spans, held, q.device)
        k, v = k.index_select(0, places), v.index_select(0, places)
    if spans != held:
        options["key_lengths"] = torch.tensor(held, dtype=torch.int32, device=q.device)
    offsets = (_offsets(new, q.device), _offsets(spans, q.device))
    return attention_varlen(q, k, v, *offsets, **options)[None]


def _lengths(bias: Any, kind: _Blocks) -> list[int]:
    """Number of keys of each block."""
    info = bias.k_seqinfo
    starts = list(info.seqstart_py)
    blocks = len(bias.q_seqinfo.seqstart_py) - 1
    if kind.keys == "packed":
        return [end - start for start, end in itertools.pairwise(starts)]
    if kind.keys == "gappy pages":  # seqlen is the end of a block
        return [info.seqlen_py[i] - starts[i] for i in range(blocks)]
    return list(info.seqlen_py)


def _places(
    bias: Any, kind: _Blocks, spans: list[int], held: list[int], device: torch.device
) -> Tensor:
    """Row numbers of `spans` keys of each block, the last one repeated past its end."""
    span, length = torch.tensor(spans), torch.tensor(held)
    block = torch.arange(len(spans)).repeat_interleave(span)
    slot = torch.arange(len(block)) - (span.cumsum(0) - span)[block]
    slot = slot.minimum((length - 1).clamp(min=0)[block])
    if kind.keys != "pages":
        starts = torch.tensor(bias.k_seqinfo.seqstart_py[: len(spans)])
        slot += (starts * (length > 0))[block]
    slot, block = slot.to(device), block.to(device)
    if "pages" in kind.keys:
        page = bias.block_tables.to(device)[block, slot // bias.page_size].long()
        slot = page * bias.page_size + slot % bias.page_size
    return slot


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()
