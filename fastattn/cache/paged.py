"""Paged key/value cache: rows of any length over a pool of pages, shared prefixes, cheap forks."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import checks
from ..cache_view import CacheView, allocate_kv, as_bytes
from ..quantization import Quantize
from ..rotary import RotaryStyle
from .append import append, serves
from .checks import Rotary, check_dtype, check_ints, check_rotary, check_sizes, check_tokens
from .page_allocator import Changes, OutOfPages, OutOfRows, PageAllocator

__all__ = ["OutOfPages", "OutOfRows", "PagedKVCache"]


class PagedKVCache:
    """Keys and values of many sequences in pages of `page_size` tokens from one pool.

    A row is a sequence: `allocate` returns its number, `free` releases it. Position t of row r is
    slot t % page_size of page block_table[r, t // page_size]. With page_size = 2, after forking row
    0 of 3 tokens to row 1 and appending a token to row 1 (pages hold positions, x = page unused):

        pool          0 1   2 .   2 3   x
        block table   row 0: pages 0 1      row 1: pages 0 2

    `fork` and `reorder` share pages, copy-on-write. The allocator is on the host, so no method
    waits for the device; the tensors are updated by asynchronous copies.

    All layers of a model share the allocator: pass `num_layers`, and append layer by layer.

    Args:
        num_pages: pages of the pool.
        page_size: tokens a page holds, 1 to 256.
        num_kv_heads: H_k.
        head_dim: D of the keys.
        value_dim: D_v of the values, default D.
        num_layers: number of layers, with one block table.
        max_rows: sequences at a time.
        max_pages_per_row: columns of the block table; default num_pages.
        quantize: store "int8" or "fp8" (e4m3) codes with one fp32 scale a row of D numbers; the
            error bounds are in `fastattn.quantization`. None: store `dtype` itself.
        device, dtype: of the tokens; torch's defaults unless given.

    Attributes:
        k: [num_layers, num_pages, H_k, page_size, D].
        v: [num_layers, num_pages, H_k, page_size, D_v].
        k_scale, v_scale: fp32 [num_layers, num_pages, H_k, page_size] with codes, else None.
        block_table: int32 [max_rows, max_pages_per_row] on the device, modified in place. Entries
            past a row's pages are stale, or 0.
        lengths: int32 [max_rows] on the device, modified in place; 0 for unused rows.

    Raises:
        TypeError: a size is no int, or dtype not floating.
        ValueError: a size is not positive, page_size exceeds 256, or `quantize` is unknown.

    Examples:
        >>> cache = PagedKVCache(num_pages=8, page_size=4, num_kv_heads=1, head_dim=4)
        >>> row = cache.allocate()
        >>> prompt = torch.randn(1, 1, 6, 4)
        >>> cache.append([row], prompt, prompt)
        >>> twin = cache.fork(row)
        >>> cache.free_pages, cache.length(twin)
        (6, 6)
    """

    _buffers = staticmethod(allocate_kv)

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        num_layers: int = 1,
        max_rows: int = 64,
        max_pages_per_row: int | None = None,
        quantize: Quantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_pages, page_size, num_kv_heads, head_dim, num_layers, max_rows = check_sizes(
            num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim,
            num_layers=num_layers, max_rows=max_rows,
        )  # fmt: skip
        value_dim, max_pages = check_sizes(
            value_dim=head_dim if value_dim is None else value_dim,
            max_pages_per_row=num_pages if max_pages_per_row is None else max_pages_per_row,
        )
        if page_size > 256:
            raise ValueError(f"page_size must be at most 256, got {page_size}")
        self.page_size, self.head_dim = page_size, head_dim
        self.num_layers = num_layers
        self.quantize = quantize
        self.dtype = check_dtype(dtype)
        self._allocator = PageAllocator(num_pages, page_size, max_rows, max_pages)
        self._index_of: tuple[tuple[int, ...], Tensor] | None = None
        # Inference tensors are not writable outside inference mode.
        with torch.inference_mode(False):
            shape = (num_layers, num_pages, num_kv_heads, page_size)
            buffers = self._buffers(shape, head_dim, value_dim, self.dtype, quantize, device)
            self.k, self.v, self.k_scale, self.v_scale, self._rope = buffers
            device = self.k.device
            self.block_table = torch.zeros(max_rows, max_pages, device=device, dtype=torch.int32)
            self.lengths = torch.zeros(max_rows, device=device, dtype=torch.int32)
            self._counters = torch.zeros_like(self.lengths)

    @property
    def stored_tensors(self) -> list[Tensor]:
        """Page tensors, without aliases."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    @property
    def free_pages(self) -> int:
        """Pages that no row holds."""
        return self._allocator.free_pages

    @property
    def rows(self) -> list[int]:
        """The rows in use, oldest first."""
        return self._allocator.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, full or not."""
        return sum(x.nbytes for x in (*self.stored_tensors, self.block_table, self.lengths))

    def length(self, row: int) -> int:
        """Tokens of a row, on the host."""
        return self._allocator.length(checks.check_int("row", row))

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in order."""
        return self._allocator.pages(checks.check_int("row", row))

    def view(self, rows: Sequence[int], layer: int = 0) -> CacheView:
        """View for kernels of these rows, in this order.

        The batch index is cached for the next call with the same rows.

        Raises:
            TypeError: a row or the layer is not an int.
            ValueError: a row is not in use, or there is no such layer.
        """
        rows, layer = check_ints("rows", "row", rows), self._check_layer(layer)
        k_scale = v_scale = None if self.k_scale is None else self.k_scale[layer]
        if self.v_scale is not self.k_scale and self.v_scale is not None:
            v_scale = self.v_scale[layer]
        return CacheView(
            self.k[layer],
            self.v[layer],
            k_scale,
            v_scale,
            self.block_table,
            self.page_size,
            self.lengths,
            None,
            self._batch_index(rows),
            max(map(self._allocator.length, rows), default=0),
            None,
            None,
            self.dtype,
            self._counters,
            None if self._rope is None else self._rope[layer],
        )

    def allocate(self) -> int:
        """Allocate an empty row, and return its number.

        Raises:
            OutOfRows: all max_rows are in use.
        """
        return self._allocator.allocate()

    def free(self, row: int) -> None:
        """Free a row, and its unshared pages."""
        row = checks.check_int("row", row)
        self._allocator.free(row)
        self._follow(Changes(lengths={row: 0}))

    def fork(self, row: int) -> int:
        """A new row that shares all pages of `row`, for beams or a common prompt.

        Raises:
            OutOfRows: all max_rows are in use.
            ValueError: `row` is not in use.
        """
        twin, changes = self._allocator.fork(checks.check_int("row", row))
        self._follow(changes)
        return twin

    def truncate(self, row: int, length: int) -> None:
        """Keep at most the first `length` tokens of a row.

        Raises:
            ValueError: `row` is not in use, or `length` is negative.
        """
        row, length = checks.check_int("row", row), checks.check_int("length", length)
        self._follow(self._allocator.truncate(row, length))

    def reorder(self, rows: Sequence[int], index: Sequence[int]) -> None:
        """Make rows[i] a fork of the former rows[index[i]], for beam search.

        Pages are shared, not copied: this allocates none.

        Raises:
            ValueError: a row is not in use or given twice, or `index` is not len(rows) numbers
                below len(rows).
        """
        rows = check_ints("rows", "row", rows)
        self._follow(self._allocator.reorder(rows, check_ints("index", "an entry of index", index)))

    def reserve(self, rows: Sequence[int], counts: int | Sequence[int]) -> None:
        """Reserve own pages for the next tokens of some rows, with copies of shared ones.

        `append` does this itself. To replay a captured append, call this before, outside the graph,
        and `advance` after; in between, do not fork or reorder the rows.

        Args:
            counts: tokens a row gets, one number for all or one each.
        Raises:
            OutOfPages: the pool has fewer free pages than that takes; nothing was changed.
            ValueError: a row is not in use, given twice or too long for the table, or a count is
                negative.
        """
        rows = check_ints("rows", "row", rows)
        self._follow(self._allocator.reserve(rows, _per_row(rows, counts)))

    def advance(self, rows: Sequence[int], counts: int | Sequence[int]) -> None:
        """Add tokens to the host's lengths only, after a replayed append has written and counted
        them.

        Raises:
            ValueError: a row is not in use or given twice, or a count is negative or more than what
                was reserved.
        """
        rows = check_ints("rows", "row", rows)
        self._allocator.advance(rows, _per_row(rows, counts))

    def extend(self, rows: Sequence[int], counts: int | Sequence[int]) -> Tensor:
        """Reserve and count the next tokens of some rows, and return their slots.

        Their keys and values are undefined until `fastattn.append_paged` writes them in every
        layer, with one call per layer for a packed step.

        Args:
            counts: tokens a row gets, one number for all or one each.
        Returns:
            int64 [sum of counts] on the cache's device: page * page_size + offset, row by row.
        Raises:
            as `reserve`.
        """
        rows = check_ints("rows", "row", rows)
        counts = _per_row(rows, counts)
        self.reserve(rows, counts)
        slots: list[int] = []
        for row, count in zip(rows, counts, strict=True):
            first = self._allocator.length(row)
            slots += self._slots(row, range(first, first + count))
        self._allocator.advance(rows, counts)
        self._follow(Changes(lengths={row: self._allocator.length(row) for row in rows}))
        return _on_device(slots, torch.int64, self.k.device)

    def compact(self, row: int, first: int, kept: Sequence[int]) -> None:
        """Keep a row's tokens before `first`, followed by those at positions `kept`.

        For a verified tree of drafts. Keys and values are moved in every layer without re-rotation.

        Args:
            kept: distinct positions from `first` on, in the new order.
        Raises:
            ValueError: `row` is not in use, a position is not one of its tokens from `first` on, or
                another row shares these. Then nothing is changed.
        """
        row, first = checks.check_int("row", row), checks.check_int("first", first)
        kept, length = check_ints("kept", "a position of kept", kept), self.length(row)
        if not 0 <= first <= length:
            raise ValueError(f"first must be from 0 to the row's {length} tokens, got {first}")
        if len(set(kept)) != len(kept) or any(not first <= t < length for t in kept):
            raise ValueError(
                f"kept must hold positions from {first} to {length - 1}, no two alike, got {kept}"
            )
        pages = self._allocator.pages(row)
        shared = (self._allocator.holders(page) > 1 for page in pages[first // self.page_size :])
        if first < length and any(shared):
            raise ValueError(f"row {row} shares tokens from {first} on with another row")
        old, stored = self._slots(row, kept), list(map(as_bytes, self.stored_tensors))
        # Read everything before writing, as tokens may swap positions.
        moved = [x[:, page, :, slot] for x in stored for page, slot in [self._places(old)]]
        self.truncate(row, first)
        page, slot = self._places(self.extend([row], len(kept)))
        with torch.no_grad():
            for x, tokens in zip(stored, moved, strict=True):
                x[:, page, :, slot] = tokens

    def _slots(self, row: int, positions: Iterable[int]) -> list[int]:
        """Slots of the pool that hold these positions of a row."""
        pages, size = self._allocator.pages(row), self.page_size
        return [pages[t // size] * size + t % size for t in positions]

    def _places(self, slots: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Page and offset, int64 on the device, of slots."""
        if not isinstance(slots, Tensor):
            slots = _on_device(slots, torch.int64, self.k.device)
        return slots // self.page_size, slots % self.page_size

    def append(
        self,
        rows: Sequence[int],
        k: Tensor,
        v: Tensor,
        new_lengths: Sequence[int] | None = None,
        *,
        layer: int = 0,
        q: Tensor | None = None,
        rotary: Rotary | None = None,
        rotary_style: RotaryStyle = "half",
        backend: str | None = None,
    ) -> Tensor | None:
        """Write T new tokens after the last one of each of these rows.

        With several layers, layer 0 comes first: it reserves and counts the tokens. Then call the
        others with the same rows and new_lengths, without other changes to the rows in between.

        Args:
            rows: B distinct rows in use.
            k: [B, H_k, T, D], dtype and device of the cache, any strides.
            v: [B, H_k, T, D_v], likewise.
            new_lengths: B numbers on the host, clamped to [0, T]: only the first new_lengths[b]
                tokens of row rows[b] count. None: all T count.
            layer, q, rotary, rotary_style, backend: the layer, and arguments of `KVCache.append`.
        Returns:
            Rotated q, in a new tensor; None without q.
        Raises:
            OutOfPages: the pool has fewer free pages than the tokens take.
            TypeError: a row, a number of new_lengths or the layer is not an int.
            ValueError: a row is not in use, repeated or too long for the table; a shape, dtype or
                device does not match the cache; the tables are too short; a layer's tokens differ
                from layer 0's; the backend cannot serve.
            RuntimeError: k or v requires grad while grad mode is on.
            In every case the cache is unchanged.
        """
        rows, layer = check_ints("rows", "row", rows), self._check_layer(layer)
        check_tokens(k, v, self.k, self.v, len(rows), self.dtype, self.head_dim)
        serves(k, backend)
        T = k.shape[2]
        counts = [T] * len(rows) if new_lengths is None else _clamped(rows, new_lengths, T)
        first = layer == 0
        ahead = counts if first else [0] * len(rows)
        ends = [self._allocator.length(row) + n for row, n in zip(rows, ahead, strict=True)]
        check_rotary(rotary, rotary_style, q, k, max(ends, default=0))
        if first:
            self.reserve(rows, counts)
        else:
            self._check_layer_0_came_first(rows, counts)
        with torch.no_grad():
            turned = append(
                self.view(rows, layer), k, v,
                None if new_lengths is None else _on_device(counts, torch.int32, self.k.device),
                q=q, rotary=rotary, rotary_style=rotary_style, advance=first,
                room_for_padding=new_lengths is None, backend=backend,
            )  # fmt: skip
        if first:
            self._allocator.advance(rows, counts)
        return turned

    def _check_layer_0_came_first(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows must differ from each other, got {list(rows)}")
        for row, count in zip(rows, counts, strict=True):
            latest = self._allocator.latest(row)
            if count != latest:
                raise ValueError(
                    f"append to layer 0 first: it got {latest} tokens of row {row} last, "
                    f"and another layer gets {count}"
                )

    def _check_layer(self, layer: int) -> int:
        layer = checks.check_int("layer", layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be from 0 to {self.num_layers - 1}, got {layer}")
        return layer

    def _batch_index(self, rows: Sequence[int]) -> Tensor:
        key = tuple(rows)
        for row in key:
            self._allocator.length(row)
        if self._index_of is None or self._index_of[0] != key:
            with torch.inference_mode(False):
                self._index_of = key, _on_device(key, torch.int32, self.k.device)
        return self._index_of[1]

    @torch.no_grad()
    def _follow(self, changes: Changes) -> None:
        """Write changes into the tensors."""
        if changes.copies:
            old, new = zip(*changes.copies, strict=True)
            old_index, new_index = (_on_device(x, torch.int64, self.k.device) for x in (old, new))
            for x in self.stored_tensors:
                pages = as_bytes(x)
                pages.index_copy_(1, new_index, pages.index_select(1, old_index))
        columns = self.block_table.shape[1]
        flat = {row * columns + column: page for (row, column), page in changes.entries.items()}
        _put(self.block_table.view(-1), flat)
        _put(self.lengths, changes.lengths)


def _per_row(rows: Sequence[int], counts: int | Sequence[int]) -> list[int]:
    counts = checks.as_python(counts)
    several = isinstance(counts, Iterable)
    counts = check_ints("counts", "a count", counts if several else [counts] * len(rows))
    if len(counts) != len(rows):
        raise ValueError(f"counts must be one number or {len(rows)}, got {len(counts)}")
    return counts


def _clamped(rows: Sequence[int], new_lengths: Sequence[int], T: int) -> list[int]:
    if isinstance(new_lengths, Tensor):
        raise TypeError("new_lengths must be numbers on the host, got a tensor: use .tolist()")
    if len(new_lengths) != len(rows):
        raise ValueError(f"new_lengths must hold {len(rows)} numbers, got {len(new_lengths)}")
    numbers = check_ints("new_lengths", "a number of new_lengths", new_lengths)
    return [min(max(n, 0), T) for n in numbers]


def _on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host numbers, copied asynchronously."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    # torch does not reuse pinned memory before the copy is done.
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=True, device="cpu")
    return pinned.to(device, non_blocking=True)


def _put(flat: Tensor, numbers: dict[int, int]) -> None:
    """flat[i] = n for every i: n, in place."""
    if numbers:
        index = _on_device(list(numbers), torch.int64, flat.device)
        flat.index_copy_(0, index, _on_device(list(numbers.values()), flat.dtype, flat.device))
