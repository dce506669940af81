"""Launches of the Hopper forward, in 16 and in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..forward import prepare_forward
from ..launch.arguments import empty_in_layout, kernel_score, result_in_layout
from ..launch.launches import Described, Launch, cached, cached_plan, signature
from .forward_kernel import hopper_forward_kernel
from .host import (
    aligned_bias,
    describe,
    describe_bias,
    end_early,
    mask_of,
    query_grid,
    strides_to_send,
    to_send,
    walkable,
    without_mods,
)
from .pipeline import ROWS
from .tile_table import HopperConfig, forward_config, fp8_config

if TYPE_CHECKING:
    from ...options import Options
    from ..forward import Forward as ForwardLauncher


@cached_plan(3)
def _plan(options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Launch:
    """Plan for 16-bit q, k and v."""
    return _plan_with(configure(options, q, v), options, None, q, k, v, o)


@cached_plan(3)
def _plan_with_max(options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Launch:
    """Plan for calls with max_ptr: no row lags behind its largest score."""
    config = configure(options, q, v)._replace(SLACK=0)
    return _plan_with(config, options, None, q, k, v, o, maximum=())


def configure(options: Options, q: Tensor, v: Tensor) -> HopperConfig:
    """Configuration of a 16-bit call."""
    placed = options.q_positions is not None
    dropped = options.dropout > 0 or options.score_mod is not None
    return forward_config(q.shape[3], end_early(options), placed, v.shape[3], dropped)


def _plan_with(
    config: HopperConfig,
    options: Options,
    scales: tuple[Tensor, Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    *,
    maximum: tuple[Described, ...] = ((0, None),),
) -> Launch:
    """maximum: value of max_ptr for calls without one."""
    grid, sizes = query_grid(q, k, config, options)
    mask, order, tables = mask_of(options, q, k, config, sizes, of_keys=True)
    mask, score, mods = without_mods(mask, kernel_score(options, q.dtype))
    if not grid[0]:
        return Launch(hopper_forward_kernel, 0, {})
    values = describe(v, config.D, config.BLOCK)
    if scales is None:
        values = describe(v, config.BLOCK, config.value_tile)
    return Launch(
        hopper_forward_kernel,
        grid[0],
        {"num_warps": 4},
        strides_to_send(o, options),
        mask,
        order,
        score,
        scales,
        *sizes,
        config,
        mods,
        tables=tables,
        described=(
            *maximum,
            (0, describe(q, ROWS.value, config.D)),
            (1, describe(k, config.BLOCK, config.D)),
            (2, values),
            (3, to_send(o, options, config.value_tile)),
            describe_bias(options, q, ROWS.value, config.BLOCK),
        ),
        hidden=3,
    )


def launch_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], k [B, H_k, T_k, D] and v [B, H_k, T_k, D_v], for which `why_not_hopper` is
    None.
    """
    q, k, v, options, o, lse = _operands(q, k, v, options)
    _plan(options, q, k, v, o)(options, q, k, v, o, lse)
    return o, lse


def launch_hopper_forward_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_hopper_forward`, with the rows' largest scores as lse, without the sink."""
    q, k, v, options, o, lse = _operands(q, k, v, options)
    largest = torch.empty_like(lse)
    _plan_with_max(options, q, k, v, o)(options, q, k, v, o, lse, largest)
    return o, lse, largest


def _operands(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Options, Tensor, Tensor]:
    """q, k, v and options that TMA can walk, and memory for o and lse."""
    q, k, v, options = walkable(q), walkable(k), walkable(v), aligned_bias(options)
    o = result_in_layout(options, q, q.shape[1], q.shape[2], v.shape[3])
    return q, k, v, options, o, q.new_empty(q.shape[:3], dtype=torch.float32)


def prepare_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, otherwise: ForwardLauncher
) -> ForwardLauncher | None:
    """Cached `launch_hopper_forward`; see `kernels.forward.prepare_forward`."""
    if options.attn_bias is not None:
        return None  # it may have to be copied
    return prepare_forward(q, k, v, options, otherwise, _plan, walkable)


def launch_hopper_forward_fp8(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """`launch_hopper_forward` for e4m3 inputs, o in `dtype`: bfloat16 or float16.

    values: v from `kernels.fp8.values.launch_pack_values`. scales: of q [B, H_q], k and v [B, H_k],
    fp32 and contiguous; for packed sequences [N, H_q] and [N, H_k].
    """
    q, k, values = walkable(q), walkable(k), walkable(values)
    _, H_q, T_q, D = q.shape
    o = empty_in_layout(q, H_q, T_q, D, dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    config = fp8_config(D, end_early(options))
    arguments = (*options, *scales)

    def plan(arguments: list[Any]) -> Launch:
        fields, views = arguments[:-3], arguments[-3:]
        return _plan_with(config, type(options)._make(fields), tuple(views), q, k, values, o)

    layouts = [(x.shape, x.stride()) for x in (q, k, values)]
    key = None if options.launched_anew else (_plan_with, signature(arguments), dtype, *layouts)
    cached(key, arguments, plan, q.dtype)(arguments, q, k, values, o, lse)
    return o, lse
