"""Multi-head latent attention: one latent per token gives keys and values of all heads."""

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..cache.latent import LatentCache, LatentQuantize
from ..functional.decode import decode_attention
from ..functional.fused_attention import attention
from ..options import Window
from ..rotary import (
    RotaryPositions,
    RotaryStyle,
    RotaryTables,
    apply_rotary,
    check_rotary_style,
)
from ..rotary_scaling import RotaryScaling
from . import checks as module_checks
from .layer import HeadNorm, shown
from .layer_cache import decodes
from .options import SharedOptions, passed_as
from .sharded import factory_options, plain_weight

_Tables = tuple[Tensor, Tensor] | None


class MultiheadLatentAttention(nn.Module):
    """Attention whose cache holds one latent and one rotary key per token for all heads.

        c_q = norm(q_a_proj(x));  q_nope, q_rope = q_b_proj(c_q), by heads
        c, k_rope = kv_a_proj_with_mqa(x);  c = norm(c);  q_rope, k_rope rotated
        k_nope, v = kv_b_proj(c), by heads
        out = o_proj(softmax(scale (q_nope.k_nope + q_rope.k_rope)) v)

    (DeepSeek-V2, 2024, arXiv 2405.04434.) Training and prompts compute both products; k_rope is not
    repeated for the heads. A few new tokens with a cache use the absorbed form: the latents are
    keys and values, with scores (q_nope W_k) . c and output (sum of weights c) W_v, for W_k and W_v
    rows of kv_b_proj. Both forms give the same results.

    Args:
        embed_dim: width of the tokens.
        num_heads: H.
        kv_latent_dim: C of the latent.
        q_latent_dim: width of the queries' latent; None: one projection, q_proj, without norm.
        nope_dim, rope_dim: P and R, columns of a head's query and key without and with rotation;
            rope_dim = 0: no rotation.
        v_head_dim: V, width of a head's values; default nope_dim.
        causal, window, softcap: as for `fastattn.attention`.
        sinks: learned attention sinks: per head, the score of a key of value 0.
        rotary: pairs of channels: "interleaved" neighbours, as in DeepSeek's models, or "half".
        rotary_base, rotary_scaling: as in `fastattn.rotary.rotary_tables`.
        mscale: YaRN's mscale_all_dim: the scale is multiplied by (0.1 mscale ln(factor) + 1)^2,
            with the factor of rotary_scaling, whose amplitude applies too.
        scale: factor on the scores, in place of (P + R) ** -0.5 and mscale.
        norm_eps: epsilon of the latents' RMSNorm.
        bias: whether the down- and output projections have a bias.
        dropout, attention_dropout: probabilities for outputs and weights, in training mode.
        backend: passed to `fastattn.attention`.
        device, dtype: of the parameters.

    Parameters, with DeepSeek's names: q_a_proj.weight [q_latent_dim, embed_dim],
        q_a_layernorm.weight, q_b_proj.weight [H (P + R), q_latent_dim], or q_proj.weight;
        kv_a_proj_with_mqa.weight [C + R, embed_dim], kv_a_layernorm.weight [C], kv_b_proj.weight
        [H (P + V), C], o_proj.weight [embed_dim, H V]; sinks [H].

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    Examples:
        >>> layer = MultiheadLatentAttention(64, 4, kv_latent_dim=32, nope_dim=16, rope_dim=8)
        >>> x = torch.randn(2, 10, 64)
        >>> y = layer(x)  # [2, 10, 64]
        >>> cache = layer.new_cache(batch_size=2, max_length=16)  # 40 numbers a token, not 160
        >>> with torch.no_grad():
        ...     steps = [layer(part, cache=cache) for part in x.split([9, 1], dim=1)]
        >>> torch.allclose(torch.cat(steps, dim=1), y, atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_latent_dim: int,
        q_latent_dim: int | None = None,
        nope_dim: int = 128,
        rope_dim: int = 64,
        v_head_dim: int | None = None,
        causal: bool = True,
        window: Window = None,
        softcap: float | None = None,
        sinks: bool = False,
        rotary: RotaryStyle = "interleaved",
        rotary_base: float = 10000.0,
        rotary_scaling: RotaryScaling | None = None,
        mscale: float = 0.0,
        scale: float | None = None,
        norm_eps: float = 1e-6,
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_latent_dim": kv_latent_dim}
        sizes |= {
            "nope_dim": nope_dim,
            "v_head_dim": nope_dim if v_head_dim is None else v_head_dim,
        }
        for name, size in sizes.items():
            setattr(self, name, checks.check_count(name, size, 1))
        self.rope_dim = checks.check_count("rope_dim", rope_dim, 0)
        check_rotary_style(rotary)
        checks.check_window(window)
        checks.check_backend(backend)
        module_checks.check_dropouts(dropout, attention_dropout)
        self.causal, self.window = checks.check_flag("causal", causal), window
        self.softcap = None if softcap is None else checks.check_positive("softcap", softcap)
        self.rotary, self.backend = rotary, backend
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.rotary_positions = None
        if self.rope_dim:
            self.rotary_positions = RotaryPositions(
                self.rope_dim, base=rotary_base, scaling=rotary_scaling
            )
        if scale is None:
            factor = getattr(rotary_scaling, "factor", 1.0)
            m = 0.1 * checks.check_number("mscale", mscale) * math.log(factor) + 1
            scale = (nope_dim + self.rope_dim) ** -0.5 * m * m
        self.scale = checks.check_positive("scale", scale)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        of_queries = num_heads * (nope_dim + self.rope_dim)
        if q_latent_dim is None:
            self.q_proj = nn.Linear(embed_dim, of_queries, bias=False, **factory)
        else:
            checks.check_count("q_latent_dim", q_latent_dim, 1)
            self.q_a_proj = nn.Linear(embed_dim, q_latent_dim, bias=bias, **factory)
            self.q_a_layernorm = HeadNorm(q_latent_dim, eps=norm_eps, **factory)
            self.q_b_proj = nn.Linear(q_latent_dim, of_queries, bias=False, **factory)
        width = kv_latent_dim + self.rope_dim
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, width, bias=bias, **factory)
        self.kv_a_layernorm = HeadNorm(kv_latent_dim, eps=norm_eps, **factory)
        of_heads = num_heads * (nope_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(kv_latent_dim, of_heads, bias=False, **factory)
        self.o_proj = nn.Linear(num_heads * self.v_head_dim, embed_dim, bias=bias, **factory)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None

    embed_dim: int
    num_heads: int
    kv_latent_dim: int
    nope_dim: int
    v_head_dim: int

    def forward(
        self,
        x: Tensor,
        *unnamed: NoReturn,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        rotary_tables: RotaryTables | None = None,
        cache: LatentCache | None = None,
        absorbed: bool | None = None,
        **others: NoReturn,
    ) -> Tensor:
        """Attend; with a cache, append x and attend to all its tokens.

        Args:
            x: [B, T, embed_dim], floating.
            key_padding_mask, key_lengths, documents, positions, rotary_tables: as in
                `fastattn.GQAttention.forward`; tables have rope_dim // 2 columns.
            cache: from `new_cache`. It holds no graph: use it under `torch.no_grad()`.
            absorbed: whether a call with a cache uses the absorbed form; default: if there are few
                query rows and no key_padding_mask.

        Returns:
            [B, T, embed_dim].

        Raises:
            TypeError, ValueError: an argument has the wrong dtype or shape, or the cache has other
                widths; the cache is unchanged.
            RuntimeError: a cache is used while grad mode is on and the latents require grad.
        """
        if unnamed or others:
            module_checks.refuse_others(self, unnamed, others)
        module_checks.check_vectors("x", x, self.embed_dim)
        shared = module_checks.checked_tables(x, positions, rotary_tables, self.rope_dim or None)
        dropout = self.attention_dropout if self.training else 0
        as_cache: Any = cache  # appends one tensor; a LayerCache takes two
        if cache is not None:
            self._check_cache(x, as_cache, key_padding_mask, key_lengths, documents, dropout > 0)
        q_nope, q_rope, kv = self._projected(x, self._tables(x, positions, shared, cache))
        if cache is None:
            o = self._expanded(
                q_nope, q_rope, kv, dropout=dropout, key_padding_mask=key_padding_mask,
                key_lengths=key_lengths, documents=documents,
            )  # fmt: skip
            return self._output(o)
        # Packed rows of pages attend themselves.
        own = hasattr(cache, "attend")
        few = own or (decodes(x.shape[1] * self.num_heads, as_cache) and not dropout)
        if absorbed is None:
            absorbed = few and key_padding_mask is None
        ragged = cache.uniform_length is None or key_lengths is not None
        offset = cache.lengths.clone() if ragged else None
        cache.append(kv, key_lengths)
        if absorbed:
            return self._output(self._absorbed(q_nope, q_rope, cache, key_lengths))
        held = cache.view().gather_slots()[0] if cache.quantize else cache.k
        o = self._expanded(
            q_nope, q_rope, held[:, :, : cache.length_bound], dropout=dropout,
            key_padding_mask=key_padding_mask, key_lengths=cache.lengths if ragged else None,
            query_offset=offset,
        )  # fmt: skip
        return self._output(o)

    def _projected(self, x: Tensor, tables: _Tables) -> tuple[Tensor, Tensor | None, Tensor]:
        """q_nope [B, H, T, P], q_rope [B, H, T, R] and [latent, rotary key] [B, 1, T, C + R]."""
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        kv = self.kv_a_proj_with_mqa(x)
        c = self.kv_a_layernorm(kv[..., : self.kv_latent_dim])
        if tables is None:
            return q, None, c[:, None]
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), -1)
        k_rope = kv[:, None, :, self.kv_latent_dim :]
        q_rope, k_rope = (apply_rotary(y, *tables, style=self.rotary) for y in (q_rope, k_rope))
        return q_nope, q_rope, torch.cat((c[:, None], k_rope), -1)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor | None, kv: Tensor, **options: Any
    ) -> Tensor:
        """o [B, H, T, V] from keys and values of all heads with a shared rotary key."""
        k_nope, v = self._heads(kv)
        second = {} if q_rope is None else {"query2": q_rope, "key2": kv[..., self.kv_latent_dim :]}
        every: Any = {**second, **self.attention_options(), **options}
        o: Tensor = attention(q_nope, k_nope, v, **every)
        return o

    def _heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """k_nope [B, H, T, P] and v [B, H, T, V] from the latents of `_projected`."""
        c = kv[:, 0, :, : self.kv_latent_dim]
        heads = self.kv_b_proj(c).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k_nope, v = heads.split((self.nope_dim, self.v_head_dim), -1)
        return k_nope, v

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor | None, cache: LatentCache, counts: Tensor | None
    ) -> Tensor:
        """o [B, H, T, V] from latents as keys and values of one head."""
        weight = plain_weight(self.kv_b_proj)
        if weight is None:
            same = torch.eye(self.kv_latent_dim, dtype=q_nope.dtype, device=q_nope.device)
            weight = self.kv_b_proj(same).mT
        rows = weight.view(self.num_heads, -1, weight.shape[1])
        of_keys, of_values = rows[:, : self.nope_dim], rows[:, self.nope_dim :]
        q = q_nope @ of_keys
        if q_rope is not None:
            q = torch.cat((q, q_rope), -1)
        attend: Any = getattr(cache, "attend", None)
        if attend is not None:
            o: Tensor = attend(q, **self.attention_options())
        else:
            o = decode_attention(q, cache, new_lengths=counts, **self.attention_options())
        return o @ of_values.mT

    def queries_keys(
        self, x: Tensor, rotary_tables: RotaryTables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute queries and keys [B, H, T, P + R] of x, as `forward` does without a cache."""
        tables = module_checks.checked_tables(x, None, rotary_tables, self.rope_dim or None)
        q, q_rope, kv = self._projected(x, self._tables(x, None, tables, None))
        k = self._heads(kv)[0]
        if q_rope is None:
            return q, k
        k_rope = kv[..., self.kv_latent_dim :].expand(*k.shape[:3], -1)
        return torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1)

    def attention_options(self) -> dict[str, Any]:
        """The layer's options of `fastattn.attention`, the same in every call."""
        window = self.window
        if isinstance(window, int):
            window = (window - 1, None if self.causal else window - 1)
        return {
            "causal": self.causal, "window": window, "softcap": self.softcap,
            "sinks": self.sinks, "scale": self.scale, "backend": self.backend,
        }  # fmt: skip

    def _output(self, o: Tensor) -> Tensor:
        out = self.o_proj(o.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)

    def _tables(
        self,
        x: Tensor,
        positions: Tensor | None,
        shared: RotaryPositions | _Tables,
        cache: LatentCache | None,
    ) -> _Tables:
        """(cos, sin) of x's tokens; None without rotation."""
        own = self.rotary_positions
        if own is None or isinstance(shared, tuple):
            return shared if isinstance(shared, tuple) else None
        if positions is not None:
            return own.of(positions)
        T = bound = x.shape[1]
        first: int | Tensor = 0
        if cache is not None:
            n = cache.uniform_length
            first, bound = cache.lengths if n is None else n, cache.length_bound + T
        return (shared or own).at(first, T, bound, x.device)

    def _check_cache(
        self, x: Tensor, cache: Any, padding: Tensor | None, lengths: Tensor | None,
        documents: Tensor | None, in_order: bool,
    ) -> None:  # fmt: skip
        if not isinstance(cache, LatentCache) and not hasattr(cache, "attend"):
            raise TypeError(f"cache must be a LatentCache, got {checks.type_name(cache)}")
        layer_cache, view = cache, cache.view()
        widths = view.head_dim, view.v.shape[-1]
        if widths != (self.kv_latent_dim + self.rope_dim, self.kv_latent_dim):
            raise ValueError(
                f"cache must hold latents of kv_latent_dim + rope_dim = {self.kv_latent_dim} + "
                f"{self.rope_dim} columns, got {widths[1]} + {widths[0] - widths[1]}"
            )
        module_checks.check_cache_use(x, padding, lengths, layer_cache, in_order)
        module_checks.check_groups_in_cache(x, None, documents, layer_cache)

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        quantize: LatentQuantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LatentCache:
        """An empty cache for this layer; quantize: as of `LatentCache`; device, dtype: default the
        parameters'.
        """
        widths = self.kv_latent_dim, self.rope_dim
        options = factory_options(device, dtype, self.o_proj, self)
        return LatentCache(batch_size, max_length, *widths, quantize=quantize, **options)

    def extra_repr(self) -> str:
        sizes = ("embed_dim", "num_heads", "kv_latent_dim", "nope_dim", "rope_dim", "v_head_dim")
        options = {
            "causal": "" if self.causal else "False",
            "window": self.window,
            **{name: getattr(self, name, None) for name in passed_as(SharedOptions, "score")},
            "backend": self.backend and repr(self.backend),
        }
        return shown({**{name: str(getattr(self, name)) for name in sizes}, **options})
