"""Key/value cache for generation: preallocated storage, written in place, one length a row."""

import torch
from torch import Tensor

from . import checks


class KVCache:
    """Keys and values of the tokens seen so far, in buffers of a fixed size.

    Row b holds `lengths[b]` tokens in slots 0..lengths[b]-1 of `k` and `v`. What stands in the
    slots after them is undefined (it may be NaN): readers mask by `lengths`. With B = 3 and
    max_length = 6, after prompts of 2, 4 and 3 tokens (x = a token, . = undefined):

        x x . . . .
        x x x x . .
        x x x . . .

    No method waits for the device, except as `append` says when the room runs short. The cache
    stands outside autograd: see `append`.

    Args:
        batch_size: B, number of rows.
        num_kv_heads: H_k.
        max_length: slots a row.
        head_dim: D of the keys.
        value_dim: D_v of the values, default D.
        device, dtype: of the buffers; torch's defaults unless given.

    Attributes:
        k: [B, H_k, max_length, D].
        v: [B, H_k, max_length, D_v].
        lengths: int32 [B] on the device, changed in place: clone it to keep a value.
        length_bound: a number on the host that no row's length exceeds. Slots from there on hold
            no token in any row.
        uniform_length: the length of every row where the host knows it to be one number, else None.
            Then `k[:, :, :uniform_length]` holds tokens only and needs no mask.

    Raises:
        ValueError: a size is not positive.

    Example:
        >>> cache = KVCache(batch_size=2, num_kv_heads=1, max_length=8, head_dim=4)
        >>> k, v = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
        >>> cache.append(k, v)
        >>> cache.append(k, v, new_lengths=torch.tensor([3, 1]))  # row 1 is right-padded by 2
        >>> cache.lengths.tolist()
        [6, 4]
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "batch_size": batch_size,
            "num_kv_heads": num_kv_heads,
            "max_length": max_length,
            "head_dim": head_dim,
            "value_dim": value_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        self.max_length = max_length
        # An inference tensor could not be written once inference mode is left.
        with torch.inference_mode(False):
            shape = (batch_size, num_kv_heads, max_length)
            self.k = torch.empty(*shape, head_dim, device=device, dtype=dtype)
            self.v = torch.empty(*shape, value_dim, device=device, dtype=dtype)
            self.lengths = torch.zeros(batch_size, device=self.k.device, dtype=torch.int32)
        self.length_bound = 0
        self._uniform = True  # every row's length is length_bound

    @property
    def uniform_length(self) -> int | None:
        """Every row's length where the host knows it to be one number, else None."""
        return self.length_bound if self._uniform else None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, full or not."""
        return self.k.nbytes + self.v.nbytes + self.lengths.nbytes

    def __repr__(self) -> str:
        B, H_k, _, D = self.k.shape
        return (
            f"KVCache(batch_size={B}, num_kv_heads={H_k}, max_length={self.max_length}, "
            f"head_dim={D}, value_dim={self.v.shape[-1]}, device={self.k.device}, "
            f"dtype={self.k.dtype}, uniform_length={self.uniform_length}, "
            f"length_bound={self.length_bound})"
        )

    def append(self, k: Tensor, v: Tensor, new_lengths: Tensor | None = None) -> None:
        """Write T new tokens after every row's last one, in place.

        Args:
            k: [B, H_k, T, D], dtype and device of the cache, any strides.
            v: [B, H_k, T, D_v], likewise.
            new_lengths: int32 or int64 [B] on the cache's device, clamped to [0, T]: only the first
                new_lengths[b] tokens of row b count, the others are padding and the next append
                writes over them. None: all T count.

        Keys and values are stored without their graph: gradients do not flow through a cache, so
        call this under `torch.no_grad()` or `torch.inference_mode()`, or detach k and v.

        While length_bound + T <= max_length the device is not waited for. Past that the lengths
        are read back once, because the bound counts padding that rows may not hold.

        Raises:
            TypeError: `new_lengths` is not int32 or int64.
            ValueError: a shape, dtype or device disagrees with the cache, or the tokens do not fit.
            RuntimeError: k or v requires grad while grad mode is on.
            In every case the cache is left as it was.
        """
        self._check_tokens(k, v)
        T = k.shape[2]
        if new_lengths is not None:
            self._check_row_integers("new_lengths", new_lengths)
            new_lengths = new_lengths.clamp(0, T)
        bound, pads_fit = self._bound_after(T, new_lengths)
        with torch.no_grad():
            self._write(k, v, None if pads_fit else new_lengths)
            self.lengths += T if new_lengths is None else new_lengths
        self.length_bound = bound
        self._uniform = self._uniform and new_lengths is None

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.truncate(0)

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep at most the first `lengths` tokens of each row; a shorter row stays as it is.

        Args:
            lengths: one number >= 0 for all rows, or int32 or int64 [B] on the cache's device
                (negative entries count as 0).
        Raises:
            TypeError: the tensor is not int32 or int64.
            ValueError: the number is negative, or the tensor's shape or device disagrees.
        """
        if isinstance(lengths, Tensor):
            self._check_row_integers("lengths", lengths)
            self.lengths.copy_(torch.minimum(self.lengths, lengths.clamp(min=0)))
            self._uniform = False
            return
        if lengths < 0:
            raise ValueError(f"lengths must be >= 0, got {lengths}")
        self.lengths.clamp_(max=lengths)
        self.length_bound = min(self.length_bound, lengths)
        self._uniform = self._uniform or lengths == 0

    def reorder(self, index: Tensor) -> None:
        """Make row b a copy of what row index[b] was, as beam search does between steps.

        Args:
            index: int32 or int64 [B] on the cache's device, entries in 0..B-1, repeats allowed.
        Raises:
            TypeError: `index` is not int32 or int64.
            ValueError: the shape or device of `index` disagrees with the cache.
        """
        self._check_row_integers("index", index)
        n = self.length_bound
        k, v = self.k[:, :, :n].index_select(0, index), self.v[:, :, :n].index_select(0, index)
        lengths = self.lengths.index_select(0, index)
        self.k[:, :, :n].copy_(k)
        self.v[:, :, :n].copy_(v)
        self.lengths.copy_(lengths)

    def _check_row_integers(self, name: str, x: Tensor) -> None:
        """One int32 or int64 a row, on the cache's device."""
        checks.check_integers(name, x)
        checks.check_placement(name, x, tuple(self.lengths.shape), self.lengths)

    def _check_tokens(self, k: Tensor, v: Tensor) -> None:
        B, H_k, _, D = self.k.shape
        for name, x, width in (("k", k, D), ("v", v, self.v.shape[-1])):
            if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (B, H_k, width):
                raise ValueError(
                    f"{name} must have shape [{B}, {H_k}, T, {width}] to match the cache, "
                    f"got {tuple(x.shape)}"
                )
            if x.dtype != self.k.dtype:
                raise ValueError(
                    f"{name} must have the cache's dtype {self.k.dtype}, got {x.dtype}; "
                    "build the cache with the dtype that attention runs in"
                )
            if x.device != self.k.device:
                raise ValueError(
                    f"{name} must be on the cache's device {self.k.device}, got {x.device}"
                )
        if k.shape[2] != v.shape[2]:
            raise ValueError(
                f"k and v must hold the same number of tokens, got {k.shape[2]} and {v.shape[2]}"
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                "KVCache stores no graph, but k or v requires grad: append under torch.no_grad() "
                "or torch.inference_mode(), or detach them"
            )

    def _bound_after(self, T: int, new_lengths: Tensor | None) -> tuple[int, bool]:
        """The length bound after an append, and whether T slots a row, pads included, exist."""
        if self.length_bound + T > self.max_length and not self._uniform:
            self.length_bound = int(self.lengths.max())
        needed = self.length_bound + T
        if needed <= self.max_length:
            return needed, True
        if new_lengths is not None:
            needed = int((self.lengths + new_lengths).max())
            if needed <= self.max_length:
                return needed, False
        raise ValueError(
            f"appending {T} tokens a row needs {needed} slots, but max_length is "
            f"{self.max_length} and the longest row holds {self.length_bound}: there is room for "
            f"{self.max_length - self.length_bound}"
        )

    def _write(self, k: Tensor, v: Tensor, real_lengths: Tensor | None) -> None:
        """Store all T tokens of each row, or its first real_lengths[b] alone."""
        T = k.shape[2]
        if self._uniform and real_lengths is None:
            end = self.length_bound + T
            self.k[:, :, self.length_bound : end].copy_(k)
            self.v[:, :, self.length_bound : end].copy_(v)
            return
        step = torch.arange(T, device=k.device)
        row = torch.arange(k.shape[0], device=k.device).unsqueeze(1).expand(-1, T)  # [B, T]
        slot = self.lengths.unsqueeze(1) + step  # [B, T]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if real_lengths is not None:
            real = step < real_lengths.unsqueeze(1)
            row, slot, k, v = row[real], slot[real], k[real], v[real]
        self.k.transpose(1, 2)[row, slot] = k
        self.v.transpose(1, 2)[row, slot] = v
