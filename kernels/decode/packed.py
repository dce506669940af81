"""Packed queries against a cache: rows of any number of new tokens, by the kernel of decoding.

A launch for rows of few tokens and one for longer ones: see `decode_splits.split_packed`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..combine import PART_FACTS, combine_launch
from ..launch.arguments import blocks
from ..launch.arrivals import arrival_counters
from ..launch.decode_splits import merges_alone, split_packed
from ..launch.launches import Launch
from ..rules.pages import CacheTensors
from .launch import as_bytes, kernel_launch

if TYPE_CHECKING:
    from ...options import Options


class _Step(NamedTuple):
    """A launch for rows of some numbers of tokens, and what merges their parts, if any.

    alone: one launch in place of both, if any. parts: the shape of the results of parts.
    """

    launch: Launch
    combine: Launch | None
    alone: Launch | None
    parts: tuple[int, ...]


class PreparedPacked(NamedTuple):
    """The launches of a call of packed queries, for others with its signature."""

    steps: tuple[_Step, ...]

    def __call__(
        self,
        q: Tensor,
        cu_seqlens: Tensor,
        cache: CacheTensors,
        starts: Tensor | None,
        out: Tensor,
        lse: Tensor,
        options: Options,
    ) -> None:
        """Run `launch_packed` with the cached launches."""
        cache = as_bytes(cache)
        q, out = _as_batch_row(q), _as_batch_row(out)
        if not self.steps:
            out.zero_()
            lse.fill_(-torch.inf)
        for launch, combine, alone, shape in self.steps:
            parts, counters = None, None
            if combine is not None:
                parts = q.new_empty(shape, dtype=torch.float32)
            if alone is not None:
                counters = arrival_counters(q.device, alone.programs)
            if counters is not None and alone is not None:
                launch = alone
            launch((q, out, lse, parts, counters, starts, cu_seqlens, *cache, *options))
            if combine is not None and counters is None:
                combine((), parts, out, lse)


def launch_packed(
    q: Tensor, cu_seqlens: Tensor, cache: CacheTensors, starts: Tensor | None, out: Tensor,
    lse: Tensor, options: Options, *, longest: int,
) -> None:  # fmt: skip
    """Write o [total, H_q, D_v], any strides but the last, and lse fp32 [H_q, total], contiguous.

    Args as for `launch_decode`, and cu_seqlens, int [B + 1], longest: the most tokens of a row.
    """
    # q [total, H_q, D], last dim contiguous. Token i of batch row b is cu_seqlens[b] + i, of
    # n = cu_seqlens[b + 1] - cu_seqlens[b], and has position lengths[row] - n + i in its row of the
    # cache. Tokens outside all rows have o 0 and lse -inf. Longer rows are not written.
    launch = prepare_packed(q, cu_seqlens, cache, starts, out, lse, options, longest=longest)
    launch(q, cu_seqlens, cache, starts, out, lse, options)


def prepare_packed(
    q: Tensor, cu_seqlens: Tensor, cache: CacheTensors, starts: Tensor | None, out: Tensor,
    lse: Tensor, options: Options, *, longest: int,
) -> PreparedPacked:  # fmt: skip
    """`launch_packed` for calls with the signature of this one, ready to launch.

    With users' functions it serves this call alone. It depends on `device_key` too, and takes the
    current device for theirs.
    """
    B, total = cu_seqlens.shape[0] - 1, q.shape[0]
    if B * total == 0:
        return PreparedPacked(())
    cache = as_bytes(cache)
    q, out = _as_batch_row(q), _as_batch_row(out)
    H_k, D_v = cache.k.shape[1], cache.v.shape[3]
    G = q.shape[1] // H_k
    rest = (starts, cu_seqlens, *cache, *options)
    steps = []
    for packed in split_packed(q, B, longest, cache, options):
        parts, combine, alone = None, None, None
        shape = (packed.places, H_k, packed.tile.BLOCK_M, 4 * blocks(D_v, 4) + PART_FACTS.value)
        launch_of = partial(
            kernel_launch, options=options, tile=packed.tile, split=packed.split, packed=packed
        )
        if packed.places:
            parts = q.new_empty(shape, dtype=torch.float32)
            combine = combine_launch(parts, out, D_v, packed=True)
            if merges_alone(B, packed.most * G, cache, packed.tile, packed.split):
                counters = q.new_empty(4, dtype=torch.int32)
                alone = launch_of((q, out, lse, parts, counters, *rest))
        launch = launch_of((q, out, lse, parts, None, *rest))
        steps.append(_Step(launch, combine, alone, shape))
    return PreparedPacked(tuple(steps))


def _as_batch_row(x: Tensor) -> Tensor:
    """[total, H, D] as [1, H, total, D]."""
    return x.transpose(0, 1)[None]
