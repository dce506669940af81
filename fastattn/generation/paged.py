"""Rows of a `PagedKVCache`, any number of new tokens each, as the caches of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.paged import PagedKVCache
from ..cache.slots import append_paged
from ..cache_view import CacheView
from ..functional.paged import attention_paged
from ..models.transfer import to_device


class PackedStep(NamedTuple):
    """The new tokens of one step, those of the first row in order, then those of the next.

    slots: int64 [total]. positions: int32 or int64 [total]. of_row: int64 [total], numbers of rows.
    offsets: int32 or int64 [B + 1]. longest: what no row's new tokens exceed. bound: nor its length
    then. tree: bool [total, longest], which new tokens of its row each sees; None: those up to it.
    """

    slots: Tensor
    positions: Tensor
    of_row: Tensor
    offsets: Tensor
    longest: int
    bound: int
    tree: Tensor | None = None


class PackedRows:
    """One layer of some rows, for one step of a model; see `layers_of`.

    To the model every new token is a row of its own, with one token: it reads [total, 1] of them.

    Attributes:
        k, v: [total, H_k, length_bound, D], gathered from the pages on first use, for layers that
            `attention_paged` does not serve.
        lengths: [total]: where each token stands, then one more.
        length_bound: what no length exceeds.
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
        self, k: Tensor, v: Tensor, new_lengths: Tensor | None = None, **rotation: Any
    ) -> Tensor | None:
        """Write the new tokens to their slots; as `KVCache.append`, with T = 1."""
        assert new_lengths is None, "a packed step has no padding"
        if rotation.get("q") is not None:
            rotation |= {"q": rotation["q"][:, :, 0], "positions": self._step.positions}
        turned = append_paged(self.view(), k[:, :, 0], v[:, :, 0], self._step.slots, **rotation)
        # Out of place: the layers share the lengths before the step.
        self.lengths = self.lengths + 1
        self._gathered = None
        return None if turned is None else turned[:, :, None]

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of the new tokens [total, H_q, 1, D], each to its row up to itself."""
        step = self._step
        if step.tree is not None:
            options["tree_mask"] = step.tree
        found = attention_paged(
            q[:, :, 0], self.view(), step.offsets, max_seqlen_q=step.longest, **options
        )
        return found[:, :, None]

    def view(self) -> CacheView:
        """The pages of the rows as kernels read them."""
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
) -> list[PackedRows]:
    """Caches to give `GPT.forward` for the next tokens [total, 1] of these rows, `counts` of each.

    Room is made and the tokens are counted here; the model then writes them.

    Args:
        places: where each token stands in its text; default: behind the one before it.
        tree: as in `PackedStep`.
    """
    rows, counts = list(rows), list(counts)
    device = cache.lengths.device
    before = [cache.length(row) for row in rows]
    slots = cache.extend(rows, counts)
    if places is None:
        places = [t for n, count in zip(before, counts, strict=True) for t in range(n, n + count)]
    of_row = [i for i, count in enumerate(counts) for _ in range(count)]
    step = PackedStep(
        slots,
        to_device(places, device, torch.int32),
        to_device(of_row, device),
        to_device(list(accumulate(counts, initial=0)), device, torch.int32),
        max(counts),
        max(cache.length(row) for row in rows),
        tree,
    )
    return [PackedRows(cache.view(rows, layer), step) for layer in range(cache.num_layers)]
