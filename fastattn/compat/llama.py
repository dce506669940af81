"""Self-attention with the calls of Llama-style code: `freqs_cis`, and caches in and out."""

import torch
from torch import Tensor, nn

from ..cache.views import view_of_tensors
from ..cache_view import CacheView
from ..checks import check_tensor
from ..modules.self_attention import GQAttention
from ..rotary import RotaryTables


class LlamaAttention(nn.Module):
    """A `GQAttention` called as `(x, freqs_cis, use_kv_cache, cache_k, cache_v, padding_mask)`.

    It keeps nothing between calls: the caches that a call returns go into the next one. Each call
    copies them, as they grow; `fastattn.KVCache` is written in place.

    Args:
        attention: the layer, with its weights and options; its rotary style says which channels
            freqs_cis turns together. Meta's weights are for "interleaved".

    Raises:
        TypeError: attention is no `GQAttention`.
    """

    def __init__(self, attention: GQAttention) -> None:
        super().__init__()
        if not isinstance(attention, GQAttention):
            raise TypeError(f"attention must be a GQAttention, got {type(attention).__name__}")
        self.attention = attention

    def forward(
        self,
        x: Tensor,
        freqs_cis: RotaryTables | None = None,
        use_kv_cache: bool = False,
        cache_k: Tensor | None = None,
        cache_v: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend to the n tokens in the caches and the T new ones of x.

        Args:
            x: [B, T, C].
            freqs_cis: complex [T, D / 2] or [B, T, D / 2], cos + i sin of the positions of x's
                tokens: `freqs_cis[n : n + T]` of a whole table. Or what else `GQAttention` takes as
                rotary_tables; None: the layer's own, from position n on.
            use_kv_cache: return caches with x's tokens in them. False: given caches are read, and
                come back as they are.
            cache_k, cache_v: [B, n, H_k, D] and [B, n, H_k, D_v], rotated keys and values of the
                tokens before x, from an earlier call; None: there are none. Gradients flow through
                them.
            padding_mask: [B, n + T], of the tokens in the caches too: bool, True = a token to
                attend to, or floating, 0 for a token and -inf for padding.

        Returns:
            (out [B, T, C], cache_k and cache_v of n + T tokens; without use_kv_cache
            those given).

        Raises:
            TypeError: a cache or padding_mask is no tensor, or that is neither bool nor floating.
            ValueError: one cache is given without the other, or has another shape,
                dtype or device than the new keys; padding_mask has other values or another shape.
            Exception: what `GQAttention` raises.
        """
        mask = None if padding_mask is None else _kept(padding_mask)
        if not use_kv_cache and cache_k is None and cache_v is None:
            out = self.attention(x, rotary_tables=freqs_cis, key_padding_mask=mask)
            return out, None, None
        if (cache_k is None) != (cache_v is None):
            there = "cache_v" if cache_k is None else "cache_k"
            raise ValueError(f"cache_k and cache_v go together, got {there} alone")
        for name, old in (("cache_k", cache_k), ("cache_v", cache_v)):
            if old is not None:
                check_tensor(name, old)
        cache = _GivenCache(cache_k, cache_v, x.shape[0], x.device)
        out = self.attention(x, rotary_tables=freqs_cis, cache=cache, key_padding_mask=mask)
        if not use_kv_cache:
            return out, cache_k, cache_v
        return out, cache.k.transpose(1, 2), cache.v.transpose(1, 2)


def _kept(padding_mask: Tensor) -> Tensor:
    """The mask as bool, True = attend. Values are looked at on a CPU only."""
    check_tensor("padding_mask", padding_mask)
    if padding_mask.dtype == torch.bool:
        return padding_mask
    if not padding_mask.is_floating_point():
        raise TypeError(f"padding_mask must be bool, or 0 and -inf, got {padding_mask.dtype}")
    kept = padding_mask == 0
    if padding_mask.is_cpu and not bool((kept | (padding_mask == float("-inf"))).all()):
        raise ValueError("padding_mask must be bool, or 0 and -inf, got other numbers")
    return kept


class _GivenCache:
    """A `LayerCache` of tensors that others keep: appending makes longer ones."""

    k: Tensor
    v: Tensor

    def __init__(
        self, cache_k: Tensor | None, cache_v: Tensor | None, B: int, device: torch.device
    ) -> None:
        self._given = (cache_k, cache_v)
        self._batch, self._device = B, device
        self.length_bound = 0 if cache_k is None or cache_k.dim() != 4 else cache_k.shape[1]
        # There is always room.
        self.max_length = 2**31 - 1

    @property
    def uniform_length(self) -> int:
        return self.length_bound

    @property
    def lengths(self) -> Tensor:
        n = self.length_bound
        return torch.full((self._batch,), n, dtype=torch.int32, device=self._device)

    def append(self, k: Tensor, v: Tensor, new_lengths: Tensor | None = None) -> None:
        before = [
            None if cache is None else _checked(name, cache, new, self.length_bound)
            for name, cache, new in zip(("cache_k", "cache_v"), self._given, (k, v), strict=True)
        ]
        # Dense in this order, as the kernels for few queries read it.
        self.k, self.v = (
            new.contiguous() if old is None else torch.cat((old.transpose(1, 2), new), 2)
            for old, new in zip(before, (k, v), strict=True)
        )
        self.length_bound += k.shape[2]

    def view(self) -> CacheView:
        return view_of_tensors(self.k, self.v, self.lengths, length_bound=self.length_bound)


def _checked(name: str, cache: Tensor, new: Tensor, n: int) -> Tensor:
    """A cache [B, n, H_k, D] to which new ones [B, H_k, T, D] can be appended."""
    B, H_k, _, D = new.shape
    if tuple(cache.shape) != (B, n, H_k, D):
        raise ValueError(f"{name} must have shape [{B}, {n}, {H_k}, {D}], got {tuple(cache.shape)}")
    if cache.dtype != new.dtype or cache.device != new.device:
        raise ValueError(
            f"{name} must be {new.dtype} on {new.device}, got {cache.dtype} on {cache.device}"
        )
    return cache
