"""Configuration of transformer layers: every option, its default and its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .. import checks
from ..modules.options import OutputGate, Scoring, SharedOptions, excluded, passed_as, table
from ..rotary import RotaryStyle
from .fields import check_fields, from_fields

if TYPE_CHECKING:
    from typing_extensions import Self

Positions = Literal[
    "learned", "sinusoidal", "rotary", "alibi", "scalar", "content", "transformer_xl", "none"
]
Activation = Literal["relu", "gelu", "gelu_tanh", "geglu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Order = Literal["pre", "post", "parallel"]
Sparse = Literal["alternate", "merge"]
Table = Literal["trained", "sinusoidal"]

# Positions with relative terms; only these support terms on the values.
RELATIVE: tuple[Positions, ...] = ("scalar", "content", "transformer_xl")
# Fields that only some positions have.
_OF_POSITIONS: Mapping[str, tuple[Positions, ...]] = {
    **dict.fromkeys(("rotary_style", "rotary_base"), ("rotary",)),
    **dict.fromkeys(("relative_distance", "relative_table", "relative_values"), RELATIVE),
}
# Gated activations, with three matrices in place of two.
GATED = ("geglu", "swiglu")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Options of a model's layers; base of `GPTConfig`, `EncoderConfig` and `Seq2SeqConfig`.

    Args:
        num_layers: number of transformer layers.
        num_heads: query heads a layer.
        num_kv_heads: key/value heads a layer, a divisor of num_heads; None = num_heads.
        embed_dim: width C of the residual stream, a multiple of num_heads.
        v_head_dim: width of a value head; None = embed_dim // num_heads.
        kv_latent_dim: width of the latent of a token, from which all keys and values are projected
            and which the cache holds (`fastattn.MultiheadLatentAttention`); None = none. With
            rotary positions each head has embed_dim // num_heads // 2 further, rotated columns,
            whose key all heads share.
        positions: "learned" adds a trained vector a position to the token embedding, "sinusoidal" a
            fixed one; "rotary" rotates queries and keys instead; "alibi" lowers scores linearly
            with the distance; "scalar", "content" and "transformer_xl" learn terms of the scores by
            relative position (see `fastattn.models.positions`); "none" has none.
        rotary_style: pairs of features that are rotated together, "half" or "interleaved".
        rotary_base: the rotation's longest wavelength is about 2 * pi * rotary_base positions.
        relative_distance: R of the learned terms: distances beyond R are taken as R.
        relative_table: vectors of the learned terms: "trained", or "sinusoidal" with a trained
            projection.
        relative_values: with learned terms, add vectors by relative position to the values too.
        window: keys a query sees, itself included; None = all up to itself. In an encoder, keys at
            a smaller distance on either side.
        keep_first: first keys that stay visible outside the window; needs window.
        stride: with sparse, a query sees the keys at distances that are multiples of it.
        sparse: "alternate": odd layers (the first, third, ...) have the window, the others the
            stride; "merge": every layer has both (Child et al. 2019, arXiv 1904.10509). Needs
            window and stride.
        scoring: of queries and keys: "scaled_dot", "dot", "multiplicative" or "additive"; see
            `fastattn.GQAttention`.
        softcap: bound of the attention scores; None = none.
        sinks: give every head a learned attention sink.
        batch_invariant: attention's results for a token are bitwise equal in training and in
            generation; see `fastattn.attention`. torch's linear layers may not.
        qk_norm: normalise queries and keys, with learned weights.
        output_gate: multiply attention's output by a sigmoid gate of the tokens, per "head" or per
            "element"; None = none.
        block: order of the parts: "pre", x + f(norm(x)); "post", norm(x + f(x)); "parallel", x +
            mlp(norm(x)) + attention(norm(x)).
        project_residual: add self-attention to a learned projection of x in place of x.
        norm: "layernorm" or "rmsnorm".
        norm_eps: added to the variance, or to the mean square.
        embedding_norm: normalise the embedding, as BERT does.
        dropout: probability of zeroing an element of the embedding and of each layer's outputs
            while training.
        attention_dropout: probability of dropping an attention weight while training.
        bias: give linear layers and layer norms a bias.
        activation: of the feed-forward layers: "relu", "gelu", "gelu_tanh" (the tanh approximation,
            as in GPT-2), or gated "geglu" and "swiglu".
        hidden_dim: width of the feed-forward layers; None = 4 * embed_dim, with a gate 8 *
            embed_dim // 3, for an equal number of parameters.
        tie_weights: use the token embedding as the output layer's weight.
        label_smoothing: probability that the training loss spreads over all tokens (Szegedy et al.
            2016, arXiv 1512.00567).

    Raises:
        ValueError: a field is of a wrong type or out of range, or fields disagree.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    embed_dim: int = 128
    v_head_dim: int | None = None
    kv_latent_dim: int | None = None
    positions: Positions = "learned"
    rotary_style: RotaryStyle = "half"
    rotary_base: float = 10000.0
    relative_distance: int = 32
    relative_table: Table = "trained"
    relative_values: bool = False
    window: int | None = None
    keep_first: int = 0
    stride: int | None = None
    sparse: Sparse | None = None
    scoring: Scoring = "scaled_dot"
    softcap: float | None = None
    sinks: bool = False
    batch_invariant: bool = False
    qk_norm: bool = False
    output_gate: OutputGate | None = None
    block: Order = "pre"
    project_residual: bool = False
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    embedding_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    bias: bool = False
    activation: Activation = "gelu"
    hidden_dim: int | None = None
    tie_weights: bool = True
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and field.name != "keep_first":
                checks.check_count(field.name, 1 if value is None else value, 1)
        self._check_heads()
        for name in ("rotary_base", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        self._check_sparse()
        checks.check_keep_first(self.keep_first, self.window is not None)
        for name in passed_as(SharedOptions, "score"):
            value, check = getattr(self, name), table(SharedOptions)[name].check
            if value is not None and check is not None:
                check(name, value)
        self._check_terms()
        self._check_latent()

    def _check_latent(self) -> None:
        """Raise ValueError for options that kv_latent_dim does not support."""
        if self.kv_latent_dim is None:
            return
        own = ("num_kv_heads", "stride", "keep_first", "qk_norm", "output_gate", "batch_invariant")
        for name in own:
            if value := getattr(self, name):
                raise ValueError(f"{name} is not supported with kv_latent_dim, got {value}")
        if self.scoring != "scaled_dot":
            raise ValueError(f"scoring is not supported with kv_latent_dim, got {self.scoring!r}")
        if self.positions in (*RELATIVE, "alibi"):
            raise ValueError(f"positions={self.positions!r} is not supported with kv_latent_dim")
        if self.positions == "rotary" and self.head_dim % 4:
            raise ValueError(
                "embed_dim / num_heads must be a multiple of 4 for kv_latent_dim with "
                f"positions='rotary', which rotates half of it, got {self.head_dim}"
            )

    def _check_heads(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                "embed_dim / num_heads must be even for positions='rotary', "
                f"got {self.embed_dim} / {self.num_heads} = {self.head_dim}"
            )
        sinusoidal = self.positions == "sinusoidal" or self.relative_table == "sinusoidal"
        if sinusoidal and self.embed_dim % 2:
            raise ValueError(f"embed_dim must be even for sinusoids, got {self.embed_dim}")

    def _check_sparse(self) -> None:
        if self.sparse is None:
            if self.stride is not None:
                raise ValueError(
                    f"stride needs sparse='alternate' or 'merge', got {self.stride} without it"
                )
        elif self.window is None or self.stride is None:
            raise ValueError(
                f"sparse={self.sparse!r} needs window and stride, "
                f"got window={self.window} and stride={self.stride}"
            )

    def _check_terms(self) -> None:
        """Raise ValueError for options that the positions, relative values or scores lack."""
        for name, needed in _OF_POSITIONS.items():
            value = getattr(self, name)
            if value != getattr(TransformerConfig, name) and self.positions not in needed:
                choices = " or ".join(map(repr, needed))
                raise ValueError(f"{name}={value!r} needs positions={choices}")
        if self.relative_values:
            for name, value in excluded("values", vars(self)):
                raise ValueError(f"{name} is not supported with relative_values, got {value}")
        if self.scoring != "additive":
            return
        for name, value in excluded("additive", vars(self)):
            raise ValueError(f"{name} is not supported with scoring='additive', got {value}")
        if self.positions in (*RELATIVE, "alibi"):
            raise ValueError(
                "positions must be 'learned', 'sinusoidal', 'rotary' or 'none' with "
                f"scoring='additive', got {self.positions!r}"
            )

    @property
    def head_dim(self) -> int:
        """Width of a query head, D."""
        return self.embed_dim // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head; with a latent, in addition to head_dim."""
        if self.positions != "rotary":
            return 0
        return self.head_dim if self.kv_latent_dim is None else self.head_dim // 2

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Make a configuration from `to_dict`'s result, with defaults for missing fields.

        Raises:
            ValueError: a field is unknown, missing, of a wrong type or out of range.
        """
        return from_fields(cls, fields)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Make a published configuration, with changes.

        Args:
            name: one of cls.presets.
            changes: fields that differ.

        Raises:
            ValueError: there is no such preset, or the changes do not fit.
        """
        if name not in cls.presets:
            presets = ", ".join(cls.presets) or "none"
            raise ValueError(f"{cls.__name__} has the presets {presets}, got {name!r}")
        return cls.from_dict({**cls.presets[name], **changes})


@dataclass(frozen=True)
class TextConfig(TransformerConfig):
    """Options of a model of one text: `TransformerConfig` and sizes of the text.

    Args:
        vocab_size: number of distinct tokens V.
        context_length: longest sequence the model reads, in tokens.
    """

    vocab_size: int
    context_length: int = 64
