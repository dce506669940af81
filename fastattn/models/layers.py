"""Layers that the reference models share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..modules import CausalGQAttention, LayerCache

Activation = Literal["gelu", "gelu_tanh"]


class MLP(nn.Module):
    """Two linear layers around a GELU, applied to each position on its own.

    Args:
        embed_dim: width C of the input and of the output.
        hidden_dim: width between the two layers; default 4 * embed_dim.
        bias: give both linear layers a bias.
        dropout: probability of zeroing an output element while training.
        activation: "gelu", or "gelu_tanh", its approximation by a hyperbolic tangent.
    """

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
        hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.activation = nn.GELU("tanh" if activation == "gelu_tanh" else "none")
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., embed_dim] to a tensor of the same shape."""
        return self.dropout(self.down_proj(self.activation(self.up_proj(x))))


class Block(nn.Module):
    """One pre-LN transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: the layer's self-attention, which applies its own output dropout.
        mlp: the layer's feed-forward part, which applies its own output dropout.
        embed_dim: width C of the residual stream.
        bias: give the layer norms a bias.
    """

    def __init__(
        self, attention: CausalGQAttention, mlp: MLP, embed_dim: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim, bias=bias)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(embed_dim, bias=bias)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        *,
        key_lengths: Tensor | None = None,
        rotary_tables: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Maps x [B, T, embed_dim] to the same shape; keywords as `CausalGQAttention.forward`."""
        x = x + self.attention(
            self.attention_norm(x),
            key_lengths=key_lengths,
            rotary_tables=rotary_tables,
            cache=cache,
        )
        return x + self.mlp(self.mlp_norm(x))
