"""Kernel arguments common to all launchers: strides, alignment, precision, mask and score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton.language as tl
from torch import Tensor

from ..rules.integers import runtime_int
from ..rules.mask import Mask
from ..rules.operands import Strided
from ..rules.score import Score
from ..rules.tile import ORDERED, Constants
from . import tiles
from .descriptors import tma_strides
from .key_extents import launch_padding_extents
from .launches import Stream
from .tiles import TileConfig

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

    # For type checks only: at run time this package imports nothing above it.
    from ...options import Options

# Window sides are added to positions in int32. Distances are shorter: sequences are shorter than
# 2^28, and no query is farther from the first key (`tile.FARTHEST`).
UNBOUNDED = (1 << 29) - 1
# Most rows of a tile.
_MAX_ROWS = 256


def strides(x: Tensor | None) -> tuple[int | None, ...] | None:
    """Batch, head and row stride of [B, H, T, D], in the form of `runtime_int`; None without x."""
    return None if x is None else tuple(map(runtime_int, x.stride()[:3]))


def strided(x: Tensor | None) -> Strided | None:
    """A tensor [B, H, T, D] with its strides, for kernels."""
    return None if x is None else Strided(x, strides(x))


def broadcast_strides(x: Tensor) -> tuple[int | None, ...]:
    """Strides in the form of `runtime_int`, 0 for every dim of size 1."""
    steps = zip(x.shape, x.stride(), strict=True)
    return tuple(runtime_int(0 if size == 1 else stride) for size, stride in steps)


def aligned(x: Tensor) -> Tensor:
    """x if each row is 16-byte aligned, for vector loads, else a copy in the same memory order.

    The caller pads head dims, so only views with unaligned starts or strides are copied.
    """
    elements = 16 // x.element_size()
    assert x.shape[3] % elements == 0, "the caller pads the head dim"
    if x.data_ptr() % 16 == 0:
        stride_b, stride_h, stride_t, _ = x.stride()
        if (stride_b | stride_h | stride_t) % elements == 0:
            return x
        steps = zip(x.shape[:3], x.stride()[:3], strict=True)
        if all(size <= 1 or stride % elements == 0 for size, stride in steps):
            return x
    return copied(x)


def copied(x: Tensor) -> Tensor:
    """A dense copy of [B, H, T, D] that `empty_in_layout` takes like x."""
    return empty_in_layout(x, *x.shape[1:]).copy_(x)


def index_type(*tensors: Tensor | None) -> tl.dtype:
    """Type of offsets inside a tile: int32 if no tile spans 2^31 elements, else int64."""
    for x in tensors:
        if x is not None and abs(x.stride(2)) >= 2**31 // _MAX_ROWS:
            return tl.int64
    return tl.int32


def block_dim(D: int) -> int:
    """Columns of a tile for head dim D: a power of two, at least 16, as tl.dot needs."""
    return max(16, 1 << (D - 1).bit_length())


def blocks(length: int, BLOCK: int) -> int:
    """Number of blocks in a length. `triton.cdiv` is slow on the host."""
    return -(-length // BLOCK)


def tile_for(
    kernel: str,
    options: Options,
    q: Tensor,
    *dims: int,
    calls: Literal["plain", "masked"] = "plain",
    streams_bias: bool = False,
) -> TileConfig:
    """The tile of one of the three attention kernels for padded head dims `dims`.

    calls: least register class of the kernel, see `tiles.lookup`. streams_bias: the kernel loads a
    bias by `bias_stream`.
    """
    registers = options.registers
    if options.key2 is not None:
        dims = (block_dim(q.shape[3] + options.key2.shape[3]), *dims)
    if registers == "relative":
        return tiles.lookup("relative", q.element_size(), max(dims))
    if registers in ("bias", "scores") and not streams_bias:
        registers = "heavy"
    elif registers == "bias" and bias_by_tma(options, q) is None:
        registers = "scores"  # it is loaded in place, like a relative bias
    invariant = options.batch_invariant and kernel == "forward"
    tile = tiles.lookup(kernel, q.element_size(), max(dims), registers or calls, invariant)
    assert options.q_positions is None or max(tile.BLOCK_M, tile.BLOCK_N) <= ORDERED.value
    return tile


def dot_precision(dtype: torch.dtype) -> str:
    """IEEE for fp32 products, unless torch's own matmul may use TF32."""
    return "tf32" if dtype == torch.float32 and tiles.tf32() else "ieee"


