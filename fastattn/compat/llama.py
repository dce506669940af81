"""Self-attention with Llama's interface: `freqs_cis`, and caches as arguments and results."""

import torch
from torch import Tensor, nn

from ..cache.views import view_of_tensors
from ..cache_view import CacheView
from ..checks import check_tensor
from ..modules.self_attention import GQAttention
from ..rotary import RotaryTables


class LlamaAttention(nn.Module):
    """A `GQAttention` called as `(x, freqs_cis, use_kv_cache, cache_k, cache_v, padding_mask)`.

    It is stateless: pass the returned caches to the next call. Each call copies the caches;
    `fastattn.KVCache` is written in place instead.

    Args:
        attention: the layer, with its weights and options. Its rotary style applies to freqs_cis;
            Meta's weights are for "interleaved".

    Raises:
        TypeError: attention is not a `GQAttention`.
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
                tokens: `freqs_cis[n : n + T]` of a whole table; or any rotary_tables of
                `GQAttention`; None: the layer's own, from position n on.
            use_kv_cache: return caches that include x's tokens. False: return the caches unchanged.
            cache_k, cache_v: [B, n, H_k, D] and [B, n, H_k, D_v], rotated keys and values of
                earlier tokens, from an earlier call, or None. Differentiable.
            padding_mask: [B, n + T], of the tokens in the caches too: bool, True = a token to
                attend to, or floating, 0 for a token and -inf for padding.

        Returns:
            (out [B, T, C], cache_k, cache_v), caches of n + T tokens, or unchanged without
            use_kv_cache.

        Raises:
            TypeError: a cache or padding_mask is no tensor, or padding_mask is neither bool nor
                floating.
            ValueError: only one cache is passed, or a cache differs in shape, dtype or device from
                the new keys; padding_mask has other values or another shape.
            Exception: as `GQAttention`.
        """
        mask = None if padding_mask is None else _kept(padding_mask)
        if not use_kv_cache and cache_k is None and cache_v is None:
            out = self.attention(x, rotary_tables=freqs_cis, key_padding_mask=mask)
            return out, None, None
        if (cache_k is None) != (cache_v is None):
            there = "cache_v" if cache_k is None else "cache_k"
            raise ValueError(f"cache_k and cache_v must be passed together, got {there} alone")
        for name, old in (("cache_k", cache_k), ("cache_v", cache_v)):
            if old is not None:
                check_tensor(name, old)
        cache = _GivenCache(cache_k, cache_v, x.shape[0], x.device)
        out = self.attention(x, rotary_tables=freqs_cis, cache=cache, key_padding_mask=mask)
        if not use_kv_cache:
            return out, cache_k, cache_v
        return out, cache.k.transpose(1, 2), cache.v.transpose(1, 2)


def _kept(padding_mask: Tensor) -> Tensor:
    """The mask as bool, True = attend. Values are checked on the CPU only."""
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
    """`LayerCache` of the caller's tensors: appending makes longer ones."""

    k: Tensor
    v: Tensor

    def __init__(
        self, cache_k: Tensor | None, cache_v: Tensor | None, B: int, device: torch.device
    ) -> None:
        self._given = (cache_k, cache_v)
        self._batch, self._device = B, device
        self.length_bound = 0 if cache_k is None or cache_k.dim() != 4 else cache_k.shape[1]
        # Unbounded.
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
            None if cache is None else _checked_cache(name, cache, new, self.length_bound)
            for name, cache, new in zip(("cache_k", "cache_v"), self._given, (k, v), strict=True)
        ]
        # Contiguous in this order, for the decode kernels.
        self.k, self.v = (
            new.contiguous() if old is None else torch.cat((old.transpose(1, 2), new), 2)
            for old, new in zip(before, (k, v), strict=True)
        )
        self.length_bound += k.shape[2]

    def view(self) -> CacheView:
        return view_of_tensors(self.k, self.v, self.lengths, length_bound=self.length_bound)


def _checked_cache(name: str, cache: Tensor, new: Tensor, n: int) -> Tensor:
    """Check that a cache is [B, n, H_k, D] and matches the new keys [B, H_k, T, D]."""
    B, H_k, _, D = new.shape
    if tuple(cache.shape) != (B, n, H_k, D):
        raise ValueError(f"{name} must have shape [{B}, {n}, {H_k}, {D}], got {tuple(cache.shape)}")
    if cache.dtype != new.dtype or cache.device != new.device:
        raise ValueError(
            f"{name} must be {new.dtype} on {new.device}, got {cache.dtype} on {cache.device}"
        )
    return cache
