"""Self-attention as torch modules: parameters, positions and caches around `attention`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .. import checks
from ..functional.additive import additive_attention
from ..functional.decode import decode_attention
from ..functional.fused_attention import attention
from ..options import Window
from ..position_tables import alibi_slopes, t5_relative_bias
from ..rotary import RotaryPositions, RotaryTables
from . import checks as module_checks
from .checks import LayerCache as LayerCache
from .layer_cache import append_and_read, decodes, rotates
from .options import SelfOptions, complete, passed_as, shows_options
from .projection import SelfProjection
from .relative import RelativeScheme, relative_terms, relative_values
from .sharded import factory_options, local_part

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_MASK_OPTIONS = passed_as(SelfOptions, "mask")


class GQAttention(SelfProjection):
    """Self-attention with grouped-query heads, causal or bidirectional.

        q, k, v = q_proj(x), k_proj(x), v_proj(x);  q, k = rotary(qk_norm(q, k))
        out = dropout(out_proj(attention(q, k, v, causal=causal)))

    H_q = num_heads query heads share H_k = num_kv_heads key/value heads (Ainslie et al. 2023, arXiv
    2305.13245): H_k = H_q is multi-head, H_k = 1 multi-query attention. What token i sees of T = 5:

        causal              window=2           stride=2           stride=3, window=2  causal=False,
                                                                                      window=2
        1 0 0 0 0           1 0 0 0 0          1 0 0 0 0          1 0 0 0 0           1 1 0 0 0
        1 1 0 0 0           1 1 0 0 0          0 1 0 0 0          1 1 0 0 0           1 1 1 0 0
        1 1 1 0 0           0 1 1 0 0          1 0 1 0 0          0 1 1 0 0           0 1 1 1 0
        1 1 1 1 0           0 0 1 1 0          0 1 0 1 0          1 0 1 1 0           0 0 1 1 1
        1 1 1 1 1           0 0 0 1 1          1 0 1 0 1          0 1 0 1 1           0 0 0 1 1

    Args:
        embed_dim: width C of the tokens.
        num_heads: H_q.
        num_kv_heads: H_k, divides H_q; default H_q.
        causal: token i sees tokens j <= i; False: all.
        head_dim: D of a head; default embed_dim // num_heads.
        v_head_dim: D_v of a value head; default D.
        qkv_bias, out_bias: whether the projections have a bias.
        window: W = how many keys a token sees at most, itself included, where causal; else those at
            a distance below W on either side. Or a pair (left, right), as for `attention`. None =
            all.
        stride: keys at multiples of this distance are visible, and those of the window if given
            (Sparse Transformer, Child et al. 2019, arXiv 1904.10509).
        keep_first: with a window or stride, the number of first tokens of a row that stay visible,
            left padding included (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).
        rotary: pairing of channels for the rotary position embedding of q and k (see
            `fastattn.rotary.apply_rotary`); None = none.
        rotary_base, rotary_dim: as in `fastattn.rotary.rotary_tables`; rotary_dim defaults to D.
            Further channels are not rotated.
        qk_norm: normalise q and k over their D channels before the rotation, with a learned weight
            for each, as Qwen3 and Gemma 3 do (`F.rms_norm`, Zhang & Sennrich 2019, arXiv
            1910.07467; QK-norm: Dehghani et al. 2023, arXiv 2302.05442).
        output_gate: multiply the attention output by the sigmoid of a linear map of x, before
            out_proj: one factor for each "head", or for each "element" of each head's output, as in
            Qwen3-Next (Qiu et al. 2025, arXiv 2505.06708). Computed by torch.
        alibi: lower scores in proportion to the distance, by the slopes of `fastattn.alibi_slopes`
            (Press et al. 2022, arXiv 2108.12409).
        relative_bias: number of buckets of T5's learned bias by distance (Raffel et al. 2020, arXiv
            1910.10683; see `fastattn.t5_relative_bias`), at least 4, and even unless causal; None =
            none. T5 itself shares one table among all layers, and has scale = 1.
        relative_max_distance: this and larger distances share the last bucket; default 128.
        relative: a module of terms by relative position, such as those of
            `fastattn.models.positions`; see `fastattn.modules.relative`.
        scoring: "scaled_dot", q.k * scale; "dot", q.k; "multiplicative", k^T W q, where W q takes
            q's place before the rotation; or "additive", u^T tanh(q + k), with q_proj and k_proj as
            its matrices (`fastattn.functional.scoring`).
        softcap: bound of the scores, softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118).
        sinks: learned attention sinks: per head, the score of a key of value 0 (gpt-oss).
        batch_invariant: passed to `fastattn.attention`, which then gives a token the same bits in
            training, in prompts of any chunks and over caches; torch's projections may not.
        dropout: probability of zeroing an output element in training mode.
        attention_dropout: probability in [0, 1) of dropping an attention weight in training mode.
        scale: factor on q @ k, default D ** -0.5.
        backend: passed to `fastattn.attention`.
        device, dtype: of the parameters.

    Parameters (the projections initialised as `nn.Linear` does):
        q_proj.weight, k_proj.weight, v_proj.weight: [H_q D, C], [H_k D, C] and [H_k D_v, C], rows
            head by head. A state dict with one fused qkv_proj also loads.
        out_proj.weight: [C, H_q D_v].
        relative_bias: [buckets, H_q], from 0.
        output_gate_proj.weight, q_norm.weight, k_norm.weight, sinks, score_weight, score_vector:
            with the options that need them; see `fastattn.modules.layer.AttentionLayer`.

    Raises:
        ValueError: sizes do not divide, an argument is out of its range, or arguments exclude each
            other.

    Examples:
        >>> layer = GQAttention(64, num_heads=4, num_kv_heads=2, rotary="half")
        >>> x = torch.randn(2, 10, 64)
        >>> y = layer(x)  # [2, 10, 64]
        >>> cache = layer.new_cache(batch_size=2, max_length=16)
        >>> with torch.no_grad():  # the same, nine tokens at once and then one
        ...     steps = [layer(part, cache=cache) for part in x.split([9, 1], dim=1)]
        >>> torch.allclose(torch.cat(steps, dim=1), y, atol=1e-5)
        True
    """

    stride: int | None
    keep_first: int
    alibi_slopes: Tensor | None

    @shows_options(SelfOptions)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool = True,
        **options: "Unpack[SelfOptions]",
    ) -> None:
        chosen = complete(SelfOptions, options, type(self).__name__)
        super().__init__(embed_dim, num_heads, num_kv_heads, chosen)
        causal = checks.check_flag("causal", causal)
        window, stride = chosen["window"], chosen["stride"]
        sides = checks.check_window(window)
        windowed = sides != (None, None) or stride is not None
        chosen["keep_first"] = checks.check_keep_first(chosen["keep_first"], windowed)
        buckets, max_distance = chosen["relative_bias"], chosen["relative_max_distance"]
        module_checks.check_relative_bias(buckets, max_distance, causal)
        if chosen["relative"] is not None:
            module_checks.check_relative(chosen)
        self.causal = causal
        self.window: Window = sides if isinstance(window, tuple) else window
        for name in _MASK_OPTIONS:
            setattr(self, name, chosen[name])
        self.relative_max_distance: int = 128 if max_distance is None else max_distance
        self.relative: RelativeScheme | None = chosen["relative"]
        self.add_output_parameters(chosen)
        factory = {"device": chosen["device"], "dtype": chosen["dtype"]}
        table = None if buckets is None else torch.zeros(buckets, num_heads, **factory)
        self.relative_bias = None if table is None else nn.Parameter(table)
        alibi, device = chosen["alibi"], self.q_proj.weight.device
        slopes = alibi_slopes(num_heads, device=device) if alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        if alibi:
            self.register_load_state_dict_post_hook(place_slopes)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        *unnamed: NoReturn,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        prefix_lengths: int | Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        rotary_tables: RotaryTables | None = None,
        cache: LayerCache | None = None,
        **others: NoReturn,
    ) -> Tensor:
        """Attend; with a cache, append x and attend to all its tokens.

        Args:
            x: [B, T, C], floating.
            key_padding_mask: bool [B, T], True = a token to attend to, False = padding. With a
                cache: [B, n + T], for its n tokens and the T new ones; pass it in every step after
                a left-padded prompt.
            key_lengths: int32 or int64 [B]: row b's first key_lengths[b] tokens of x are real, the
                others padding on the right. Only real tokens enter a cache, so later steps need no
                mask and start after each row's last token.
            prefix_lengths: an int, or int32 or int64 [B]: earlier tokens also see row b's first
                prefix_lengths[b] tokens (prefix LM). With a cache, the first call must hold the
                whole prefix; later calls may omit it.
            documents: int32 or int64 ids [B, T]: a token sees only tokens with its id; a negative
                id is padding. Not with a cache: each of its rows is one document.
            positions: integers [T] or [B, T], positions of x's tokens for the rotary embedding.
                Default: 0..T-1, or with a cache those that follow each row's length. Only distances
                matter, so left padding needs no positions.
            rotary_tables: in place of `positions`, made once for all layers: (cos, sin) of
                `fastattn.rotary.rotary_tables`; cos + i sin, as Llama's freqs_cis; or a
                `fastattn.rotary.RotaryPositions` with default positions, which a cache may apply to
                new keys.
            cache: from this layer's `new_cache`, or any other `LayerCache`. It holds no graph: use
                it under `torch.no_grad()` or `torch.inference_mode()`. Tokens see all cached
                tokens; without causal, also all of x.
        Returns:
            [B, T, C]. Rows at padding are unspecified, but finite for finite x. Padding, NaN
            included, affects no other token's output. NaN anywhere in x affects the parameters'
            gradients, as in every linear layer.
        Raises:
            TypeError: x, a mask, lengths or positions are of the wrong dtype, or no tensors.
            ValueError: a shape disagrees, arguments exclude each other, or x does not fit the
                cache, which is then unchanged.
            RuntimeError: a cache is used while grad mode is on and q, k, v require grad.
        """
        if unnamed or others:
            module_checks.refuse_others(self, unnamed, others)
        module_checks.check_vectors("x", x, self.embed_dim)
        rotary_tables = module_checks.checked_tables(
            x, positions, rotary_tables, None if self.rotary is None else self.rotary_dim
        )
        scheme = self.relative
        if scheme is not None and scheme.has_values:
            module_checks.check_whole_rows(prefix_lengths, documents)
        drop = self.dropout_options()
        # Options that `decode_attention` lacks.
        in_order = key_padding_mask is not None or prefix_lengths is not None or bool(drop)
        in_order = in_order or self.scoring == "additive"
        in_order = in_order or (scheme is not None and (scheme.has_keys or scheme.has_values))
        if cache is not None:
            module_checks.check_cache_use(x, key_padding_mask, key_lengths, cache, in_order)
            module_checks.check_groups_in_cache(x, prefix_lengths, documents, cache)

        tables = self.rotation(x, positions, rotary_tables)
        rows = x.shape[1] * self.num_heads // self.num_kv_heads
        if cache is not None and not in_order and decodes(rows, cache):
            return self._decode(x, tables, cache, key_lengths)
        q, k, v = self.queries_keys_values(x, tables, cache)
        terms = relative_terms(self.relative, q, self.v_head_dim)
        scores = self.score_options(terms.bias)
        query_offset = None
        if cache is not None:
            k, v, key_lengths, query_offset = append_and_read(cache, k, v, key_lengths)
        of_call = {
            "key_padding_mask": key_padding_mask,
            "key_lengths": key_lengths,
            "prefix_lengths": prefix_lengths,
            "documents": documents,
            "query_offset": query_offset,
        }
        masks = self.mask_options() | {name: x for name, x in of_call.items() if x is not None}
        if self.scoring == "additive":
            u = local_part(self.score_vector)
            out = additive_attention(q, k, v, u, backend=self.backend, **masks)
            return self.project_output(out, x)
        if terms.keys is not None:
            scores |= {"relative_keys": terms.keys, "relative_query": terms.key_query}
        if terms.values is None:
            out = attention(terms.query, k, v, backend=self.backend, **drop, **masks, **scores)
            return self.project_output(out, x)
        out, lse = attention(
            terms.query, k, v, return_lse=True, backend=self.backend, **masks, **scores
        )
        out = out + relative_values(
            k,
            lse,
            terms,
            scale=self.score_scale,
            causal=self.causal,
            query_offset=query_offset,
            key_lengths=key_lengths,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )
        return self.project_output(out, x)

    def _decode(
        self,
        x: Tensor,
        tables: RotaryPositions | tuple[Tensor, Tensor] | None,
        cache: LayerCache,
        key_lengths: Tensor | None,
    ) -> Tensor:
        """Attend with the decode kernels; rotate and append in one kernel if possible."""
        if isinstance(tables, RotaryPositions) and rotates(cache):
            q, k, v = self.project(x)
            whole = tables.up_to(cache.length_bound + x.shape[1], x.device)
            append: Any = cache.append
            q = append(k, v, key_lengths, q=q, rotary=whole, rotary_style=self.rotary)
        else:
            q, k, v = self.queries_keys_values(x, tables, cache)
            cache.append(k, v, key_lengths)
        terms = relative_terms(self.relative, q, self.v_head_dim)
        options = self.mask_options() | self.score_options(terms.bias)
        attend: Any = getattr(cache, "attend", None)
        if attend is None:
            attend = partial(decode_attention, cache=cache, new_lengths=key_lengths)
        out = attend(terms.query, backend=self.backend, **options)
        return self.project_output(out, x)

    def repr_values(self) -> dict[str, Any]:
        table = self.relative_bias
        rotary = self.rotary is not None
        return {
            "causal": "" if self.causal else "False",
            "rotary": repr(self.rotary) if rotary else None,
            "rotary_base": f"{self.rotary_base:g}" if rotary else None,
            "rotary_dim": self.rotary_dim if rotary else None,
            "window": self.window,
            **{name: getattr(self, name) for name in _MASK_OPTIONS},
            "qk_norm": self.qk_norm,
            "alibi": self.alibi_slopes is not None,
            "relative_bias": None if table is None else table.shape[0],
            "relative_max_distance": None if table is None else self.relative_max_distance,
        }

    def mask_options(self) -> dict[str, Any]:
        """Mask options of `attention` in every call of this layer, without its defaults."""
        options = {name: value for name in _MASK_OPTIONS if (value := getattr(self, name))}
        options["causal"], window = self.causal, self.window
        if isinstance(window, int):
            # If causal, the right side is open: causal and prefix_lengths bound it.
            window = (window - 1, None if self.causal else window - 1)
        return options if window is None else {**options, "window": window}

    def score_options(self, bias: Tensor | None = None) -> dict[str, Any]:
        """Score options of `attention`; bias: from the relative scheme."""
        options = super().score_options()
        if self.relative_bias is not None:
            table, reach = local_part(self.relative_bias), self.relative_max_distance
            both = not self.causal
            bias = t5_relative_bias(table, reach, bidirectional=both, max_distance=reach)
        if bias is not None:
            options["relative_bias"] = bias
        if self.alibi_slopes is not None:
            options["alibi_slopes"] = self.alibi_slopes
        return options

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Self":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        place_slopes(self)
        return self


class CausalGQAttention(GQAttention):
    """`GQAttention` in which a token sees itself and earlier tokens.

    Args:
        embed_dim, num_heads, num_kv_heads, options: as for `GQAttention`, without causal.

    Parameters, forward, caches and errors: as for `GQAttention`.
    """

    @shows_options(SelfOptions)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        **options: "Unpack[SelfOptions]",
    ) -> None:
        if "causal" in options:
            raise TypeError("CausalGQAttention is causal: use GQAttention(..., causal=False)")
        super().__init__(embed_dim, num_heads, num_kv_heads, causal=True, **options)


def place_slopes(layer: GQAttention, _keys: object = None) -> None:
    """Recompute ALiBi's slopes in fp32 on the device of the parameters."""
    # A cast would round them, and a move from the meta device would lose them.
    if layer.alibi_slopes is not None:
        device = factory_options(None, None, layer)["device"]
        slopes = alibi_slopes(layer.total_heads, device=device)
        layer.alibi_slopes = slopes.narrow(0, layer.first_head, layer.num_heads)