def constants(
    tile: TileConfig,
    D: int,
    D_v: int,
    dtype: torch.dtype,
    *tensors: Tensor | None,
    options: Options | None = None,
) -> Constants:
    """Compile-time constants of a kernel; tensors: addressed by rows.

    options: of a call that may have a second product.
    """
    D2 = D
    if options is not None and options.key2 is not None:
        D2, tensors = options.key2.shape[3], (*tensors, options.query2, options.key2)
    sides = (tile.BLOCK_M, tile.BLOCK_N, block_dim(D), block_dim(D_v))
    products = (index_type(*tensors) == tl.int64, dot_precision(dtype), dtype.itemsize == 2)
    return Constants(D, D_v, *sides, *products, D2, block_dim(D2))


def row_constants(
    options: Options, tile: TileConfig, q: Tensor, v: Tensor, *tensors: Tensor | None
) -> Constants:
    """`constants` of a call that may have a second product; tensors: other than q and v."""
    D, D_v = q.shape[3], v.shape[3]
    return constants(tile, D, D_v, q.dtype, q, v, *tensors, options=options)


def shown_by_ranges(options: Options) -> bool:
    """Whether full blocks follow from positions alone."""
    f = options
    others = (f.stride, f.key_padding_mask, f.q_documents, f.attn_mask, f.mask_mod)
    return all(x is None for x in others)


