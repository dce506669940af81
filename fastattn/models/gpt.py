"""A decoder-only language model of nanoGPT's size and shape, on `CausalGQAttention`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..cache import KVCache
from ..modules import CausalGQAttention, LayerCache
from ..paged_cache import PagedKVCache
from ..quantization import Quantize
from ..rotary import RotaryStyle, rotary_tables
from .layers import MLP, Activation, Block

# GPT-2's initialisation: every weight matrix is normal with this standard deviation.
_INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`.

    Args:
        vocab_size: number of distinct tokens V.
        context_length: longest sequence the model reads, in tokens.
        num_layers: number of transformer layers.
        num_heads: query heads a layer.
        num_kv_heads: key/value heads a layer, a divisor of num_heads; None = num_heads.
        embed_dim: width C of the residual stream, a multiple of num_heads.
        positions: "learned" adds a trained vector a position to the token embedding; "rotary"
            rotates queries and keys instead; "alibi" lowers scores in proportion to the distance.
        rotary_style: pairs of features that are rotated together, "half" or "interleaved".
        rotary_base: the rotation's longest wavelength is about 2 * pi * rotary_base positions.
        window: keys a query sees, itself included; None = all up to itself.
        keep_first: first keys that stay visible outside the window, which it needs.
        softcap: bound of the attention scores; None = none.
        sinks: give every head a learned share of attention that goes to no key.
        qk_norm: normalise queries and keys, with learned weights.
        dropout: probability of zeroing an element of the embedding and of each layer's outputs
            while training.
        attention_dropout: probability of dropping an attention weight while training.
        bias: give linear layers and layer norms a bias.
        activation: of the layers between attention: "gelu", or "gelu_tanh", its approximation by a
            hyperbolic tangent, which GPT-2 has.
        hidden_dim: width between the two linear layers behind attention; None = 4 * embed_dim.
        tie_weights: use the token embedding as the output layer's weight too.

    Raises:
        ValueError: a field is out of range, or fields disagree.
    """

    vocab_size: int
    context_length: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    embed_dim: int = 128
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    rotary_style: RotaryStyle = "half"
    rotary_base: float = 10000.0
    window: int | None = None
    keep_first: int = 0
    softcap: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    bias: bool = False
    activation: Activation = "gelu"
    hidden_dim: int | None = None
    tie_weights: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "num_layers", "num_heads", "embed_dim"):
            _check_positive_int(name, getattr(self, name))
        for name in ("num_kv_heads", "window", "hidden_dim"):
            if getattr(self, name) is not None:
                _check_positive_int(name, getattr(self, name))
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}"
            )
        if self.positions not in ("learned", "rotary", "alibi"):
            raise ValueError(
                f"positions must be 'learned', 'rotary' or 'alibi', got {self.positions!r}"
            )
        if self.rotary_style not in ("half", "interleaved"):
            raise ValueError(
                f"rotary_style must be 'half' or 'interleaved', got {self.rotary_style!r}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                "embed_dim / num_heads must be even for positions='rotary', "
                f"got {self.embed_dim} / {self.num_heads} = {self.head_dim}"
            )
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation must be 'gelu' or 'gelu_tanh', got {self.activation!r}")
        if not self.rotary_base > 0:
            raise ValueError(f"rotary_base must be positive, got {self.rotary_base}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        checks.check_keep_first(self.keep_first, self.window is not None)
        if self.softcap is not None:
            checks.check_positive("softcap", self.softcap)

    @property
    def head_dim(self) -> int:
        """Features a head, D."""
        return self.embed_dim // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of JSON values; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> GPTConfig:
        """Builds a config from `to_dict`'s result.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"GPTConfig has no field {unknown[0]!r}, only {sorted(known)}")
        if "vocab_size" not in fields:
            raise ValueError("GPTConfig needs the field 'vocab_size'")
        return cls(**fields)


class GPT(nn.Module):
    """Decoder-only transformer: pre-LN layers, GELU, MHA or GQA, positions as `GPTConfig` says.

    Weights start as GPT-2's do: normal with standard deviation 0.02, biases 0, and the layers
    that write to the residual stream scaled by 1 / sqrt(2 * num_layers), so that the stream's
    variance does not grow with depth.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        C = config.embed_dim
        learned = config.positions == "learned"
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(C, bias=config.bias)
        self.head = None if config.tie_weights else nn.Linear(C, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                writes_residual = name.endswith(("out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else _INIT_STD)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: Sequence[LayerCache] | None = None,
        key_lengths: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores every possible next token after each position.

        Args:
            tokens: [B, T] integers in [0, vocab_size), T <= context_length.
            targets: [B, T] int64, the token that follows each position; -100 leaves a position
                out of the loss.
            cache: from `new_cache`, or another `LayerCache` a layer; tokens continue the sequences
                it holds, and are added to it.
            key_lengths: [B] int32 or int64, how many of a row's T tokens are real; the rest is
                padding at the end of the row, seen by no real token and kept out of the cache.
            last_only: score each row's last real token alone, as generation needs.

        Returns:
            logits [B, T, V] ([B, 1, V] with last_only), or (logits, mean cross-entropy in nats)
            when targets are given.

        Raises:
            ValueError: tokens or targets have another shape, T is over context_length, tokens do
                not fit the cache, or last_only is asked for together with targets.
        """
        self._check_inputs(tokens, targets, cache, last_only)
        x = self.token_embedding(tokens)
        tables = None
        if self.config.positions == "rotary":
            tables = self._rotary_tables(tokens, cache)
        if self.position_embedding is not None:
            x = x + self._position_vectors(tokens, cache)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache[i]
            x = block(x, key_lengths=key_lengths, rotary_tables=tables, cache=layer_cache)
        if last_only:
            x = _last_tokens(x, key_lengths)
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def new_cache(
        self,
        batch_size: int,
        max_length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[KVCache]:
        """Empty key/value caches, one a layer, for incremental decoding.

        Args:
            batch_size: rows B.
            max_length: tokens a row can hold; default and, with learned positions, at most
                context_length.
            device, dtype: of the stored keys and values; default the parameters'.

        Raises:
            ValueError: max_length exceeds what learned positions reach.
        """
        limit = self.config.context_length
        max_length = limit if max_length is None else max_length
        if self.position_embedding is not None and max_length > limit:
            raise ValueError(
                f"max_length must be at most context_length={limit} with learned positions, "
                f"got {max_length}"
            )
        return [
            block.attention.new_cache(batch_size, max_length, device=device, dtype=dtype)
            for block in cast(Iterable[Block], self.blocks)
        ]

    def new_paged_cache(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        max_rows: int = 64,
        quantize: Quantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedKVCache:
        """An empty paged cache for all layers.

        Args:
            num_pages, page_size, max_rows, quantize: as for `PagedKVCache`; a row has room for
                context_length tokens.
            device, dtype: of the stored keys and values; default the parameters'.
        """
        weight = self.token_embedding.weight
        return PagedKVCache(
            num_pages,
            page_size,
            self.config.num_kv_heads or self.config.num_heads,
            self.config.head_dim,
            num_layers=len(self.blocks),
            max_rows=max_rows,
            max_pages_per_row=-(-self.config.context_length // page_size),
            quantize=quantize,
            device=weight.device if device is None else device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    def num_parameters(self) -> int:
        """Number of trained scalars, tied weights counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _position_vectors(self, tokens: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        """Learned vectors of the tokens' positions: [T, C], or [B, T, C] for ragged rows."""
        assert self.position_embedding is not None
        T = tokens.shape[1]
        n = 0 if cache is None else cache[0].uniform_length
        if n is not None:
            return self.position_embedding.weight[n : n + T]
        assert cache is not None
        positions = cache[0].lengths[:, None] + torch.arange(T, device=tokens.device)
        # Padding behind a long row may stand past the last position; real tokens cannot, because
        # new_cache makes no room for them.
        return self.position_embedding(positions.clamp(max=self.config.context_length - 1))

    def _rotary_tables(
        self, tokens: Tensor, cache: Sequence[LayerCache] | None
    ) -> tuple[Tensor, Tensor]:
        """The (cos, sin) that all layers rotate by, made once for them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if cache is not None:
            n = cache[0].uniform_length
            positions = positions + (cache[0].lengths[:, None] if n is None else n)
        return rotary_tables(positions, self.config.head_dim, base=self.config.rotary_base)

    def _check_inputs(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        cache: Sequence[LayerCache] | None,
        last_only: bool,
    ) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape [B, T], got {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.context_length:
            raise ValueError(
                f"tokens must be at most context_length={self.config.context_length} long, "
                f"got T={tokens.shape[1]}"
            )
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets must have tokens' shape {tuple(tokens.shape)}, got {tuple(targets.shape)}"
            )
        if targets is not None and last_only:
            raise ValueError("last_only must be False when targets are given, got True")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(
                f"cache must hold one KVCache a layer ({len(self.blocks)}), got {len(cache)}"
            )
        n = 0 if cache is None else cache[0].uniform_length
        if cache is not None and n is not None and n + tokens.shape[1] > cache[0].max_length:
            raise ValueError(
                f"tokens must fit the cache: it holds {n} of {cache[0].max_length} tokens a row, "
                f"got T={tokens.shape[1]} more"
            )


def _block(config: GPTConfig) -> Block:
    attention = CausalGQAttention(
        config.embed_dim,
        config.num_heads,
        config.num_kv_heads,
        qkv_bias=config.bias,
        out_bias=config.bias,
        window=config.window,
        keep_first=config.keep_first,
        rotary=config.rotary_style if config.positions == "rotary" else None,
        rotary_base=config.rotary_base,
        qk_norm=config.qk_norm,
        alibi=config.positions == "alibi",
        softcap=config.softcap,
        sinks=config.sinks,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
    mlp = MLP(
        config.embed_dim,
        config.hidden_dim,
        bias=config.bias,
        dropout=config.dropout,
        activation=config.activation,
    )
    return Block(attention, mlp, config.embed_dim, bias=config.bias)


def _last_tokens(x: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Each row's last real token: [B, T, C] -> [B, 1, C]."""
    if key_lengths is None:
        return x[:, -1:]
    index = (key_lengths.long() - 1).clamp(0, x.shape[1] - 1)
    return x[torch.arange(x.shape[0], device=x.device), index].unsqueeze(1)


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
