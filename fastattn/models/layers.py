"""Feed-forward layers, norms and the transformer block."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.fused_attention import attention
from ..modules.cross_attention import CrossGQAttention, ProjectedMemory
from ..modules.fused_weights import Fused, SeparateProjections
from ..modules.latent_attention import MultiheadLatentAttention
from ..modules.options import SelfOptions, SharedOptions, table
from ..modules.self_attention import GQAttention, LayerCache
from .fields import check_type
from .model_config import GATED, Activation, Norm, Order, TransformerConfig
from .positions import RelativeContent, RelativeScalar, RelativeTransformerXL

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from ..arguments import AdditiveAttentionArguments
    from ..rotary import RotaryTables

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "geglu": F.gelu,
    "swiglu": F.silu,
}


def uniform_attention(
    v: Tensor,
    *,
    queries: int | None = None,
    backend: str | None = None,
    **masks: Unpack[AdditiveAttentionArguments],
) -> Tensor:
    """Average the visible values: attention with equal scores.

        o_i = 1 / n_i sum_j v_j, over the n_i keys j that query i sees

    Computed as attention with zero queries. With causal=True row i is the mean of rows 0 to i.

    Args:
        v: [B, H, T_k, D_v], differentiable.
        queries: T_q; default T_k.
        backend: as for `fastattn.attention`.
        masks: causal, window, key_lengths and the other masks of `fastattn.attention`.

    Returns:
        [B, H, T_q, D_v]; 0 for a query without visible keys.

    Examples:
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
        >>> uniform_attention(v, causal=True).flatten()
        tensor([1., 2., 4.])
    """
    B, H, T_k, _ = v.shape
    q = v.new_zeros(B, H, T_k if queries is None else queries, 1)
    return attention(q, v.new_zeros(B, H, T_k, 1), v, backend=backend, **masks)


class MLP(SeparateProjections):
    """Feed-forward part of a layer.

        down_proj(act(up_proj(x)))            act: "relu", "gelu" or "gelu_tanh"
        down_proj(act(gate_proj(x)) * up_proj(x))
                                              act: the GELU of "geglu", the SiLU of "swiglu"

    Vaswani et al. 2017 (arXiv 1706.03762); GELU: Hendrycks & Gimpel 2016 (arXiv 1606.08415); with
    gates: Shazeer 2020 (arXiv 2002.05202).

    Args:
        embed_dim: width C of the input and of the output.
        hidden_dim: width between the layers; default 4 * embed_dim, with a gate 8 * embed_dim // 3,
            for an equal number of parameters.
        bias: give the linear layers a bias.
        dropout: probability of zeroing an output element while training.
        activation: one of the above.

    Parameters:
        gate_proj.weight, up_proj.weight: [hidden_dim, C]; gate_proj exists only with a gate. A
            state dict with both as rows of one up_proj is accepted too.
        down_proj.weight: [C, hidden_dim].
    """

    fused_projections: ClassVar[Fused] = {"up_proj": ("gate_proj", "up_proj")}

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        check_type("activation", activation, Activation)
        self.gated = activation in GATED
        if hidden_dim is None:
            hidden_dim = 8 * embed_dim // 3 if self.gated else 4 * embed_dim
        self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=bias) if self.gated else None
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.activation = activation
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., embed_dim] to the same shape."""
        act = _ACTIVATIONS[self.activation]
        h = self.up_proj(x)
        h = act(h) if self.gate_proj is None else act(self.gate_proj(x)) * h
        return self.dropout(self.down_proj(h))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def make_norm(kind: Norm, width: int, *, eps: float = 1e-5, bias: bool = False) -> nn.Module:
    """Make torch's LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019).

    Args:
        kind: "layernorm", (x - mean) / sqrt(variance + eps) * weight + bias; "rmsnorm",
            x / sqrt(mean(x^2) + eps) * weight.
        width: C.
        eps: of the formula.
        bias: give a layer norm a bias.
    """
    check_type("norm", kind, Norm)
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=bias)


