"""Some rows of a `PagedKVCache` as the caches of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..cache.paged import PagedKVCache
from ..cache_view import CacheView
from ..models.transfer import to_device


class PagedRows:
    """One layer of some rows of a paged cache, for one step of a model; see `layers_of`.

    Attributes:
        k, v: [B, H_k, length_bound, D], gathered from the pages on first use.
        lengths: int32 [B].
        length_bound: what no row's length exceeds.
        uniform_length: None: the rows count as being of different lengths.
    """

    uniform_length: int | None = None
    rotates = True

    def __init__(
        self, cache: PagedKVCache, rows: Sequence[int], layer: int, lengths: Tensor, bound: int
    ) -> None:
        self.lengths = lengths
        self.length_bound = self.max_length = bound
        self._cache, self._rows, self._layer = cache, rows, layer
        self._gathered: tuple[Tensor, Tensor] | None = None

    def append(
        self, k: Tensor, v: Tensor, new_lengths: Tensor | None = None, **rotation: Any
    ) -> Tensor | None:
        """Write each row's new tokens, layer by layer from the first; as `KVCache.append`."""
        counts = None if new_lengths is None else new_lengths.tolist()
        turned = self._cache.append(self._rows, k, v, counts, layer=self._layer, **rotation)
        # Out of place: the layers share the lengths before the step.
        self.lengths = self.lengths + (k.shape[2] if new_lengths is None else new_lengths)
        self.length_bound = self.view().length_bound
        self._gathered = None
        return turned

    def view(self) -> CacheView:
        """The pages of the cache as kernels read them."""
        return self._cache.view(self._rows, self._layer)

    @property
    def k(self) -> Tensor:
        return self._gather()[0]

    @property
    def v(self) -> Tensor:
        return self._gather()[1]

    def _gather(self) -> tuple[Tensor, Tensor]:
        if self._gathered is None:
            k, v, _ = self.view().gather()
            n = self.length_bound
            self._gathered = k[:, :, :n], v[:, :, :n]
        return self._gathered


def layers_of(cache: PagedKVCache, rows: Sequence[int]) -> list[PagedRows]:
    """Caches to give `GPT.forward` for one step of these rows, in this order."""
    rows = list(rows)
    index = to_device(rows, cache.lengths.device)
    lengths = cache.lengths.index_select(0, index)
    bound = max(cache.length(row) for row in rows)
    return [PagedRows(cache, rows, layer, lengths, bound) for layer in range(cache.num_layers)]
