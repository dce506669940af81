"""`CacheView`: views of caches for the kernels that read or write them."""

from typing import NamedTuple

import torch
from torch import Tensor

from .quantization import Quantize, check_quantize, dequantize_rows, storage_dtype


class CacheView(NamedTuple):
    """A batch of rows of any cache as tensors that share its memory; made by a cache's `view`.

    Buffers consist of pages of S slots; a contiguous cache has one page per row. Slot s of page p
    of K/V head h is k[p, h, s]. Row r = batch_index[b] (or b, if None) holds its token at position
    t, for t < lengths[r], in

        contiguous   page r, slot t
        paged        page block_table[r, t // S], slot t % S
        ring         page r, slot t where t < keep_first, else
                     keep_first + (t - keep_first) % (S - keep_first)

    Each slot of a ring holds its latest position: see `slot_positions`. Slots without a token are
    undefined (they may be NaN), as are entries of block_table past a row's pages.

    Writes through an invalid page number are dropped; reads use the nearest valid one.

    Attributes:
        k: [P, H_k, S, D], in the dtype of storage; the last stride is 1. Caches pad their rows to
            whole 16 bytes.
        v: [P, H_k, S, D_v], likewise.
        k_scale, v_scale: fp32 [P, H_k, S] if k and v hold codes (int8 or e4m3); the key is k *
            k_scale. [P, H_k, S, groups]: one scale for each of that many equal parts of a row.
            Strides of 0: slots share a given scale, see `given_scales`. None: k and v are not
            quantized.
        block_table: int32 [rows, N], contiguous, or None.
        page_size: S.
        lengths: int32 [rows], indexed by row, not by b: the number of tokens each row has seen, the
            latest append included.
        starts: int32 [rows] or None: positions before starts[r] are padding on the left.
        batch_index: int32 [B] or None: the row of each batch element.
        length_bound: upper bound of these rows' lengths, on the host.
        keep_first: number of pinned first positions of a ring; None: not a ring.
        window: number of keys that a query sees in a ring besides the first keep_first, its own
            included.
        dtype: of keys and values as attention gets them.
        counters: int32 [rows], all 0, for kernels that count their programs; each resets them.
        rope: [P, H_k, S, R] in dtype: further key columns, after those of k, which then are the
            value. None: k has all columns.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    page_size: int
    lengths: Tensor
    starts: Tensor | None
    batch_index: Tensor | None
    length_bound: int
    keep_first: int | None
    window: int | None
    dtype: torch.dtype
    counters: Tensor
    rope: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """D, the columns of a key."""
        return self.k.shape[-1] + (0 if self.rope is None else self.rope.shape[-1])

    @property
    def batch_size(self) -> int:
        """B."""
        return (self.lengths if self.batch_index is None else self.batch_index).shape[0]

    @property
    def given_scales(self) -> bool:
        """Whether slots share given scales: quantization uses them and stores none."""
        if self.k_scale is None:
            return False
        steps = zip(self.k_scale.shape, self.k_scale.stride(), strict=True)
        return any(size > 1 and step == 0 for size, step in steps)

    def of_batch(self, x: Tensor) -> Tensor:
        """Select [B, ...] from a tensor with all rows: lengths, starts, the block table."""
        return x if self.batch_index is None else x.index_select(0, self.batch_index)

    def has_place(self, positions: Tensor) -> Tensor:
        """bool [B, T]: whether rows have a slot for the tokens at positions [B, T].

        Negative positions and positions past the end of a row have none.
        """
        valid = positions >= 0
        if self.block_table is not None:
            column = positions // self.page_size
            page = self._listed(column)
            return valid & (column < self.block_table.shape[1]) & (page == self._in_pool(page))
        return valid if self.window is not None else valid & (positions < self.page_size)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot, int64 [B, T], of positions [B, T]; always within the pool.

        A token without a slot (see `has_place`) gets another token's slot.
        """
        positions = positions.long()
        if self.block_table is not None:
            page = self._in_pool(self._listed(positions // self.page_size))
            return page, positions % self.page_size
        rows = self.batch_index
        if rows is None:
            rows = torch.arange(self.batch_size, device=positions.device)
        page = rows.long().unsqueeze(1).expand_as(positions)
        first = self.keep_first
        if first is None:
            return page, positions
        turned = first + (positions - first) % (self.page_size - first)
        return page, torch.where(positions < first, positions, turned)

    def slot_positions(self) -> Tensor:
        """int32 [B, N]: the position of the token in each slot of `gather`, -1 = none.

        N is the number of slots that may hold a token: S of a ring, else length_bound, rounded up
        to whole pages.
        """
        lengths = self.of_batch(self.lengths).unsqueeze(1)
        slot = torch.arange(self._readable_slots(), device=lengths.device, dtype=torch.int32)
        position = slot.expand(self.batch_size, -1)
        valid = slot < lengths
        if self.keep_first is not None:
            newest = lengths - 1
            turned = newest - (newest - slot) % (self.page_size - self.keep_first)
            pinned = slot < self.keep_first
            position = torch.where(pinned, position, turned)
            valid = torch.where(pinned, valid, turned >= self.keep_first)
        if self.starts is not None:
            valid = valid & (slot >= self.of_batch(self.starts).unsqueeze(1))
        return torch.where(valid, position, -1)

    def gather(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [B, H_k, N, D], values [B, H_k, N, D_v] and positions int32 [B, N], copied out.

        Codes are dequantized to `dtype`. Slots of position -1 hold no token: mask them; their keys
        and values are 0.
        """
        position = self.slot_positions()
        empty = (position < 0)[:, None, :, None]
        k, v = (x.masked_fill(empty, 0) for x in self.gather_slots())
        return k, v, position

    def gather_slots(self) -> tuple[Tensor, Tensor]:
        """`gather` without zeros: slots without a token are undefined (they may be NaN)."""
        k = self._gather_rows(self.k, self.k_scale)
        if self.rope is not None:
            return torch.cat((k, self._gather_rows(self.rope, None)), -1), k
        return k, self._gather_rows(self.v, self.v_scale)

    def written(self, k: Tensor, v: Tensor) -> tuple["CacheView", Tensor, Tensor | None]:
        """The buffers that appending k [B, H_k, T, D] and v writes, and what goes to each.

        The parts of a row that have scales count as heads. Shared memory is written once.
        """
        if self.rope is not None and self.k_scale is not None:
            parts = (self.k_scale.shape[3], -1)
            width, scale = self.k.shape[3], self.k_scale[:, 0].transpose(1, 2)
            codes = torch.unflatten(self.k[:, 0], 2, parts).transpose(1, 2)
            latent = torch.unflatten(k[:, 0, :, :width], 2, parts).transpose(1, 2)
            view = self._replace(k=codes, k_scale=scale, v=self.rope, v_scale=None, rope=None)
            return view, latent, k[..., width:]
        once = self.k_scale is not None and self.k_scale is self.v_scale
        return self, k, None if once else v

    def _listed(self, column: Tensor) -> Tensor:
        """int64: block table entries of columns [B, T], clamped to its last column."""
        assert self.block_table is not None
        table = self.of_batch(self.block_table)
        return table.gather(1, column.clamp(0, table.shape[1] - 1)).long()

    def _in_pool(self, page: Tensor) -> Tensor:
        """Entries of a block table, clamped to valid page numbers."""
        return page.long().clamp(0, self.k.shape[0] - 1)

    def _readable_slots(self) -> int:
        if self.block_table is not None:
            pages = -(-self.length_bound // self.page_size)
            return min(pages, self.block_table.shape[1]) * self.page_size
        if self.keep_first is not None:
            return self.page_size
        return min(self.length_bound, self.page_size)

    def _gather_rows(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        rows = self._gather_slots(as_bytes(stored))
        if scale is None:
            return rows
        per_row = self._gather_slots(scale if scale.dim() == 4 else scale.unsqueeze(-1))
        return dequantize_rows(rows.view(stored.dtype), per_row, self.dtype)

    def _gather_slots(self, stored: Tensor) -> Tensor:
        """[B, H_k, N, width] from pages [P, H_k, S, width]: rows of pages, not their elements."""
        slots = self._readable_slots()
        if self.block_table is None:
            return self.of_batch(stored[: self.lengths.shape[0], :, :slots]).contiguous()
        pages = self._in_pool(self.of_batch(self.block_table)[:, : slots // self.page_size])
        P, H_k, S, width = stored.shape
        if stored.is_contiguous():
            heads = torch.arange(H_k, device=pages.device)[:, None]
            rows = (pages[:, None] * H_k + heads).flatten()
            gathered = stored.view(P * H_k, S * width).index_select(0, rows)
            return gathered.view(len(pages), H_k, slots, width)
        gathered = stored.transpose(1, 2).index_select(0, pages.flatten())
        return gathered.view(len(pages), slots, H_k, width).transpose(1, 2)


def allocate_rows(
    *shape: int, width: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Uninitialised [*shape, width] with 16-byte aligned rows: dense, or a view of wider rows."""
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or its name, got {device!r}") from None
    elements = 16 // dtype.itemsize
    padded = -(-width // elements) * elements
    return torch.empty(*shape, padded, device=device, dtype=dtype)[..., :width]


class Stored(NamedTuple):
    """The buffers of a cache, as of `CacheView` but with its own dimensions in front."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    rope: Tensor | None = None


def allocate_kv(
    shape: tuple[int, ...], head_dim: int, value_dim: int, dtype: torch.dtype,
    quantize: Quantize | None, device: torch.device | str | None,
) -> Stored:  # fmt: skip
    """k and v from `allocate_rows`: numbers, or codes with scales."""
    check_quantize(quantize)
    stored = dtype if quantize is None else storage_dtype(quantize)
    k, v = (
        allocate_rows(*shape, width=width, dtype=stored, device=device)
        for width in (head_dim, value_dim)
    )
    if quantize is None:
        return Stored(k, v)
    scale = k.new_empty(*shape, dtype=torch.float32)
    return Stored(k, v, scale, torch.empty_like(scale))


def as_bytes(x: Tensor) -> Tensor:
    """View fp8 as bytes, which torch can index on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
