"""Attention as torch modules: parameters, head layout, positions and caches around `attention`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks, module_checks
from .cache import KVCache
from .decode import decode_attention
from .functional import attention
from .layer_cache import append_and_read, decodes
from .module_checks import LayerCache as LayerCache
from .positions import alibi_slopes, t5_relative_bias
from .rotary import RotaryStyle, apply_rotary, rotary_tables

if TYPE_CHECKING:
    from typing_extensions import Self

    from .decode import DecodeArguments


class HeadNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the channels of a head, in the dtype of its input.

    Inside an autocast region that is another dtype than the weight's, which torch's own norm
    answers with a warning and its slow path.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., D] to the same shape and dtype."""
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


class CausalGQAttention(nn.Module):
    """Causal self-attention with grouped-query heads, from tokens to tokens.

        q, k, v = split(qkv_proj(x));  q, k = rotary(qk_norm(q, k))
        out = dropout(out_proj(attention(q, k, v, causal=True)))

    One fused projection makes q, k and v. H_q = num_heads query heads share H_k = num_kv_heads
    key/value heads (Ainslie et al. 2023, arXiv 2305.13245): H_k = H_q is multi-head, H_k = 1
    multi-query attention. Token i sees tokens j <= i, and with window = W only the last W of them,
    itself included; for T = 4, without and with window = 2:

        1 0 0 0      1 0 0 0
        1 1 0 0      1 1 0 0
        1 1 1 0      0 1 1 0
        1 1 1 1      0 0 1 1

    Args:
        embed_dim: width C of the tokens.
        num_heads: H_q.
        num_kv_heads: H_k, divides H_q; default H_q.
        head_dim: D of a head; default embed_dim // num_heads.
        qkv_bias, out_bias: whether the projections have a bias.
        window: how many keys a token sees at most, itself included; None = all.
        keep_first: with a window, how many first tokens of a row stay visible besides it; padding
            on the left counts (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).
        rotary: rotary position embedding of q and k, by which pairing of channels (see
            `fastattn.rotary.apply_rotary`); None = none.
        rotary_base, rotary_dim: as in `fastattn.rotary.rotary_tables`; rotary_dim defaults to D,
            a smaller one leaves the other channels as they are.
        qk_norm: normalise q and k over their D channels before the rotation, with a learned weight
            for each, as Qwen3 and Gemma 3 do (`F.rms_norm`, Zhang & Sennrich 2019, arXiv
            1910.07467; QK-norm: Dehghani et al. 2023, arXiv 2302.05442).
        alibi: lower scores in proportion to the distance, by the slopes of `fastattn.alibi_slopes`
            (Press et al. 2022, arXiv 2108.12409).
        relative_bias: number of buckets of T5's learned bias by distance (Raffel et al. 2020, arXiv
            1910.10683; see `fastattn.t5_relative_bias`), at least 4; None = none. T5 itself shares
            one table among all layers, and has scale = 1.
        relative_max_distance: distances from here on share the last bucket; default 128.
        softcap: bound of the scores, softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118).
        sinks: learn for each head the score of one more key, whose value is 0 (gpt-oss).
        dropout: probability of zeroing an output element in training mode.
        attention_dropout: probability in [0, 1) of dropping an attention weight in training mode.
        scale: factor on q @ k, default D ** -0.5.
        backend: passed to `fastattn.attention`.
        device, dtype: of the parameters.

    Parameters (the projections initialised as `nn.Linear` does):
        qkv_proj.weight: [(H_q + 2 H_k) D, C], the rows of q, then k, then v, head by head.
        out_proj.weight: [C, H_q D].
        q_norm.weight, k_norm.weight: [D], from 1; with qk_norm.
        sinks: [H_q], from 0.
        relative_bias: [buckets, H_q], from 0.

    Raises:
        ValueError: sizes do not divide, or an argument is out of its range.

    Example:
        >>> layer = CausalGQAttention(64, num_heads=4, num_kv_heads=2, rotary="half")
        >>> x = torch.randn(2, 10, 64)
        >>> y = layer(x)  # [2, 10, 64]
        >>> cache = layer.new_cache(batch_size=2, max_length=16)
        >>> with torch.no_grad():  # the same, nine tokens at once and then one
        ...     steps = [layer(part, cache=cache) for part in x.split([9, 1], dim=1)]
        >>> torch.allclose(torch.cat(steps, dim=1), y, atol=1e-5)
        True
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        keep_first: int = 0,
        rotary: RotaryStyle | None = None,
        rotary_base: float = 10000.0,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        alibi: bool = False,
        relative_bias: int | None = None,
        relative_max_distance: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = module_checks.head_size(embed_dim, num_heads, num_kv_heads, head_dim)
        module_checks.check_rotary(head_dim, rotary, rotary_base, rotary_dim)
        checks.check_band(True, window)
        checks.check_keep_first(keep_first, window is not None)
        module_checks.check_relative_bias(relative_bias, relative_max_distance)
        if softcap is not None:
            checks.check_positive("softcap", softcap)
        module_checks.check_dropouts(dropout, attention_dropout)
        checks.check_scale(scale, head_dim)
        checks.check_backend(backend)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.keep_first = keep_first
        self.rotary = rotary
        self.rotary_base = rotary_base
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.qk_norm = qk_norm
        self.relative_max_distance = 128 if relative_max_distance is None else relative_max_distance
        self.softcap = softcap
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.scale = scale
        self.backend = backend
        self.qkv_proj = nn.Linear(
            embed_dim,
            (num_heads + 2 * num_kv_heads) * head_dim,
            bias=qkv_bias,
            device=device,
            dtype=dtype,
        )
        self.out_proj = nn.Linear(
            num_heads * head_dim, embed_dim, bias=out_bias, device=device, dtype=dtype
        )
        self._add_score_parameters(alibi, relative_bias, sinks, device, dtype)

    def _add_score_parameters(
        self,
        alibi: bool,
        relative_bias: int | None,
        sinks: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))

        H_q, D = self.num_heads, self.head_dim
        if self.qk_norm:
            self.q_norm, self.k_norm = (
                HeadNorm(D, eps=1e-6, device=device, dtype=dtype) for _ in range(2)
            )
        self.sinks = zeros(H_q) if sinks else None
        self.relative_bias = None if relative_bias is None else zeros(relative_bias, H_q)
        slopes = alibi_slopes(H_q, device=self.qkv_proj.weight.device) if alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        if alibi:
            self.register_load_state_dict_post_hook(_place_slopes)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        prefix_lengths: int | Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        rotary_tables: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend; with a cache, append x to it and attend to all that it holds.

        Args:
            x: [B, T, C], floating.
            key_padding_mask: bool [B, T], True = a token to attend to, False = padding. With a
                cache: [B, n + T] over the n tokens it holds and the T new ones; this is how prompts
                padded on the left are served, and every step must pass it.
            key_lengths: int32 or int64 [B]: row b's first key_lengths[b] tokens of x are real, the
                others padding on the right. With a cache, only the real ones enter it, so later
                steps need no mask and start right after each row's own last token.
            prefix_lengths: an int, or int32 or int64 [B]: row b's first prefix_lengths[b] tokens
                are seen from all before them too (prefix LM). With a cache the call that appends
                the first token must hold the whole prefix; later calls may leave it out.
            documents: int32 or int64 ids [B, T]: a token sees those of its own id alone; a negative
                id is padding. Not with a cache, whose rows are one document each.
            positions: integers [T] or [B, T], positions of x's tokens for the rotary embedding.
                Default: 0..T-1, or with a cache those that follow each row's length. Only
                distances matter to it, so left padding needs no positions of its own.
            rotary_tables: (cos, sin) as `fastattn.rotary.rotary_tables` makes them for x's
                positions, in place of `positions`: make them once for all layers.
            cache: one for this layer, from `new_cache`, or anything else that a `LayerCache` is. It
                holds no graph: use it under `torch.no_grad()` or `torch.inference_mode()`.
        Returns:
            [B, T, C]. Rows at padding are unspecified, though finite for finite x. A padded token,
            NaN included, reaches no other token's output; but NaN reaches the parameters' gradients
            from anywhere in x, as in every linear layer.
        Raises:
            TypeError: a mask, lengths or positions are of the wrong dtype.
            ValueError: a shape disagrees, arguments exclude each other, or x does not fit the
                cache, which is then left as it was.
            RuntimeError: a cache is used while grad mode is on and q, k, v require grad.
        """
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must have shape [B, T, {self.embed_dim}], got {tuple(x.shape)}")
        module_checks.check_positions(
            x, positions, rotary_tables, None if self.rotary is None else self.rotary_dim
        )
        # An int where there is none: torch.compile would make a float dynamic.
        dropout = self.attention_dropout if self.training else 0
        masked = key_padding_mask is not None or prefix_lengths is not None or dropout > 0
        if cache is not None:
            module_checks.check_cache_use(x, key_padding_mask, key_lengths, cache, masked)
            module_checks.check_groups_in_cache(x, prefix_lengths, documents, cache)
        B, T, _ = x.shape
        H_q, H_k = self.num_heads, self.num_kv_heads

        qkv = self.qkv_proj(x).view(B, T, H_q + 2 * H_k, self.head_dim).transpose(1, 2)
        qk, v = qkv.split((H_q + H_k, H_k), dim=1)
        if self.qk_norm:
            q, k = qk.split((H_q, H_k), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if self.rotary is not None:
            cos, sin = rotary_tables or self._default_tables(x, positions, cache)
            qk = apply_rotary(qk, cos, sin, style=self.rotary)
        q, k = qk.split((H_q, H_k), dim=1)  # [B, H_q, T, D], [B, H_k, T, D]

        scoring = self._scoring()
        query_offset = None
        if cache is not None:
            if not masked and decodes(T * H_q // H_k, cache):
                cache.append(k, v, key_lengths)
                out = decode_attention(
                    q, cache, new_lengths=key_lengths, backend=self.backend, **scoring
                )
                return self._project(out)
            k, v, key_lengths, query_offset = append_and_read(cache, k, v, key_lengths)
        out = attention(
            q,
            k,
            v,
            key_padding_mask=key_padding_mask,
            key_lengths=key_lengths,
            prefix_lengths=prefix_lengths,
            documents=documents,
            query_offset=query_offset,
            dropout=dropout,
            backend=self.backend,
            **scoring,
        )
        return self._project(out)

    def _project(self, out: Tensor) -> Tensor:
        """[B, H_q, T, D] to [B, T, C]."""
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer.

        Args:
            batch_size: B.
            max_length: how many tokens a row can hold.
            device: default: that of the parameters.
            dtype: of keys and values as attention gets them. Default: autocast's dtype where
                autocast is on, else that of the parameters.
        """
        weight = self.qkv_proj.weight
        device = weight.device if device is None else torch.device(device)
        if dtype is None:
            # Asking about autocast raises on devices that have none, such as meta.
            available = torch.amp.is_autocast_available(device.type)
            autocast = available and torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        return KVCache(
            batch_size, self.num_kv_heads, max_length, self.head_dim, device=device, dtype=dtype
        )

    def extra_repr(self) -> str:
        parts = [
            f"embed_dim={self.embed_dim}",
            f"num_heads={self.num_heads}",
            f"num_kv_heads={self.num_kv_heads}",
            f"head_dim={self.head_dim}",
        ]
        if self.rotary is not None:
            parts += [
                f"rotary={self.rotary!r}",
                f"rotary_base={self.rotary_base:g}",
                f"rotary_dim={self.rotary_dim}",
            ]
        for name, value in self._repr_values().items():
            if value:
                parts.append(f"{name}={value}")
        if self.backend is not None:
            parts.append(f"backend={self.backend!r}")
        return ", ".join(parts)

    def _repr_values(self) -> dict[str, Any]:
        """Constructor arguments that are shown where they are not None, 0 or False."""
        table = self.relative_bias
        return {
            "window": self.window,
            "keep_first": self.keep_first,
            "qk_norm": self.qk_norm,
            "alibi": self.alibi_slopes is not None,
            "relative_bias": None if table is None else table.shape[0],
            "relative_max_distance": None if table is None else self.relative_max_distance,
            "softcap": self.softcap,
            "sinks": self.sinks is not None,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "scale": self.scale,
        }

    def _scoring(self) -> "DecodeArguments":
        """What `attention` is told in every call of this layer, with a cache or without."""
        bias, table, reach = None, self.relative_bias, self.relative_max_distance
        if table is not None:
            bias = t5_relative_bias(table, reach, bidirectional=False, max_distance=reach)
        return {
            "causal": True,
            # Open ahead, where causal and prefix_lengths say what is seen.
            "window": None if self.window is None else (self.window - 1, None),
            "keep_first": self.keep_first,
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "relative_bias": bias,
            "sinks": self.sinks,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Self":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _place_slopes(self)
        return self

    def _default_tables(
        self, x: Tensor, positions: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions given, or of those that follow what the cache holds."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
            if cache is not None:
                n = cache.uniform_length
                positions = positions + (cache.lengths.unsqueeze(1) if n is None else n)
        return rotary_tables(positions, self.rotary_dim, base=self.rotary_base, device=x.device)


def _place_slopes(layer: CausalGQAttention, _keys: object = None) -> None:
    """Make ALiBi's slopes anew beside the parameters, which have moved or are another dtype.

    The slopes stay fp32: rounded they would be others. From the meta device they come as nothing.
    """
    if layer.alibi_slopes is not None:
        layer.alibi_slopes = alibi_slopes(layer.num_heads, device=layer.qkv_proj.weight.device)
