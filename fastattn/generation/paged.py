"""Packed rows of a `PagedKVCache` as the caches of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.paged import PagedKVCache
from ..cache.slots import append_paged
from ..cache_view import CacheView
from ..functional.merge import SharedPages, by_position, shared_pages
from ..functional.paged import attention_paged
from ..models.transfer import to_device


class PackedStep(NamedTuple):
    """The new tokens of a step, row by row.

    slots: int64 [total]. positions: int32 or int64 [total]. of_row: int64 [total], numbers of rows.
    offsets: int32 or int64 [B + 1]. longest: what no row's new tokens exceed. bound: nor its length
    then. tree: bool [total, longest], which new tokens of its row each sees; None: those up to it.
    shared: first pages that rows share.
    """

    slots: Tensor
    positions: Tensor
    of_row: Tensor
    offsets: Tensor
    longest: int
    bound: int
    tree: Tensor | None = None
    shared: SharedPages | None = None


class PackedRows:
    """A layer's cache of some rows, for one step; see `layers_of`.

    For the model every new token is a row with one token: it reads [total, 1].

    Attributes:
        k, v: [total, H_k, length_bound, D], gathered from the pages on first use, for layers that
            `attention_paged` does not serve.
        lengths: [total]: the position of each token, then one more.
        length_bound: upper bound of lengths.
        uniform_length: None: the rows count as being of different lengths.
    """

    uniform_length: int | None = None
    rotates = True

    def __init__(self, view: CacheView, step: PackedStep) -> None:
        self.lengths = step.positions
        self.length_bound = self.max_length = step.bound
        self._view, self._step = view, step
        self._gathered: tuple[Tensor, Tensor] | None = None

    def append(
        self, k: Tensor, v: Tensor | None = None, new_lengths: Tensor | None = None, **rotation: Any
    ) -> Tensor | None:
        """Write the new tokens to their slots; `KVCache.append` with T = 1.

        v: None for latents, whose first columns are the values.
        """
        assert new_lengths is None, "a packed step has no padding"
        v = k[..., : self._view.v.shape[-1]] if v is None else v
        if rotation.get("q") is not None:
            rotation |= {"q": rotation["q"][:, :, 0], "positions": self._step.positions}
        turned = append_paged(self.view(), k[:, :, 0], v[:, :, 0], self._step.slots, **rotation)
        # Out of place, as the layers share the lengths before the step.
        self.lengths = self.lengths + 1
        self._gathered = None
        return None if turned is None else turned[:, :, None]

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of the new tokens [total, H_q, 1, D], each to its row up to itself."""
        step = self._step
        how: dict[str, Any] = {"tree_mask": step.tree}
        if not by_position(options):
            how["shared"] = step.shared
        o = attention_paged(
            q[:, :, 0], self.view(), step.offsets, max_seqlen_q=step.longest, **how, **options
        )
        return o[:, :, None]

    def view(self) -> CacheView:
        """View of the rows' pages for kernels."""
        return self._view

    @property
    def k(self) -> Tensor:
        return self._gather()[0]

    @property
    def v(self) -> Tensor:
        return self._gather()[1]

    def _gather(self) -> tuple[Tensor, Tensor]:
        if self._gathered is None:
            k, v, _ = self.view().gather()
            n, index = self.length_bound, self._step.of_row
            self._gathered = k[index, :, :n], v[index, :, :n]
        return self._gathered


def layers_of(
    cache: PagedKVCache,
    rows: Sequence[int],
    counts: Sequence[int],
    places: Sequence[int] | None = None,
    tree: Tensor | None = None,
    shared: tuple[Sequence[int], Sequence[int]] | None = None,
) -> list[PackedRows]:
    """Caches of `GPT.forward` for the next tokens [total, 1] of these rows, `counts` of each.

    Reserves and counts the tokens, which the model then writes.

    Args:
        places: position of each token in its text; default: consecutive.
        tree: as in `PackedStep`.
        shared: groups of neighbouring rows, the first ones, and the tokens that each shares; see
            `prefixes.sharing`.
    """
    rows, counts = list(rows), list(counts)
    device = cache.lengths.device
    before = [cache.length(row) for row in rows]
    slots = cache.extend(rows, counts)
    if places is None:
        places = [t for n, count in zip(before, counts, strict=True) for t in range(n, n + count)]
    of_row = [i for i, count in enumerate(counts) for _ in range(count)]
    offsets = to_device(list(accumulate(counts, initial=0)), device, torch.int32)
    views = [cache.view(rows, layer) for layer in range(cache.num_layers)]
    step = PackedStep(
        slots,
        to_device(places, device, torch.int32),
        to_device(of_row, device),
        offsets,
        max(counts),
        views[0].length_bound,
        tree,
        None
        if shared is None
        else shared_pages(views[0], offsets, *(to_device(x, device) for x in shared)),
    )
    return [PackedRows(view, step) for view in views]
