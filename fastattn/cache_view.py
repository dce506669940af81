"""Views of a cache for the kernels that read it or write into it: `CacheView`, rows in memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from .quantization import dequantize_rows


class CacheView(NamedTuple):
    """A batch of rows of any cache, in tensors; made by a cache's `view`. It shares their memory.

    Buffers are made of pages of S slots; a contiguous cache has one page a row. Slot s of page p
    of K/V head h is k[p, h, s]. Row r = batch_index[b] (or b, if None) holds its token at position
    t, for t < lengths[r], in

        contiguous   page r, slot t
        paged        page block_table[r, t // S], slot t % S
        ring         page r, slot t where t < keep_first, else
                     keep_first + (t - keep_first) % (S - keep_first)

    Of a ring only the latest position of each slot is left: see `slot_positions`. Slots that hold
    no token are undefined (they may be NaN), and so are entries of block_table past a row's pages.

    Nothing is stored by an entry that is no page's number, and it is read as the nearest one.

    Attributes:
        k: [P, H_k, S, D], in the dtype of storage, any strides but the last, which is 1. A cache's
            own rows are padded up to whole 16 bytes.
        v: [P, H_k, S, D_v], likewise.
        k_scale, v_scale: fp32 [P, H_k, S] where k and v hold codes (int8 or e4m3); the key is
            k * k_scale. Strides of 0 say that slots share a given scale, see `given_scales`. None:
            k and v are stored as they are.
        block_table: int32 [rows, N], contiguous, or None.
        page_size: S.
        lengths: int32 [rows], indexed by row, not by b: tokens each row has seen. The latest append
            is counted.
        starts: int32 [rows] or None: positions before starts[r] are padding on the left.
        batch_index: int32 [B] or None: the row of each batch element.
        length_bound: a number on the host that no length of these rows exceeds.
        keep_first: a ring's pinned first positions; None: not a ring.
        window: the keys a query may see in a ring besides the first keep_first, its own included.
        dtype: of keys and values as attention gets them.
        counters: int32 [rows], all 0, for kernels that count their programs; each leaves them so.
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

    @property
    def batch_size(self) -> int:
        """B."""
        return (self.lengths if self.batch_index is None else self.batch_index).shape[0]

    @property
    def given_scales(self) -> bool:
        """Whether slots share scales, which are given: codes are made by them, none is stored."""
        if self.k_scale is None:
            return False
        steps = zip(self.k_scale.shape, self.k_scale.stride(), strict=True)
        return any(size > 1 and step == 0 for size, step in steps)

    def of_batch(self, x: Tensor) -> Tensor:
        """[B, ...] of what is kept for every row: lengths, starts, the block table."""
        return x if self.batch_index is None else x.index_select(0, self.batch_index)

    def has_place(self, positions: Tensor) -> Tensor:
        """bool [B, T]: whether rows have a slot for the tokens at positions [B, T], in some page.

        Negative positions and those past the end of a row have none.
        """
        valid = positions >= 0
        if self.block_table is not None:
            column = positions // self.page_size
            page = self._listed(column)
            return valid & (column < self.block_table.shape[1]) & (page == self._in_pool(page))
        return valid if self.keep_first is not None else valid & (positions < self.page_size)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot, int64 [B, T], of positions [B, T]; in the pool, whatever the table says.

        A token that has no place (`has_place`) has that of another here.
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
        """int32 [B, N]: the position of the token in every slot that `gather` returns, -1 = none.

        N is the number of slots that may hold a token: of a ring all S, else length_bound, rounded
        up to whole pages where there are pages.
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

        Codes come back as numbers, both in `dtype`. Where the position is -1 there is no token:
        mask such a slot; its key and value are 0.
        """
        position = self.slot_positions()
        empty = (position < 0)[:, None, :, None]
        k, v = (x.masked_fill(empty, 0) for x in self.gather_slots())
        return k, v, position

    def gather_slots(self) -> tuple[Tensor, Tensor]:
        """`gather` of what slots hold, undefined (it may be NaN) where there is no token."""
        return self._gather_rows(self.k, self.k_scale), self._gather_rows(self.v, self.v_scale)

    def _listed(self, column: Tensor) -> Tensor:
        """int64: what the block table says in columns [B, T], in its last one for those past it."""
        assert self.block_table is not None
        table = self.of_batch(self.block_table)
        return table.gather(1, column.clamp(0, table.shape[1] - 1)).long()

    def _in_pool(self, page: Tensor) -> Tensor:
        """Entries of a block table, those that are no page's number as the nearest one."""
        return page.long().clamp(0, self.k.shape[0] - 1)

    def _readable_slots(self) -> int:
        if self.block_table is not None:
            pages = -(-self.length_bound // self.page_size)
            return min(pages, self.block_table.shape[1]) * self.page_size
        if self.keep_first is not None:
            return self.page_size
        return min(self.length_bound, self.page_size)

    def _gather_rows(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        rows = self._gather_slots(as_bytes(stored)).view(-1, stored.shape[-1])
        if scale is not None:
            per_row = self._gather_slots(scale.unsqueeze(-1)).view(-1)
            rows = dequantize_rows(rows.view(stored.dtype), per_row, self.dtype)
        return rows.view(self.batch_size, stored.shape[1], -1, stored.shape[-1])

    def _gather_slots(self, stored: Tensor) -> Tensor:
        """[B, H_k, N, width], dense, from pages [P, H_k, S, width]."""
        slots = self._readable_slots()
        if self.block_table is None:
            return self.of_batch(stored[:, :, :slots]).contiguous()
        pages = self.of_batch(self.block_table)[:, : slots // self.page_size]
        gathered = stored[self._in_pool(pages)]  # [B, pages of a row, H_k, S, width]
        return gathered.transpose(1, 2).flatten(2, 3).contiguous()


def allocate_rows(
    *shape: int, width: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Uninitialised [*shape, width] in which every row starts at a multiple of 16 bytes.

    The rows are dense where `width` numbers are whole 16 bytes, else a view of wider ones.
    """
    elements = 16 // dtype.itemsize
    padded = -(-width // elements) * elements
    return torch.empty(*shape, padded, device=device, dtype=dtype)[..., :width]


def allocate_kv(
    shape: tuple[int, ...], head_dim: int, value_dim: int, dtype: torch.dtype,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k and v, `allocate_rows` each."""
    k, v = (
        allocate_rows(*shape, width=width, dtype=dtype, device=device)
        for width in (head_dim, value_dim)
    )
    return k, v


def as_bytes(x: Tensor) -> Tensor:
    """x as numbers that torch can index on every device: fp8 as its bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