def empty_in_layout(
    like: Tensor, heads: int, rows: int, cols: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Empty [B, heads, rows, cols] in the memory order of `like`, such as [B, T, H, D].

    dtype: default: of `like`.
    """
    B = like.shape[0]
    dtype = like.dtype if dtype is None else dtype
    if like.stride(1) < like.stride(2):
        by_rows = like.new_empty(B, rows, heads, cols, dtype=dtype)
        return by_rows.transpose(1, 2)
    return like.new_empty(B, heads, rows, cols, dtype=dtype)


def result_in_layout(options: Options, like: Tensor, heads: int, rows: int, cols: int) -> Tensor:
    """`empty_in_layout` for a result, in the call's result dtype."""
    dtype = torch.float32 if options.fp32_results else None
    return empty_in_layout(like, heads, rows, cols, dtype)


def launch_tiles(kernel: JITFunction, programs: int, tile: TileConfig, *arguments: object) -> None:
    """Launch a kernel for one call, if there are programs."""
    if programs:
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        kernel[(programs,)](*arguments, **options)


def rules(options: Options, mask: Mask | None, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """Mask, score, and `sizes`, in the kernels' order."""
    return mask, kernel_score(options, q.dtype), *sizes(q, k)


def sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """H_q, G, T_q and T_k, in the kernels' order."""
    _, H_q, T_q, _ = q.shape
    _, H_k, T_k, _ = k.shape
    return H_q, H_q // H_k, T_q, T_k


def query_programs(options: Options, q: Tensor, BLOCK_M: int) -> int:
    """Number of programs of a kernel over tiles of queries: see `tile.query_program`."""
    B, H_q, T_q, _ = q.shape
    return tiles_of(options.cu_seqlens_q, B, T_q, BLOCK_M) * H_q


def key_programs(options: Options, k: Tensor, BLOCK_N: int) -> int:
    """Number of programs of a kernel over tiles of keys: see `tile.key_program`."""
    B, H_k, T_k, _ = k.shape
    return tiles_of(options.cu_seqlens_k, B, T_k, BLOCK_N) * H_k


def tiles_of(cu_seqlens: Tensor | None, B: int, T: int, BLOCK: int) -> int:
    """Tiles of a head in all batch rows; an upper bound for packed sequences, see `tile`."""
    if cu_seqlens is None:
        return B * blocks(T, BLOCK)
    sequences = cu_seqlens.shape[0] - 1
    return T // BLOCK + sequences if T and sequences else 0


def kernel_mask(options: Options, extents: Tensor | None = None) -> Mask:
    """The kernels' mask, without the block table that some masks need.

    extents: of the key padding, to be filled before the launch; None: computed here.
    """
    f = options
    bare = f.prefix_lengths is None and not f.keep_first and f.stride is None
    right = f.right
    if f.causal and bare:
        right = 0 if right is None else min(right, 0)
    padding = f.key_padding_mask
    if extents is None and padding is not None:
        extents = launch_padding_extents(padding)
    return Mask(
        query_offset=runtime_int(f.query_offset),
        left=_distance(f.left),
        right=_distance(right),
        causal=runtime_int(0) if f.causal and not bare else None,
        keep_first=_distance(f.keep_first) if f.keep_first else None,
        stride=_distance(f.stride),
        offsets_ptr=f.query_offsets,
        lengths_ptr=f.key_lengths,
        prefix_ptr=f.prefix_lengths,
        padding_ptr=padding,
        padding_stride=None if padding is None else runtime_int(padding.stride(0)),
        extents_ptr=extents,
        extents_stride=None if extents is None else runtime_int(extents.stride(0)),
        q_documents_ptr=f.q_documents,
        k_documents_ptr=f.k_documents,
        documents_strides=_documents_strides(f),
        q_positions_ptr=f.q_positions,
        k_positions_ptr=f.k_positions,
        positions_strides=_positions_strides(f),
        attn_mask_ptr=f.attn_mask,
        attn_mask_strides=None if f.attn_mask is None else broadcast_strides(f.attn_mask),
        cu_q_ptr=f.cu_seqlens_q,
        cu_k_ptr=f.cu_seqlens_k,
        sequences=None if f.cu_seqlens_q is None else runtime_int(f.cu_seqlens_q.shape[0] - 1),
        mod=getattr(f.mask_mod, "mask_mod", f.mask_mod),
        tensors=f.mod_tensors if f.mask_mod is not None else (),
        first_head=_first_head(f) if f.mask_mod is not None else None,
        tree_ptr=f.tree_mask,
        tree_starts_ptr=f.tree_starts,
        tree=None if f.tree_mask is None else _tree(f.tree_mask),
        ordered=1 if f.batch_invariant and _apart(f) else None,
    )


def _apart(f: Options) -> bool:
    """Whether full blocks may have boundary blocks on both sides, or anywhere."""
    return not shown_by_ranges(f) or f.left is not None or bool(f.keep_first)


def _tree(mask: Tensor) -> tuple[int | None, ...]:
    """`Mask.tree` of a tree mask [total, width], or of consecutive matrices."""
    end = 1 + sum((size - 1) * step for size, step in zip(mask.shape, mask.stride(), strict=True))
    if mask.dim() == 1:
        return runtime_int(1), None, runtime_int(1), runtime_int(UNBOUNDED), runtime_int(end)
    stride_q, stride_k = map(runtime_int, mask.stride())
    return stride_q, stride_q, stride_k, runtime_int(mask.shape[1]), runtime_int(end)


def mask_by_blocks(options: Options) -> Mask:
    """`kernel_mask` without extents of the key padding, whose holes are handled block by block."""
    padding = options.key_padding_mask
    mask = kernel_mask(options._replace(key_padding_mask=None))
    if padding is None:
        return mask
    return mask._replace(padding_ptr=padding, padding_stride=runtime_int(padding.stride(0)))


def _first_head(f: Options) -> int | None:
    return None if f.all_heads is None else runtime_int(f.first_head)


def _distance(x: int | None) -> int | None:
    """A window side as `runtime_int`, clamped to an effectively unbounded one."""
    return None if x is None else runtime_int(min(x, UNBOUNDED))


def _documents_strides(f: Options) -> tuple[int | None, ...] | None:
    if f.q_documents is None or f.k_documents is None:
        return None
    return runtime_int(f.q_documents.stride(0)), runtime_int(f.k_documents.stride(0))


def _positions_strides(f: Options) -> tuple[int | None, ...] | None:
    if f.q_positions is None or f.k_positions is None:
        return None
    return broadcast_strides(f.q_positions)[0], broadcast_strides(f.k_positions)[0]


def bias_stream(options: Options, q: Tensor, tile: TileConfig) -> Stream:
    """Stream of attn_bias in blocks of a score tile; None if TMA cannot load it."""
    index = ~options._fields.index("attn_bias")
    return Stream(index, bias_by_tma(options, q), tile.BLOCK_M, tile.BLOCK_N)


def bias_by_tma(options: Options, q: Tensor) -> Tensor | None:
    """attn_bias with size 1 in dims of equal batch rows or heads, if TMA can load it."""
    # Query and key dims must be full, as TMA does not broadcast.
    bias = options.attn_bias
    if bias is None or bias.shape[2] != q.shape[2] or bias.shape[3] == 1:
        return None
    bias = bias[: 1 if bias.stride(0) == 0 else None, : 1 if bias.stride(1) == 0 else None]
    return None if tma_strides(bias) is None else bias


def kernel_score(options: Options, dtype: torch.dtype = torch.float32) -> Score:
    """The kernels' score, for q of this dtype."""
    f = options
    bias, table, slopes = f.attn_bias, f.relative_bias, f.alibi_slopes
    keys = f.relative_keys
    query, key2 = second_query(f), f.key2
    query = None if query is None else aligned(query)
    key2 = None if key2 is None else aligned(key2)
    return Score(
        scale=f.scale,
        softcap=f.softcap,
        slopes_ptr=slopes,
        slopes_strides=None if slopes is None else _slopes_strides(slopes),
        relative_ptr=table,
        relative_stride=None if table is None else runtime_int(table.stride(0)),
        reach=None if table is None else runtime_int(table.shape[1] // 2),
        keys_ptr=None if keys is None else _aligned_keys(keys),
        keys_heads=None if keys is None else runtime_int(keys.shape[0]),
        keys_reach=None if keys is None else runtime_int(keys.shape[1] // 2),
        query_ptr=query,
        query_strides=strides(query),
        key2_ptr=key2,
        key2_strides=strides(key2),
        key2_heads=None if key2 is None else runtime_int(key2.shape[1]),
        bias_ptr=bias,
        bias_strides=None if bias is None else broadcast_strides(bias),
        mod=f.score_mod,
        mod_grad=f.score_mod_grad if f.score_mod is not None else None,
        tensors=f.mod_tensors if f.score_mod is not None else (),
        sinks_ptr=f.sinks,
        dropout=int(f.dropout * 2**32) - 2**31 if f.dropout else None,
        dropout_scale=1 / (1 - f.dropout) if f.dropout else None,
        seed_ptr=f.dropout_seed if f.dropout else None,
        exact=1 if dtype == torch.float32 or f.batch_invariant else None,
        placed=None if f.q_positions is None else 1,
        first_head=_first_head(f) if f.score_mod is not None or f.dropout else None,
        all_heads=runtime_int(f.all_heads) if f.dropout else None,
        hides=1 if any(x is not None for x in (bias, table, f.score_mod)) else None,
        linear=1 if all(x is None for x in (f.softcap, slopes, table, bias, f.score_mod)) else None,
    )


def second_query(options: Options) -> Tensor | None:
    """The query of further keys, if it is not q itself."""
    return options.relative_query if options.query2 is None else options.query2


def _aligned_keys(keys: Tensor) -> Tensor:
    """`aligned` for [H, 2 R + 1, D]."""
    batch = keys[None]
    rows = aligned(batch)
    return keys if rows is batch else rows[0]


def _slopes_strides(slopes: Tensor) -> tuple[int | None, ...]:
    """Batch and head strides of [H_q] or [B, H_q]."""
    return (*broadcast_strides(slopes[None] if slopes.dim() == 1 else slopes),)
