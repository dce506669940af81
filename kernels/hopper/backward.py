"""Backward for Hopper: two kernels, for dQ and delta and for dK and dV, or one for all three.

    dv = p^T do          dp = do v^T          delta = rowsum(o * do) - dlse
    ds = p * (dp - delta)          dq = scale * ds k          dk = scale * ds^T q

Two kernels compute the scores twice, seven products instead of five; but they are deterministic,
and dQ needs no fp32 buffer and no pass before or after. If the caller permits it
(`Options.atomic_dq`) the kernel of dK and dV also sums dQ. With 256 columns dK and dV do not fit
the registers of a warpgroup together, so they take a launch each, eight products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..backward_atomic import (
    launch_add_parts,
    launch_delta,
    launch_finish_dq,
    launch_start_dq,
    parts_of,
)
from ..launch.arguments import aligned, kernel_score, result_in_layout, strides, tiles_of
from ..launch.launches import Launch, cached_plan
from .backward_dkv import hopper_backward_dkv_kernel
from .backward_dq import hopper_backward_dq_kernel
from .host import (
    aligned_bias,
    describe,
    describe_bias,
    end_early,
    key_grid,
    mask_of,
    query_grid,
    strides_to_send,
    to_send,
    walkable,
    without_mods,
)
from .pipeline import ROWS
from .tile_table import APART_HEAD_DIM, backward_config, tile_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...options import Options


def launch_hopper_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    wanted: str, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes and memory orders of q, k, v; delta fp32 [B, H_q, T_q]; twice an
    empty tensor, where `launch_backward` has further gradients.

    wanted: as for `launch_backward`; up to 128 columns dk and dv come together. delta is filled if
    the gradient of sinks or a bias needs it, otherwise undefined.

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    o and lse from either forward with the same q, k, v and options. `why_not_hopper` is None, and
    with options.atomic_dq also `why_not_one_pass`.
    """
    q, k, v, do = walkable(q), walkable(k), walkable(v), walkable(do)
    o, options = aligned(o), aligned_bias(options)
    B, H_q, T_q, _ = q.shape
    delta = torch.empty_like(lse)
    launches = _launches(q, wanted)
    made = wanted + "".join(launches)
    dq, dk, dv = (
        result_in_layout(options, x, *x.shape[1:]) if of in made else q.new_empty(0)
        for of, x in zip("qkv", (q, k, v), strict=True)
    )
    none = q.new_empty(0), q.new_empty(0)
    if B * H_q * T_q == 0:
        return dq, dk.zero_(), dv.zero_(), delta, *none
    rows = 2 * ROWS.value
    stats = lse.new_empty(2, B * H_q, tiles_of(options.cu_seqlens_q, 1, T_q, rows) * rows)
    minus_lse, minus_delta = stats.unbind()
    learned = (options.sinks, options.attn_bias, options.relative_bias)
    wanted_delta = delta if any(x is not None for x in learned) else None
    total = None
    if "q" not in wanted:
        launch_delta(do, dlse, o, lse, wanted_delta, options, stats)
    elif options.atomic_dq and launches:
        total = launch_start_dq(do, dlse, q, o, lse, wanted_delta, options, stats)
    else:
        launch = _plan_dq(options, q, k, v, do, o, dlse, dq, stats)
        launch(options, q, k, v, do, dq, o, lse, dlse, wanted_delta, minus_lse, minus_delta)
    for of in launches:
        out = dk if "k" in of else None, dv if "v" in of else None
        launch, parts = _plan_dkv(options, q, k, v, do, *out, total, stats)
        sums = [None if x is None else minus_lse if parts == 1 else parts_of(x, parts) for x in out]
        launch(options, q, k, v, do, total, *out, *sums, minus_lse, minus_delta)
        for x, of_parts in zip(out, sums, strict=True):
            if parts > 1 and x is not None and of_parts is not None:
                launch_add_parts(of_parts, x, options)
    if total is not None:
        launch_finish_dq(total, dq, options)
    dk, dv = (x if of in wanted else q.new_empty(0) for of, x in (("k", dk), ("v", dv)))
    return dq, dk, dv, delta, *none


def _launches(q: Tensor, wanted: str) -> list[str]:
    """The gradients of each launch for dK and dV, by letters."""
    if tile_columns(q.shape[3]) == APART_HEAD_DIM:
        return [of for of in "vk" if of in wanted]
    return ["kv"] if "k" in wanted or "v" in wanted else []


