"""Gradients of the tensors that a score_mod reads: sums over its loads, by their offsets.

One program per tile of queries recomputes the gradients of its scores, as in dQ. A generated
function gives each load's offsets and gradients. These are first summed over the rows or keys of a
tile that read one element, then added atomically:

    in fp32, in an order that varies from run to run, or
    exactly, as integers in a unit of each element: the bits depend on no order. The unit follows
    from the largest addend, which a launch before finds, and from the number of pairs, so that no
    sum overflows.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import (
    aligned,
    block_dim,
    kernel_score,
    query_programs,
    row_constants,
    sizes,
    strides,
    tile_for,
)
from .launch.block_sparsity import launch_mask
from .launch.launches import Launch
from .rules.blocks import key_head, load_queries, over_key_blocks, query_tile
from .rules.relative import further_keys, relative_query
from .rules.score import indices
from .rules.score_gradient import QueryRows, load_lse, score_gradient, store_delta
from .rules.tile import load_block

if TYPE_CHECKING:
    from ..options import Options

_Strides = namedtuple("_Strides", "q k v o do")

# Bits of a sum, and the exponent of the largest power of two of fp32.
_BITS, _MOST = 62, 126


@triton.jit
def _reduced(x, offsets):
    """x [BLOCK_M, BLOCK_N], summed over the dims along which offsets have size 1."""
    if len(offsets.shape) == 0:
        x = tl.sum(tl.sum(x, 1), 0)
    elif offsets.shape[1] == 1:
        x = tl.sum(x, 1)[:, None]
    elif offsets.shape[0] == 1:
        x = tl.sum(x, 0)[None, :]
    return x


@triton.jit
def _accumulate(sum_ptr, scale_ptr, offsets, x):
    """Add x to fp32 sums, to int64 sums in units of 1 / scale, or to the bits of the largest |x|.

    Bits of fp32 numbers are ordered, NaN last, as int32. Hidden pairs have x = 0, and may have
    invalid offsets.
    """
    x = _reduced(x.to(tl.float32), offsets)
    pointers = sum_ptr + offsets
    adds = x != 0
    if sum_ptr.dtype.element_ty == tl.float32:
        tl.atomic_add(pointers, x, mask=adds, sem="relaxed")
    elif sum_ptr.dtype.element_ty == tl.int64:
        x = tl.floor(x * tl.load(scale_ptr + offsets, mask=adds, other=0.0) + 0.5)
        tl.atomic_add(pointers, x.to(tl.int64), mask=adds, sem="relaxed")
    else:
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        # Most are smaller than what is there, be it read too early.
        adds = adds & (bits > tl.load(pointers, mask=adds, other=0))
        tl.atomic_max(pointers, bits, mask=adds, sem="relaxed")


@triton.jit
def _add_block(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Add the gradients of a key block's loads: see `blocks.over_key_blocks`."""
    rows, keys, values, sums, scales = operands
    k = load_block(keys, n_first, valid, const.BLOCK_N, const.BLOCK_D, const.D)
    v = load_block(values, n_first, valid, const.BLOCK_N, const.BLOCK_DV, const.D_V)
    further = further_keys(tile, tile.first, n_first, valid, tile.h, score, const)
    dx, before, _ = score_gradient(rows, k, v, further, None, n_first, keep, tile, score, const)
    k_pos = (n_first + tl.arange(0, const.BLOCK_N))[None, :]
    where = indices(tile.rows[:, None], k_pos, tile.h, tile.row, score)
    loads = score.mod_grad(dx, before, *where, *score.tensors)
    for n in tl.static_range(len(sums)):
        dload = loads[2 * n + 1]
        if keep is not None:  # of a hidden bias, which may be NaN, after the products with it
            dload = tl.where(keep, dload, 0.0)
        _accumulate(sums[n], scales[n], loads[2 * n], dload)
    return state


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_mods_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, strides, mask, score, sums, scales,
    H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """Add to the sums of each load of a tile of queries. Grid as forward.

    score: with the function of `jit_functions.derivative.load_gradients` as mod_grad. sums, scales:
    a pointer for each load, see `_accumulate`.
    """
    tile = query_tile(H_q, G, T_q, T_k, mask, const.BLOCK_M)
    q = load_queries(q_ptr, strides.q, tile, const.BLOCK_D, const.D, const)
    query = relative_query(
        q, tile.batch, tile.h, tile.first_q, tile.first, tile.in_rows, score, const
    )
    do = load_queries(do_ptr, strides.do, tile, const.BLOCK_DV, const.D_V, const)
    o = load_queries(o_ptr, strides.o, tile, const.BLOCK_DV, const.D_V, const)
    stats = tile.statistics + tile.rows
    delta = store_delta(o, do, dlse_ptr, None, stats, tile.in_rows)
    lse = load_lse(lse_ptr + stats, tile.in_rows, score)
    keys = key_head(k_ptr, strides.k, tile, const)
    values = key_head(v_ptr, strides.v, tile, const)
    operands = (QueryRows(q, query, do, lse, delta), keys, values, sums, scales)
    over_key_blocks(_add_block, tile.first, tile, operands, mask, score, const)


def launch_backward_mods(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    loads: list[int], options: Options,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the mod_tensors in `loads`, fp32 in their shapes; the others' are empty.

    do, dlse, q, k, v, o, lse: as for `launch_backward`. loads: the tensor of each load of
    options.score_mod_grad, see the kernel. options.atomic_dq: the sums may depend on their order.
    """
    tensors = options.mod_tensors
    shapes = [x.shape if n in loads else (0,) for n, x in enumerate(tensors)]

    def zeros(dtype: torch.dtype) -> list[Tensor]:
        return [q.new_zeros(shape, dtype=dtype) for shape in shapes]

    def add(sums: list[Tensor], scales: list[Tensor] | None = None) -> None:
        ours, units = ([x[n] for n in loads] for x in (sums, scales or sums))
        _launch(do, dlse, q, k, v, o, lse, ours, units, options)

    if options.atomic_dq:
        add(sums := zeros(torch.float32))
        return sums
    add(largest := zeros(torch.int32))
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * len(loads)
    # Addends are below 2 ^ ((bits >> 23) - 126), their sums below 2 ^ _BITS in units of 1 / scale.
    bits = _BITS - pairs.bit_length() + 126
    exponents = [(bits - (x >> 23)).clamp(max=_MOST) for x in largest]
    scales = [(x + 127 << 23).view(torch.float32) for x in exponents]
    add(sums := zeros(torch.int64), scales)
    finite = [x < 0xFF << 23 for x in largest]
    return [
        torch.where(fits, torch.ldexp(x.double(), -n).float(), torch.nan)
        for fits, x, n in zip(finite, sums, exponents, strict=True)
    ]


def _launch(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    sums: list[Tensor], scales: list[Tensor], options: Options,
) -> None:  # fmt: skip
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    tile = tile_for("backward_dq", options, q, block_dim(q.shape[3]), block_dim(v.shape[3]))
    programs = query_programs(options, q, tile.BLOCK_M)
    if not programs or not sums:
        return
    mask, tables = launch_mask(options, q, k, tile, of_keys=True)
    Launch(
        attention_backward_mods_kernel,
        programs,
        tile,
        _Strides(*map(strides, (q, k, v, o, do))),
        mask,
        kernel_score(options, q.dtype),
        tuple(sums),
        tuple(scales),
        *sizes(q, k),
        row_constants(options, tile, q, v, k, o, do, options.relative_query),
        tables=tables,
    )(options, q, k, v, o, do, lse, dlse)
