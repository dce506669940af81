"""Forward: o = softmax(score(q k^T), mask) v and lse, one program per tile of queries."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode import launch_decode, prepare_decode
from .launch.arguments import (
    aligned,
    bias_stream,
    block_dim,
    empty_in_layout,
    query_programs,
    result_in_layout,
    row_constants,
    rules,
    strides,
    tile_for,
)
from .launch.block_sparsity import launch_mask
from .launch.launches import Launch, Stream, cached_plan
from .rules.blocks import (
    key_head,
    load_queries,
    over_key_blocks,
    query_tile,
    store_queries,
    store_statistic,
)
from .rules.pages import CacheTensors
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import further_keys, further_products, relative_query
from .rules.score import dropped, first_state, kept, load_bias, modified, with_sink
from .rules.softmax import LN2, finish, in_parts, online_step
from .rules.tile import load_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..options import Options

    Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
    Plan = Callable[[Options, Tensor, Tensor, Tensor, Tensor], Launch]


_Strides = namedtuple("_Strides", "q k v o")


class _Operands(NamedTuple):
    """Operands of a loop over key blocks: q, the query of further keys, and K/V and their
    descriptors for `tile.load_rows`.
    """

    q: Any
    query: Any
    k: Any
    k_desc: Any
    v: Any
    v_desc: Any
    bias: Any


@triton.jit
def _attend(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Loop body for one key block: see `blocks.over_key_blocks`."""
    PRECISION: tl.constexpr = const.PRECISION
    acc, m, l = state
    BLOCK_N: tl.constexpr = const.BLOCK_N
    h = tile.h
    of = operands
    k = load_rows(of.k, of.k_desc, tile, n_first, valid, BLOCK_N, const.BLOCK_D, const.D)
    s = rows_by_rows(of.q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    if score.keys_ptr is not None or score.key2_ptr is not None:
        further = further_keys(tile, tile.first, n_first, valid, h, score, const)
        s += further_products(of.query, further, score, const)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    bias = None
    if of.bias is not None:
        bias = load_bias(of.bias, tile.row.b, h, tile.first, n_first, score, const)
    s, factor, _, _ = modified(s, tile.rows[:, None], k_pos[None, :], h, tile.row, score, bias)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None or score.hides is not None
    p, rescale, m, l = online_step(s, m, l, factor, MASKED)
    if score.dropout is not None:
        p = dropped(p, kept(tile.first, n_first, h, tile.H_q, tile.row, score, const), score)
    v = load_rows(of.v, of.v_desc, tile, n_first, valid, BLOCK_N, const.BLOCK_DV, const.D_V)
    acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, m, l


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, max_ptr, k_desc, v_desc, bias_desc, strides, mask, score,
    H_q, G, T_q, T_k, const: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """o and lse of a tile of queries, and the largest scores if max_ptr is given.

    PARTS: of the rows' sums, see `softmax.in_parts`.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    k = key_head(k_ptr, strides.k, tile, const)
    v = key_head(v_ptr, strides.v, tile, const)
    q = load_queries(q_ptr, strides.q, tile, const.BLOCK_D, const.D, const)
    query = relative_query(
        q, tile.batch, tile.h, tile.first_q, tile.first, tile.in_rows, score, const
    )

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if max_ptr is None:
        m, l = first_state(tile.h, m, l, score)
    if PARTS > 1:
        l = in_parts(l, PARTS)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    operands = _Operands(q, query, k, k_desc, v, v_desc, bias_desc)
    acc, m, l = over_key_blocks(_attend, (acc, m, l), tile, operands, mask, score, const)

    if max_ptr is not None:
        # The sink comes last, so that it is not the largest score.
        store_statistic(max_ptr, tile, m * LN2, float("-inf"))
        acc, m, l = with_sink(acc, m, l, tile.h, score)
    o, lse = finish(acc, m, l)
    store_queries(o_ptr, strides.o, tile, o, BLOCK_DV, const.D_V, const)
    store_statistic(lse_ptr, tile, lse, float("-inf"))


@cached_plan(3)
def _plan(
    options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor, with_max: bool = False
) -> Launch:
    BLOCK_D, BLOCK_DV = block_dim(q.shape[3]), block_dim(v.shape[3])
    tile = tile_for("forward", options, q, BLOCK_D, BLOCK_DV, streams_bias=True)
    programs = query_programs(options, q, tile.BLOCK_M)
    mask, tables = launch_mask(options, q, k, tile, of_keys=True) if programs else (None, None)
    return Launch(
        attention_forward_kernel,
        programs,
        tile,
        _Strides(*map(strides, (q, k, v, o))),
        *rules(options, mask, q, k),
        row_constants(options, tile, q, v, k, o, options.relative_query),
        tile.sum_parts,
        streams=(
            *(() if with_max else (Stream(0, None, 0, 0),)),  # in the place of max_ptr
            Stream(1, k, tile.BLOCK_N, BLOCK_D),
            Stream(2, v, tile.BLOCK_N, BLOCK_DV),
            bias_stream(options, q, tile),
        ),
        tables=tables,
    )


def launch_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's dtype (or fp32, by options) and memory order; lse fp32 [B, H_q,
    T_q], natural log; from q [B, H_q, T_q, D], k [B, H_k, T_k, D] and v [B, H_k, T_k, D_v].
    """
    # Last dims are contiguous and whole multiples of 16 bytes. Packed sequences have B = 1.
    q, k, v, o, lse = _operands(q, k, v, options)
    _plan(options, q, k, v, o)(options, q, k, v, o, lse)
    return o, lse


def launch_forward_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_forward`, with the rows' largest scores, fp32 [B, H_q, T_q], without the sink."""
    q, k, v, o, lse = _operands(q, k, v, options)
    largest = torch.empty_like(lse)
    _plan(options, q, k, v, o, True)(options, q, k, v, o, lse, largest)
    return o, lse, largest


def _operands(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Aligned q, k and v, and memory for o and lse."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    B, H_q, T_q, _ = q.shape
    o = result_in_layout(options, q, H_q, T_q, v.shape[3])
    return q, k, v, o, q.new_empty(B, H_q, T_q, dtype=torch.float32)


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, otherwise: Forward,
    plan: Plan = _plan, readable: Callable[[Tensor], Tensor] = aligned,
) -> Forward | None:  # fmt: skip
    """Cached `launch_forward` for calls with this signature.

    Packed sequences have no batch dim: q [total_q, H_q, D], and so on. None if each call has to
    copy tensors, and with users' functions. It also depends on `device_key`, and uses the current
    device.

    otherwise: serves calls with rows that are not 16-byte aligned. plan, readable: of other
    kernels, the launch and what copies tensors that they cannot read.
    """
    packed = q.dim() == 3
    if packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if any(readable(x) is not x for x in (q, k, v)):
        return None
    like = empty_in_layout(q, q.shape[1], q.shape[2], v.shape[3])
    launch = plan(options, q, k, v, like)
    if not launch.reusable:
        return None
    rows = like.shape[:3]
    if packed:
        like, rows = like[0].transpose(0, 1), rows[1:]
    shape, steps, dtype, device = like.shape, like.stride(), q.dtype, q.device

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return otherwise(q, k, v, options)
        o = torch.empty_strided(shape, steps, dtype=dtype, device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        launch(options, q, k, v, o, lse)
        return o, lse

    return forward


def launch_few_queries(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`launch_forward` where `decode_splits.why_not_split` knows no reason."""
    return launch_decode(q, _as_cache(aligned(k), aligned(v)), None, None, options)


def prepare_few_queries(
    q: Tensor, k: Tensor, v: Tensor, options: Options, otherwise: Forward
) -> Forward | None:
    """`prepare_forward` where `decode_splits.why_not_split` knows no reason."""
    if any(aligned(x) is not x for x in (q, k, v)):
        return None
    decode = prepare_decode(q, _as_cache(k, v), None, None, options)

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return otherwise(q, k, v, options)
        return decode(q, _as_cache(k, v), None, None, options)

    return forward


def _as_cache(k: Tensor, v: Tensor) -> CacheTensors:
    """Keys and values [B, H_k, T_k, width] as a full cache with one page per row."""
    return CacheTensors(k, v, None, None, None, None, None, None, None)
