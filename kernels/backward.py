"""Backward: one program per tile of queries for dQ, one per tile of keys for dK and dV.

With p the softmax weights, do the gradient of o and dlse of lse (Dao et al. 2022, appendix B.4):

    dv = p^T do          dp = do v^T          delta = rowsum(o * do) - dlse
    ds = p * (dp - delta)          dq = scale * ds k          dk = scale * ds^T q

p is recomputed from lse; dropout applies to p in dv and to dp. dQ has its kernel here, dK and dV in
`backward_dkv`: two deterministic passes over the scores. If permitted, one pass computes all three,
with dQ summed by atomics, see `backward_atomic`.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_atomic import launch_delta, launch_finish_dq, launch_start_dq
from .backward_dkv import launch_dkv
from .launch.arguments import (
    aligned,
    bias_stream,
    block_dim,
    query_programs,
    result_in_layout,
    row_constants,
    rules,
    second_query,
    strides,
    tile_for,
)
from .launch.block_sparsity import launch_mask
from .launch.launches import Launch, Stream, cached_plan
from .rules.blocks import key_head, load_queries, over_key_blocks, query_tile, store_queries
from .rules.product import add_weighted_rows
from .rules.relative import further_keys, relative_query, unskewed
from .rules.score import load_bias
from .rules.score_gradient import QueryRows, load_lse, store_delta, tile_gradient
from .rules.tile import load_rows

if TYPE_CHECKING:
    from ..options import Options

_Strides = namedtuple("_Strides", "q k v o do dq dquery")


@triton.jit
def _grow_dq(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """dq += ds k for one key block: see `blocks.over_key_blocks`.

    Further keys (relative ones or a second product's) contribute to dq or to their own query's
    gradient.
    """
    PRECISION: tl.constexpr = const.PRECISION
    dq, dquery = state
    rows, k, k_desc, v, v_desc, bias_desc = operands
    BLOCK_N: tl.constexpr = const.BLOCK_N
    k = load_rows(k, k_desc, tile, n_first, valid, BLOCK_N, const.BLOCK_D, const.D)
    v = load_rows(v, v_desc, tile, n_first, valid, BLOCK_N, const.BLOCK_DV, const.D_V)
    further = further_keys(tile, tile.first, n_first, valid, tile.h, score, const)
    bias = None
    if bias_desc is not None:
        bias = load_bias(bias_desc, tile.row.b, tile.h, tile.first, n_first, score, const)
    _, ds = tile_gradient(rows, k, v, further, bias, n_first, keep, tile, score, const)
    dq = add_weighted_rows(dq, ds, k, PRECISION)
    if score.keys_ptr is not None:
        by_distance = unskewed(ds.to(rows.query.dtype))
        if score.query_ptr is None:
            dq = add_weighted_rows(dq, by_distance, further, PRECISION)
        else:
            dquery = add_weighted_rows(dquery, by_distance, further, PRECISION)
    if score.key2_ptr is not None:
        dquery = add_weighted_rows(dquery, ds, further, PRECISION)
    return dq, dquery


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, delta_ptr, dquery_ptr,
    k_desc, v_desc, bias_desc, strides, mask, score, H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the rows' delta, which dK/dV reads. Grid as forward.

    dquery: the gradient of the relative query or of query2, if there is one.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_D2: tl.constexpr = const.BLOCK_D2
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    k = key_head(k_ptr, strides.k, tile, const)
    v = key_head(v_ptr, strides.v, tile, const)
    q = load_queries(q_ptr, strides.q, tile, BLOCK_D, const.D, const)
    query = relative_query(
        q, tile.batch, tile.h, tile.first_q, tile.first, tile.in_rows, score, const
    )
    do = load_queries(do_ptr, strides.do, tile, const.BLOCK_DV, const.D_V, const)
    o = load_queries(o_ptr, strides.o, tile, const.BLOCK_DV, const.D_V, const)
    stats = tile.statistics + tile.rows
    delta = store_delta(o, do, dlse_ptr, delta_ptr, stats, tile.in_rows)
    lse = load_lse(lse_ptr + stats, tile.in_rows, score)

    state = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_D2], tl.float32))
    operands = (QueryRows(q, query, do, lse, delta), k, k_desc, v, v_desc, bias_desc)
    dq, dquery = over_key_blocks(_grow_dq, state, tile, operands, mask, score, const)
    store_queries(dq_ptr, strides.dq, tile, dq * score.scale, BLOCK_D, const.D, const)
    if score.query_ptr is not None:
        dquery = dquery * score.scale
        store_queries(dquery_ptr, strides.dquery, tile, dquery, const.BLOCK_D2, const.D2, const)


@cached_plan(6)
def _plan_dq(
    options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dlse: Tensor | None,
    dq: Tensor, dquery: Tensor | None,
) -> Launch:  # fmt: skip
    BLOCK_D, BLOCK_DV = block_dim(q.shape[3]), block_dim(v.shape[3])
    tile = tile_for("backward_dq", options, q, BLOCK_D, BLOCK_DV, streams_bias=True)
    programs = query_programs(options, q, tile.BLOCK_M)
    mask, tables = launch_mask(options, q, k, tile, of_keys=True) if programs else (None, None)
    return Launch(
        attention_backward_dq_kernel,
        programs,
        tile,
        _Strides(*map(strides, (q, k, v, o, do, dq, dquery))),
        *rules(options, mask, q, k),
        row_constants(options, tile, q, v, k, o, do, dq, options.relative_query, dquery),
        streams=(
            Stream(1, k, tile.BLOCK_N, BLOCK_D),
            Stream(2, v, tile.BLOCK_N, BLOCK_DV),
            bias_stream(options, q, tile),
        ),
        tables=tables,
    )


def launch_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    wanted: str, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes (or fp32, by options) and memory orders of q, k, v; delta
    fp32 like lse; and likewise the gradients of relative_query or query2 and of key2, empty without
    one.

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    o and lse as `launch_forward` returned them for the same q, k, v and options. wanted: "q", "k",
    "v" and "d" (delta), or some of them; other results are empty or undefined. The gradients of a
    second query and of key2 come with q's and k's.
    """
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)

    def distinct(x: Tensor | None) -> Tensor:  # as an operator's results have to be
        return q.new_empty(0) if x is None else x

    dq: Tensor | None = None
    dquery: Tensor | None = None
    of_keys: tuple[Tensor | None, ...] = None, None, None
    delta = torch.empty_like(lse)
    if "q" in wanted:
        dq = result_in_layout(options, q, *q.shape[1:])
        query = second_query(options)
        dquery = None if query is None else result_in_layout(options, query, *query.shape[1:])
        launch = _plan_dq(options, q, k, v, o, do, dlse, dq, dquery)
        launch(options, q, k, v, o, do, lse, dlse, dq, delta, dquery)
    elif "k" in wanted or "d" in wanted:
        launch_delta(do, dlse, o, lse, delta, options)
    if "k" in wanted or "v" in wanted:
        of_keys = launch_dkv(q, k, v, do, lse, delta, wanted, options)
    dk, dv, dkey2 = map(distinct, of_keys)
    return distinct(dq), dk, dv, delta, distinct(dquery), dkey2


def launch_backward_one_pass(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`launch_backward` of all, with dQ summed by atomics; the last results are empty.

    For options without relative keys and key2. Takes 4 more bytes per element of q.
    """
    assert options.relative_keys is None and options.key2 is None, "left to launch_backward"
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    dq = result_in_layout(options, q, *q.shape[1:])
    delta = torch.empty_like(lse)
    total = launch_start_dq(do, dlse, q, o, lse, delta, options)
    dk, dv, _ = launch_dkv(q, k, v, do, lse, delta, "kv", options, total)
    assert dk is not None and dv is not None
    launch_finish_dq(total, dq, options)
    return dq, dk, dv, delta, q.new_empty(0), q.new_empty(0)
