"""Key/value cache for generation: preallocated, written in place, with one length per row."""

import torch
from torch import Tensor

from .. import checks, dispatch, tracing
from ..cache_view import CacheView, allocate_kv, as_bytes
from ..quantization import Quantize
from ..rotary import RotaryStyle
from .append import append
from .checks import (
    Rotary,
    check_dtype,
    check_rotary,
    check_row_values,
    check_sizes,
    check_tokens,
    check_window,
)

# Of so many rows, copying each is faster than an index of slots.
_FEW_ROWS = 16


class KVCache:
    """Key/value cache in buffers of fixed size.

    Row b holds `lengths[b]` tokens in slots 0..lengths[b]-1 of `k` and `v`. Later slots are
    undefined (maybe NaN): readers mask by `lengths`. With B = 3 and max_length = 6, after prompts
    of 2, 4 and 3 tokens (x = a token, . = undefined):

        x x . . . .
        x x x x . .
        x x x . . .

    With `window`, a row is a ring: it keeps the tokens of a sliding window of that many keys, and
    the first `keep_first` ones, while `lengths` counts all tokens so far. Row 0 of KVCache(...,
    max_length=6, window=3, keep_first=1) after 9 tokens, by position:

        0 6 7 8 4 5

    The remaining max_length - keep_first - window slots are room for steps: up to `max_step` tokens
    may be appended before their queries attend.

    No method waits for the device, except `append` when room runs short. No autograd: see `append`.

    Args:
        batch_size: B, number of rows.
        num_kv_heads: H_k.
        max_length: slots a row.
        head_dim: D of the keys.
        value_dim: D_v of the values, default D.
        window: keys that a query may see, its own included; None: all, no ring.
        keep_first: of a ring, first positions that every query also sees (attention sinks).
        quantize: store "int8" or "fp8" (e4m3) codes with one fp32 scale a row of D numbers; the
            error bounds are in `fastattn.quantization`. None: store `dtype` itself.
        device, dtype: of the tokens; torch's defaults unless given.

    Attributes:
        k: [B, H_k, max_length, D].
        v: [B, H_k, max_length, D_v].
        k_scale, v_scale: fp32 [B, H_k, max_length] with codes, else None.
        lengths: int32 [B] on the device, modified in place: clone it to keep a value.
        rotates: `append` takes q and rotary.
        starts: int32 [B] if rows are left-padded (see `set_starts`), else None.
        length_bound: host-side bound on all lengths; slots from there on are empty.
        uniform_length: the common length of all rows, if known to the host, else None. Then `k[:,
            :, :uniform_length]` of a plain cache (see `is_plain`) needs no mask.

    Raises:
        TypeError: a size is no int, or dtype not floating.
        ValueError: a size is not positive, `quantize` is unknown, or a ring has too few slots for
            its window and first positions.

    Examples:
        >>> cache = KVCache(batch_size=2, num_kv_heads=1, max_length=8, head_dim=4)
        >>> k, v = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
        >>> cache.append(k, v)
        >>> cache.append(k, v, new_lengths=torch.tensor([3, 1]))  # row 1 is right-padded by 2
        >>> cache.lengths.tolist()
        [6, 4]
    """

    rotates = True
    _buffers = staticmethod(allocate_kv)

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        keep_first: int = 0,
        quantize: Quantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        batch_size, num_kv_heads, max_length, head_dim, value_dim = check_sizes(
            batch_size=batch_size,
            num_kv_heads=num_kv_heads,
            max_length=max_length,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
        )
        self.max_length, self.head_dim = max_length, head_dim
        self.window, self.keep_first = check_window(window, keep_first, max_length, "max_length")
        self.quantize = quantize
        self.dtype = check_dtype(dtype)
        # Inference tensors are not writable outside inference mode.
        with torch.inference_mode(False):
            shape = (batch_size, num_kv_heads, max_length)
            buffers = self._buffers(shape, head_dim, value_dim, self.dtype, quantize, device)
            self.k, self.v, self.k_scale, self.v_scale, self._rope = buffers
            self.lengths = torch.zeros(batch_size, device=self.k.device, dtype=torch.int32)
            self._counters = torch.zeros_like(self.lengths)
        self.starts: Tensor | None = None
        self.length_bound = 0
        self._uniform = True  # every row's length is length_bound
        self._longest_ever = 0  # since the last reset, for a ring
        self._copies: tuple[object, ...] = ()  # of a checked append whose tokens are stored as such

    @property
    def stored_tensors(self) -> list[Tensor]:
        """Slot tensors, without aliases."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    @property
    def uniform_length(self) -> int | None:
        """The common length of all rows, if known to the host, else None."""
        return self.length_bound if self._uniform else None

    @property
    def is_plain(self) -> bool:
        """Whether slots 0, 1, ... are the tokens: no ring, codes or padding."""
        return self.window is None and self.quantize is None and self.starts is None

    @property
    def max_step(self) -> int:
        """Most tokens of an append whose queries find all their keys in the cache."""
        # A ring accepts longer ones, whose earlier queries must attend to the new keys directly.
        if self.window is None:
            return self.max_length
        return self.max_length - self.keep_first - self.window + 1

    @property
    def lost(self) -> int:
        """Tokens that were taken from a ring after it wrote over older ones."""
        wrote_over = self.window is not None and self._longest_ever > self.max_length
        return self._longest_ever - self.length_bound if wrote_over else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, full or not."""
        others = [self.lengths] if self.starts is None else [self.lengths, self.starts]
        return sum(x.nbytes for x in (*self.stored_tensors, *others))

    def __repr__(self) -> str:
        B, H_k = self.k.shape[:2]
        options = ""
        if self.window is not None:
            options += f"window={self.window}, keep_first={self.keep_first}, "
        if self.quantize is not None:
            options += f"quantize={self.quantize!r}, "
        return (
            f"{type(self).__name__}(batch_size={B}, num_kv_heads={H_k}, "
            f"max_length={self.max_length}, head_dim={self.head_dim}, "
            f"value_dim={self.v.shape[-1]}, {options}device={self.k.device}, "
            f"dtype={self.dtype}, uniform_length={self.uniform_length}, "
            f"length_bound={self.length_bound})"
        )

    def view(self, batch_index: Tensor | None = None) -> CacheView:
        """View for kernels; only of some rows, with an int32 or int64 [B] index."""
        if batch_index is not None:
            self._check_batch_index(batch_index)
        return CacheView(
            self.k,
            self.v,
            self.k_scale,
            self.v_scale,
            None,
            self.max_length,
            self.lengths,
            self.starts,
            batch_index,
            self.length_bound,
            None if self.window is None else self.keep_first,
            self.window,
            self.dtype,
            self._counters,
            self._rope,
        )

    def append(
        self,
        k: Tensor,
        v: Tensor,
        new_lengths: Tensor | None = None,
        *,
        batch_index: Tensor | None = None,
        q: Tensor | None = None,
        rotary: Rotary | None = None,
        rotary_style: RotaryStyle = "half",
        backend: str | None = None,
    ) -> Tensor | None:
        """Write T new tokens after every row's last one, in place.

        Args:
            k: [B, H_k, T, D], dtype and device of the cache, any strides.
            v: [B, H_k, T, D_v], likewise.
            new_lengths: int32 or int64 [B] on the cache's device, clamped to [0, T]: only the first
                new_lengths[b] tokens of row b count; the next append overwrites the others. None:
                all T count.
            batch_index: int32 or int64 [B] on the cache's device: distinct rows of the B sequences.
                None: row b is row b. Repeats are not checked on a GPU, and leave a row unspecified.
            q: [B, H_q, T, D] to rotate together with k; needs `rotary`.
            rotary: (cos, sin) of `rotary_tables(N, R)`: k is rotated to its position, lengths[b] +
                i for token i, as it is written. None: not rotated.
            rotary_style: see `fastattn.rotary.apply_rotary`.
            backend: "triton", "torch" or "auto" (the kernel on a GPU).
        Returns:
            Rotated q, in a new tensor, unspecified at padding; None without q.

        Gradients do not flow through a cache: call this under `torch.no_grad()` or
        `torch.inference_mode()`, or detach k and v.

        While length_bound + T <= max_length, and always in a ring, this does not wait for the
        device. Past that the lengths are read back once, as the bound includes padding, but not
        during CUDA graph capture: then, and in replays, tokens past max_length are counted in
        `lengths` and not stored.

        Raises:
            TypeError: `new_lengths` or `batch_index` is not int32 or int64, a table not fp32, or q
                not of k's dtype.
            ValueError: a shape, dtype or device does not match the cache, the tables are too short,
                the tokens do not fit, or, on the CPU, an entry of `batch_index` is invalid or
                repeated.
            RuntimeError: k or v requires grad while grad mode is on. In every case the cache is
                unchanged.
        """
        whole = new_lengths is None and batch_index is None
        plain = q is None and rotary is None and rotary_style == "half"
        if whole and plain and self._copied(k, v, backend):
            return None
        if batch_index is not None:
            self._check_batch_index(batch_index, distinct=True)
        B = (self.lengths if batch_index is None else batch_index).shape[0]
        check_tokens(k, v, self.k, self.v, B, self.dtype, self.head_dim)
        T = k.shape[2]
        first_slot = self._common_slot(new_lengths, batch_index)
        if new_lengths is not None:
            checks.check_input("new_lengths", new_lengths, "integer", "B", self.lengths, {"B": B})
        bound, pads_fit = self._bound_after(T, new_lengths, batch_index)
        check_rotary(rotary, rotary_style, q, k, bound)
        with torch.no_grad():
            turned = append(
                self.view(batch_index),
                k,
                v,
                new_lengths,
                q=q,
                rotary=rotary,
                rotary_style=rotary_style,
                first_slot=first_slot,
                room_for_padding=pads_fit,
                backend=backend,
            )
        self.length_bound = bound
        self._longest_ever = max(self._longest_ever, bound)
        stored = self.window is None and self.quantize is None and batch_index is None
        if stored and not tracing.may_be_traced(k):
            self._copies = (k.shape, v.shape, k.dtype, v.dtype)
        self._uniform = self._uniform and new_lengths is None and batch_index is None
        return turned

    def _copied(self, k: Tensor, v: Tensor, backend: str | None) -> bool:
        """Append tokens like those of an earlier call by copies, on a CPU; False: not done."""
        if tracing.may_be_traced(k) or tracing.in_forward_mode() or type(v) is not Tensor:
            return False
        on_cpu = k.is_cpu and v.is_cpu and self.k.is_cpu
        if not on_cpu or k.is_nested or v.is_nested or not k.layout is v.layout is torch.strided:
            return False
        if (k.shape, v.shape, k.dtype, v.dtype) != self._copies:
            return False
        n, T = self.length_bound, k.shape[2]
        bound = n + T
        wants_gradient = (k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
        if bound > self.max_length or wants_gradient:
            return False
        if backend != "torch" and (backend is not None or dispatch.raw_name()):
            return False
        if self._uniform:
            self.k[:, :, n:bound], self.v[:, :, n:bound] = k, v
            self.lengths.fill_(bound)
        elif len(self.lengths) <= _FEW_ROWS:
            for row, n in enumerate(self.lengths.tolist()):
                self.k[row, :, n : n + T], self.v[row, :, n : n + T] = k[row], v[row]
            self.lengths.add_(T)
        else:
            return False
        self.length_bound = bound
        return True

    def set_starts(self, starts: Tensor | None) -> None:
        """Mark the first starts[b] positions of row b as padding, which is masked.

        Args:
            starts: int32 or int64 [B] on the cache's device, copied; None: no padding. `reset`
                clears them, `reorder` moves them with the rows.
        Raises:
            TypeError: `starts` is not int32 or int64.
            ValueError: its shape or device disagrees, or the cache is a ring.
        """
        if starts is None:
            self.starts = None
            return
        if self.window is not None:
            raise ValueError("starts: a cache with a window does not support padding on the left")
        self._check_row_integers("starts", starts)
        with torch.inference_mode(False):
            self.starts = starts.clamp(0, self.max_length).to(torch.int32)

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.truncate(0)
        self.starts = None

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep at most the first `lengths` tokens of each row; a shorter row stays as it is.

        A ring has overwritten old tokens: of the most that it ever held, at most max_step can be
        taken away, or all. A tensor's values cannot be checked for that. `decode_attention` then
        takes as many fewer queries, until tokens are appended.

        Args:
            lengths: one number >= 0 for all rows, or int32 or int64 [B] on the cache's device
                (negative entries count as 0).
        Raises:
            TypeError: neither an int nor an int32 or int64 tensor.
            ValueError: the number is negative, a ring may have lost what would be kept, or the
                tensor's shape or device disagrees.
        """
        lengths = checks.as_python(lengths)
        if isinstance(lengths, Tensor):
            self._check_row_integers("lengths", lengths)
            self.lengths.copy_(torch.minimum(self.lengths, lengths.clamp(min=0)))
            self._uniform = False
            return
        lengths = checks.check_int("lengths", lengths)
        if lengths < 0:
            raise ValueError(f"lengths must be >= 0, got {lengths}")
        oldest = self._longest_ever - self.max_step
        if self.window is not None and 0 < lengths < min(oldest, self.length_bound):
            raise ValueError(
                f"lengths must be 0 or at least {oldest}: the ring held {self._longest_ever} "
                f"tokens and max_step = {self.max_step}, got {lengths}"
            )
        self.length_bound = min(self.length_bound, lengths)
        self.lengths.clamp_(max=self.length_bound)
        self._longest_ever = self._longest_ever if lengths else 0
        self._uniform = self._uniform or lengths == 0

    def reorder(self, index: Tensor) -> None:
        """Make row b a copy of the former row index[b], for beam search.

        Args:
            index: int32 or int64 [B] on the cache's device, entries in 0..B-1, repeats allowed.
        Raises:
            TypeError: `index` is not int32 or int64.
            ValueError: the shape or device of `index` disagrees with the cache, or, on the CPU, an
                entry is no row.
        """
        self._check_row_integers("index", index)
        check_row_values("index", index, self.lengths.shape[0])
        n = min(self.length_bound, self.max_length)
        held = [as_bytes(x)[:, :, :n] for x in self.stored_tensors]
        held += [x for x in (self.lengths, self.starts) if x is not None]
        for x in held:
            x.copy_(x.index_select(0, index))

    def _check_row_integers(self, name: str, x: Tensor) -> None:
        """Check for int32 or int64 [rows] on the cache's device."""
        checks.check_input(name, x, "integer", "B", self.lengths, {"B": self.lengths.shape[0]})

    def _check_batch_index(self, batch_index: Tensor, *, distinct: bool = False) -> None:
        rows = self.lengths.shape[0]
        checks.check_input("batch_index", batch_index, "integer", "...", self.lengths, {})
        sizes = {"B": min(batch_index.numel(), rows)}
        checks.check_input("batch_index", batch_index, "", "B", self.lengths, sizes)
        check_row_values("batch_index", batch_index, rows, distinct=distinct)

    def _common_slot(self, new_lengths: Tensor | None, batch_index: Tensor | None) -> int | None:
        """Common slot of every row's first new token, if known to the host."""
        whole = new_lengths is None and batch_index is None and self.window is None
        return self.uniform_length if whole else None

    def _bound_after(
        self, T: int, new_lengths: Tensor | None, batch_index: Tensor | None
    ) -> tuple[int, bool]:
        """Length bound after an append, and whether there are T slots per row, padding included."""
        bound = self.length_bound
        if self.window is not None:
            return bound + T, False
        if bound + T <= self.max_length:
            return bound + T, True
        ragged = new_lengths is not None or batch_index is not None
        if (ragged or not self._uniform) and not tracing.may_keep(self.lengths.device):
            # The lengths cannot be read now. Tokens that do not fit are not stored.
            return self.max_length, False
        bound = bound if self._uniform else int(self.lengths.max())
        needed = bound + T
        if needed <= self.max_length:
            return needed, True
        if ragged:
            needed = self._longest_after(T, new_lengths, batch_index)
            if needed <= self.max_length:
                return max(needed, bound), False
        raise ValueError(
            f"appending {T} tokens a row needs {needed} slots, but max_length is "
            f"{self.max_length} and the longest row holds {bound}: there is room for "
            f"{self.max_length - bound}"
        )

    def _longest_after(self, T: int, new_lengths: Tensor | None, batch_index: Tensor | None) -> int:
        lengths = self.lengths if batch_index is None else self.lengths[batch_index]
        return int((lengths + (T if new_lengths is None else new_lengths.clamp(0, T))).max())
