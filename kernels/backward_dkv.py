"""dK and dV: one program per tile of keys, over the queries of the heads that read them.

    dv = p^T do          ds = p * (do v^T - delta)          dk = scale * ds^T q

A program loops over the G query heads of a K/V head, so dK and dV are summed in registers and never
expanded. If that leaves the device idle (few K/V heads, small batches), the heads are split among
several programs, whose sums are added in a fixed order.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .backward_atomic import launch_add_parts, parts_of
from .launch import tiles
from .launch.arguments import (
    bias_stream,
    block_dim,
    blocks,
    key_programs,
    result_in_layout,
    row_constants,
    rules,
    strides,
    tile_for,
)
from .launch.block_sparsity import launch_mask
from .launch.launches import Launch, cached_plan
from .rules.blocks import key_head, key_tile, over_query_blocks, store_keys, store_part
from .rules.mask import any_key
from .rules.operands import head_at
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import further_keys, relative_products, relative_query, vectors_of_tile
from .rules.score import dropped, gradient, kept, load_bias, modified
from .rules.score_gradient import load_lse
from .rules.softmax import weights
from .rules.tile import add_tile, load_block, load_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..options import Options

# Programs per multiprocessor: with fewer than the first number, heads are split up to the second.
# Causal tiles differ in length, so one wave of programs leaves half of the device idle.
_FEW = 2
_ENOUGH = 4


_Strides = namedtuple("_Strides", "q k v do dk dv")


class _Operands(NamedTuple):
    """Operands of a loop over the query blocks of one head: k and v of a tile of keys.

    key2: of a second product, or None. dk_ptr, dv_ptr: None = gradient not computed. dq_ptr: fp32
    rows to add ds k to, or None.
    """

    k: Any
    v: Any
    key2: Any
    q: Any
    do: Any
    lse_ptr: Any
    delta_ptr: Any
    dk_ptr: Any
    dv_ptr: Any
    dq_ptr: Any
    bias: Any


@triton.jit
def _dq_of_keys(ds, k, PRECISION: tl.constexpr, HALVES: tl.constexpr):
    """ds^T k, fp32 [M, D], for ds [N, M] and k [N, D].

    If there are fewer queries than keys, queries are the product's columns, as wgmma and tcgen05
    need 64 rows. Not in fp32, which has neither and would spill.
    """
    N: tl.constexpr = ds.shape[0]
    M: tl.constexpr = ds.shape[1]
    D: tl.constexpr = k.shape[1]
    if HALVES and M < N:
        across = tl.zeros([D, M], tl.float32)
        dq = tl.trans(add_weighted_rows(across, tl.trans(k), ds.to(k.dtype), PRECISION))
    else:
        down = tl.zeros([M, D], tl.float32)
        dq = add_weighted_rows(down, tl.trans(ds), k, PRECISION)
    return dq


@triton.jit
def _grow_dkv(state, m_first, in_rows, keep, h, tile, operands, score, const: tl.constexpr):
    """dk += ds^T q and dv += p^T do for one query block: see `blocks.over_query_blocks`.

    Transposed: keys down, queries across.
    """
    PRECISION: tl.constexpr = const.PRECISION
    dk, dv, dkey2 = state
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    n_first = tile.first
    row = tile.row
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = tile.k_pos[:, None]
    q = load_block(operands.q, m_first, in_rows, BLOCK_M, BLOCK_D, const.D)
    do = load_block(operands.do, m_first, in_rows, BLOCK_M, const.BLOCK_DV, const.D_V)
    # Nonexistent rows have q = do = delta = 0, so any finite weight contributes 0 without a select.
    NOWHERE: tl.constexpr = 0.0 if score.linear is not None else float("inf")
    lse = load_lse(operands.lse_ptr + rows, in_rows, score, NOWHERE)
    delta = load_vector(operands.delta_ptr + rows, in_rows, 0.0)
    s = rows_by_rows(operands.k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    query = relative_query(q, tile.batch, h, tile.first_q, m_first, in_rows, score, const)
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(m_first, n_first, h, tile.H_q, row, score, const)
        s += tl.trans(relative_products(query, vectors, const.BLOCK_N, PRECISION))
    if score.key2_ptr is not None:
        s += rows_by_rows(operands.key2, query, PRECISION)
    dp = rows_by_rows(operands.v, do, PRECISION)
    bias = None
    if operands.bias is not None:
        bias = tl.trans(load_bias(operands.bias, row.b, h, m_first, n_first, score, const))
    x, factor, before, capped = modified(s, rows[None, :], k_pos, h, row, score, bias)
    p = weights(x, lse[None, :], factor, keep)
    seen = p  # by do, and dp by p
    if score.dropout is not None:
        survivors = tl.trans(kept(m_first, n_first, h, tile.H_q, row, score, const, False))
        seen = dropped(p, survivors, score)
        dp = dropped(dp, survivors, score)
    if operands.dv_ptr is not None:
        dv = add_weighted_rows(dv, seen, do, PRECISION)
    if operands.dk_ptr is not None:
        dx = p * (dp - delta[None, :])
        _, ds = gradient(dx, before, capped, rows[None, :], k_pos, h, row, keep, score)
        if operands.dq_ptr is not None:
            # Before dk, as otherwise LLVM schedules parts of ds between its product's instructions.
            dq = _dq_of_keys(ds, operands.k, PRECISION, const.HALVES)
            add_tile(operands.dq_ptr, const.D, m_first, dq, in_rows, BLOCK_M, BLOCK_D, const.D)
        dk = add_weighted_rows(dk, ds, q, PRECISION)
        if score.key2_ptr is not None:
            dkey2 = add_weighted_rows(dkey2, ds, query, PRECISION)
    return dk, dv, dkey2


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k", "parts"])
def attention_backward_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr,
    dkey2_ptr, dq_ptr, bias_desc, strides, mask, score, H_q, G, T_q, T_k, parts,
    const: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all G heads. 1-D grid: see `key_program`.

    dk_ptr, dv_ptr: None = gradient not computed. parts: programs that share a tile, each with its
    own heads; several write to dk_parts_ptr and dv_parts_ptr: see `blocks.store_part`. dkey2_ptr:
    likewise fp32 parts of the gradient of key2, always one per K/V head; only written with dk_ptr.
    dq_ptr: fp32 [B, H_q, T_q, D], to which dQ without the scale is added by atomics; or None.
    """
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = key_tile(H_q, H_q // G, T_q, T_k, mask, BLOCK_N, parts)
    part = tl.program_id(0) % parts
    k = key_head(k_ptr, strides.k, tile, const)
    v = key_head(v_ptr, strides.v, tile, const)
    k = load_block(k, tile.first, tile.valid, BLOCK_N, BLOCK_D, const.D)
    v = load_block(v, tile.first, tile.valid, BLOCK_N, BLOCK_DV, const.D_V)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    BLOCK_D2: tl.constexpr = const.BLOCK_D2
    dkey2 = tl.zeros([BLOCK_N, BLOCK_D2], tl.float32)
    key2 = None
    if score.key2_ptr is not None:
        key2 = further_keys(tile, 0, tile.first, tile.valid, tile.h_k * G, score, const)
    # Invisible keys affect only their own rows of dk and dv, but every row of dq.
    there = None
    if dq_ptr is not None:
        there = tile.valid[:, None]
    heads = tl.cdiv(G, parts)
    first = part * heads
    last = tl.where(any_key(tile.valid), tl.minimum(first + heads, G), 0)
    for g in range(first, last):
        h = tile.h_k * G + g
        q = head_at(q_ptr, tile.batch, h, tile.first_q, strides.q, const)
        do = head_at(do_ptr, tile.batch, h, tile.first_q, strides.do, const)
        stats = (tile.batch * H_q + h).to(tl.int64) * T_q + tile.first_q
        dq_head = None
        if dq_ptr is not None:
            dq_head = dq_ptr + stats * const.D
        operands = _Operands(
            k,
            v,
            key2,
            q,
            do,
            lse_ptr + stats,
            delta_ptr + stats,
            dk_ptr,
            dv_ptr,
            dq_head,
            bias_desc,
        )
        dk, dv, dkey2 = over_query_blocks(
            _grow_dkv, (dk, dv, dkey2), h, tile, operands, there, mask, score, const
        )
    dk *= score.scale
    if score.key2_ptr is not None and dk_ptr is not None:
        D2: tl.constexpr = const.D2
        dkey2 *= score.scale
        store_part(dkey2_ptr, part, parts, T_k, tile, dkey2, const.BLOCK_D2, D2, const)
    # One kernel for any number of parts, so that no length compiles another.
    if parts > 1:
        if dk_ptr is not None:
            store_part(dk_parts_ptr, part, parts, T_k, tile, dk, BLOCK_D, const.D, const)
        if dv_ptr is not None:
            store_part(dv_parts_ptr, part, parts, T_k, tile, dv, BLOCK_DV, const.D_V, const)
    else:
        store_keys(dk_ptr, strides.dk, tile, dk, BLOCK_D, const.D, const)
        store_keys(dv_ptr, strides.dv, tile, dv, BLOCK_DV, const.D_V, const)


def head_parts(G: int, programs: int, multiprocessors: int) -> int:
    """Number of programs that share the G heads of each of `programs` tiles of keys.

    1 if tiles alone fill the device twice, else enough to fill it about four times.
    """
    if G == 1 or programs >= _FEW * multiprocessors:
        return 1
    heads = max(1, round(G * programs / (_ENOUGH * multiprocessors)))
    return blocks(G, heads)


class _Launches(NamedTuple):
    """Launches of a call: for dK and dV together, or separately. parts: see `head_parts`."""

    both: Launch | None
    dv: Launch | None
    dk: Launch | None
    parts: int

    @property
    def reusable(self) -> bool:
        return all(launch is None or launch.reusable for launch in self[:3])

    def bind(self, arguments: Sequence[object]) -> None:
        for launch in self[:3]:
            if launch is not None:
                launch.bind(arguments)


@cached_plan(4)
def _plan(
    options: Options, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor | None,
    dv: Tensor | None, kernel: str,
) -> _Launches:  # fmt: skip
    dims = block_dim(q.shape[3]), block_dim(v.shape[3])
    tile = tile_for(kernel, options, q, *dims, streams_bias=True)
    programs = key_programs(options, k, tile.BLOCK_N)
    parts = head_parts(q.shape[1] // k.shape[1], programs, tiles.multiprocessors(q.device))

    def launch(dk: Tensor | None, dv: Tensor | None) -> Launch:
        mask, tables = launch_mask(options, q, k, tile, of_keys=False) if programs else (None, None)
        return Launch(
            attention_backward_dkv_kernel,
            programs * parts,
            tile,
            _Strides(*map(strides, (q, k, v, do, dk, dv))),
            *rules(options, mask, q, k),
            parts,
            row_constants(options, tile, q, v, k, do, dk, dv, options.relative_query),
            streams=(bias_stream(options, q, tile),),
            tables=tables,
        )

    if not tile.apart and dk is not None and dv is not None:
        return _Launches(launch(dk, dv), None, None, parts)
    for_dv = None if dv is None else launch(None, dv)
    return _Launches(None, for_dv, None if dk is None else launch(dk, None), parts)


def launch_dkv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, wanted: str,
    options: Options, dq: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dk, dv and the gradient of key2, if any, in the shapes, dtypes (or fp32, by options) and
    memory orders of k, v and key2.

    wanted: contains "k" for dk and key2's, "v" for dv; others are None. dq: fp32 [B, H_q, T_q, D]
    to add dQ to, without the scale.

    If heads are split (`head_parts`), each part has a temporary fp32 copy of dk and dv, in total
    fewer than 8 tiles of keys per multiprocessor, whatever the lengths. The gradient of key2 has
    one copy per K/V head, and the copies are summed in order.
    """
    dk = result_in_layout(options, k, *k.shape[1:]) if "k" in wanted else None
    dv = result_in_layout(options, v, *v.shape[1:]) if "v" in wanted else None
    both, for_dv, for_dk, parts = _plan(
        options, q, k, v, do, dk, dv, "backward_dkv" if dq is None else "backward_one_pass"
    )
    # With one part, placeholders of the same type.
    k_parts = delta if parts == 1 or dk is None else parts_of(k, parts)
    v_parts = delta if parts == 1 or dv is None else parts_of(v, parts)
    key2 = options.key2 if dk is not None else None
    key2_parts = None
    if key2 is not None:
        key2_parts = parts_of(key2, parts * k.shape[1] // key2.shape[1])
    if both is not None:
        both(options, q, k, v, do, lse, delta, dk, dv, k_parts, v_parts, key2_parts, dq)
    if for_dv is not None:
        for_dv(options, q, k, v, do, lse, delta, None, dv, k_parts, v_parts, None, None)
    if for_dk is not None:
        for_dk(options, q, k, v, do, lse, delta, dk, None, k_parts, v_parts, key2_parts, dq)
    for x, sums in ((dk, k_parts), (dv, v_parts)):
        if parts > 1 and x is not None:
            launch_add_parts(sums, x, options)
    if key2_parts is None or key2 is None:
        return dk, dv, None
    dkey2 = result_in_layout(options, key2, *key2.shape[1:])
    launch_add_parts(key2_parts, dkey2, options)
    return dk, dv, dkey2