class Block(nn.Module):
    """Transformer layer: self-attention, optional cross-attention, feed-forward.

        "pre"       x + f(norm(x)), for one part f after the other       (Xiong et al. 2020)
        "post"      norm(x + f(x))                                       (Vaswani et al. 2017)
        "parallel"  x + mlp(norm(x)) + attention(norm(x)), one norm      (GPT-J; PaLM)

    With project_residual, self-attention is added to a learned projection of x in place of x.

    Args:
        attention: the layer's self-attention. Each part applies its own output dropout.
        mlp: the layer's feed-forward part.
        embed_dim: width C of the residual stream.
        bias: give layer norms a bias.
        cross: the layer's cross-attention; None = none.
        order: one of the above.
        norm, norm_eps: as for `make_norm`.
        project_residual: see above.
    """

    def __init__(
        self,
        attention: GQAttention | MultiheadLatentAttention,
        mlp: MLP,
        embed_dim: int,
        *,
        bias: bool = False,
        cross: CrossGQAttention | None = None,
        order: Order = "pre",
        norm: Norm = "layernorm",
        norm_eps: float = 1e-5,
        project_residual: bool = False,
    ) -> None:
        super().__init__()

        def make() -> nn.Module:
            return make_norm(norm, embed_dim, eps=norm_eps, bias=bias)

        check_type("order", order, Order)
        parallel = order == "parallel"
        self.order = order
        self.attention_norm = make()
        self.attention = attention
        self.cross_norm = None if cross is None or parallel else make()
        self.cross = cross
        self.mlp_norm = None if parallel else make()
        self.mlp = mlp
        project = partial(nn.Linear, embed_dim, embed_dim, bias=bias)
        self.residual = project() if project_residual else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        key_lengths: Tensor | None = None,
        rotary_tables: RotaryTables | None = None,
        cache: LayerCache | None = None,
        memory: ProjectedMemory | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Map x [B, T, embed_dim] to the same shape.

        Args:
            key_lengths, rotary_tables, cache, documents: as for `GQAttention.forward`.
            memory: keys and values of cross-attention, from its `project_memory`.
        """
        attend = partial(
            self.attention,
            key_lengths=key_lengths,
            rotary_tables=rotary_tables,
            cache=cache,
            documents=documents,
        )
        look = None
        if self.cross is not None:
            assert memory is not None, "a layer with cross-attention needs memory"
            look = partial(self.cross, memory=memory)
        if self.order == "parallel":
            h = self.attention_norm(x)
            y = self.residual(x) + self.mlp(h) + attend(h)
            return y if look is None else y + look(h)
        x = self._add(x, self.attention_norm, attend, self.residual)
        if look is not None:
            x = self._add(x, self.cross_norm, look)
        return self._add(x, self.mlp_norm, self.mlp)

    def _add(
        self,
        x: Tensor,
        norm: nn.Module | None,
        part: Callable[[Tensor], Tensor],
        residual: nn.Module | None = None,
    ) -> Tensor:
        assert norm is not None, "only a parallel block has parts without a norm of their own"
        kept = x if residual is None else residual(x)
        return kept + part(norm(x)) if self.order == "pre" else norm(kept + part(x))


def make_relative(
    config: TransformerConfig,
) -> RelativeScalar | RelativeContent | RelativeTransformerXL | None:
    """Make a layer's relative position terms, if configured."""
    H, D, R = config.num_heads, config.head_dim, config.relative_distance
    options: dict[str, Any] = {
        "value_dim": (config.v_head_dim or D) if config.relative_values else None,
        "table": config.relative_table,
    }
    if config.positions == "scalar":
        return RelativeScalar(H, R, **options)
    if config.positions == "content":
        return RelativeContent(D, R, **options)
    if config.positions == "transformer_xl":
        return RelativeTransformerXL(H, D, R, **options)
    return None


def _layer_options(config: TransformerConfig, kind: type) -> dict[str, Any]:
    """Collect a layer's options from the configuration."""
    fields = {field.name for field in dataclasses.fields(config)}
    options = {name: getattr(config, name) for name in table(kind) if name in fields}
    return {**options, "qkv_bias": config.bias, "out_bias": config.bias}


def _latent_attention(config: TransformerConfig, causal: bool) -> MultiheadLatentAttention:
    """Make self-attention with a latent KV (MLA)."""
    assert config.kv_latent_dim is not None, "else its keys and values are of its heads"
    names = ("kv_latent_dim", "v_head_dim", "window", "softcap", "sinks", "rotary_base", "bias")
    shared = {name: getattr(config, name) for name in (*names, "dropout", "attention_dropout")}
    return MultiheadLatentAttention(
        config.embed_dim,
        config.num_heads,
        causal=causal,
        nope_dim=config.head_dim,
        rope_dim=config.rotary_dim,
        rotary=config.rotary_style,
        norm_eps=config.norm_eps,
        **shared,
    )


def make_block(
    config: TransformerConfig, layer: int, *, causal: bool = True, cross: bool = False
) -> Block:
    """Make layer number `layer`, from 0, of a model.

    Args:
        config: of the model.
        layer: its number, which selects window or stride if they alternate.
        causal: of the self-attention.
        cross: give the layer cross-attention.
    """
    window, stride = config.window, config.stride
    if config.sparse == "alternate":
        window, stride = (None, stride) if layer % 2 else (window, None)
    of_self = {
        **_layer_options(config, SelfOptions),
        "window": window,
        "stride": stride,
        "rotary": config.rotary_style if config.positions == "rotary" else None,
        "alibi": config.positions == "alibi",
        "relative": make_relative(config),
    }
    sizes = (config.embed_dim, config.num_heads, config.num_kv_heads)
    of_latents = config.kv_latent_dim is not None
    return Block(
        _latent_attention(config, causal)
        if of_latents
        else GQAttention(*sizes, causal=causal, **of_self),
        MLP(
            config.embed_dim,
            config.hidden_dim,
            bias=config.bias,
            dropout=config.dropout,
            activation=config.activation,
        ),
        config.embed_dim,
        bias=config.bias,
        cross=CrossGQAttention(*sizes, **_layer_options(config, SharedOptions)) if cross else None,
        order=config.block,
        norm=config.norm,
        norm_eps=config.norm_eps,
        project_residual=config.project_residual,
    )