class _OfKeys(NamedTuple):
    """Launch for dK and dV, and the number of parts of each tile of keys."""

    launch: Launch
    parts: int

    @property
    def reusable(self) -> bool:
        return self.launch.reusable

    def bind(self, arguments: Sequence[object]) -> None:
        self.launch.bind(arguments)


def _scored(options: Options, D: int) -> bool:
    """Whether scores need extra registers, for a derivative, addresses or random numbers."""
    if options.softcap is not None or options.dropout or options.score_mod is not None:
        return True
    return options.relative_bias is not None and tile_columns(D) == APART_HEAD_DIM


@cached_plan(6)
def _plan_dq(
    options: Options, q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, dlse: Tensor | None,
    dq: Tensor, stats: Tensor,
) -> Launch:  # fmt: skip
    """Launch that fills dq, stats [2, B * H_q, whole tiles], and delta if given."""
    scored, placed = _scored(options, q.shape[3]), options.q_positions is not None
    called = options.score_mod is not None
    config = backward_config(
        "dq", q.shape[3], end_early(options), scored, placed, v.shape[3], called
    )
    grid, sizes = query_grid(q, k, config, options)
    mask, order, tables = mask_of(options, q, k, config, sizes, of_keys=True)
    mask, score, mods = without_mods(mask, kernel_score(options, q.dtype))
    return Launch(
        hopper_backward_dq_kernel,
        grid[0],
        {"num_warps": 4},
        strides_to_send(dq, options),
        strides(o),
        stats.stride(1),
        mask,
        order,
        score,
        *sizes,
        config,
        mods,
        tables=tables,
        described=(
            (0, describe(q, ROWS.value, config.D)),
            (1, describe(k, config.BLOCK, config.D)),
            (2, describe(v, config.BLOCK, config.value_tile)),
            (3, describe(do, ROWS.value, config.value_tile)),
            (4, to_send(dq, options, config.D)),
            describe_bias(options, q, ROWS.value, config.BLOCK),
        ),
        hidden=4,
    )


@cached_plan(4)
def _plan_dkv(
    options: Options, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor | None,
    dv: Tensor | None, total: Tensor | None, stats: Tensor,
) -> _OfKeys:  # fmt: skip
    """Launch that fills dk and dv, or the given one of them.

    Adds dQ to total, fp32 [B, H_q, whole tiles, D], if given.
    """
    D, D_v = k.shape[3], v.shape[3]
    scored, placed = _scored(options, D), options.q_positions is not None
    if total is None:
        kernel = "dv" if dk is None else "dk" if dv is None else "dkv"
        packed = options.cu_seqlens_q is not None
        called = options.score_mod is not None
        config = backward_config(kernel, D, packed, scored, placed, D_v, called)
        piece, sums = None, None
    else:
        config = backward_config("one_pass", D, end_early(options), scored, placed, D_v)
        piece = D // 2
        sums = describe(total, config.BLOCK, piece) if config.DQ_BY_TMA else None
    grid, sizes = key_grid(q, k, config, options)
    mask, order, tables = mask_of(options, q, k, config, sizes, of_keys=False)
    mask, score, mods = without_mods(mask, kernel_score(options, q.dtype))
    launch = Launch(
        hopper_backward_dkv_kernel,
        grid[0],
        {"num_warps": 4},
        None if dk is None else strides_to_send(dk, options),
        None if dv is None else strides_to_send(dv, options),
        stats.stride(1),
        mask,
        order,
        score,
        *sizes,
        config,
        mods,
        tables=tables,
        described=(
            (0, describe(q, config.BLOCK, config.D)),
            (1, describe(k, ROWS.value, config.D, piece)),
            (2, None if dk is None else describe(v, ROWS.value, config.value_tile)),
            (3, describe(do, config.BLOCK, config.value_tile)),
            (5, None if dk is None else to_send(dk, options, config.D, piece)),
            (6, None if dv is None else to_send(dv, options, config.value_tile)),
            (4, sums),
            describe_bias(options, q, config.BLOCK, ROWS.value),
        ),
        hidden=4,
    )
    return _OfKeys(launch, sizes[-1] or 1)
