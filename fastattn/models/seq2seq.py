"""An encoder-decoder: a decoder with cross-attention to an encoded source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..cache.dense import KVCache
from ..modules.cross_attention import CrossGQAttention, ProjectedMemory
from ..modules.self_attention import LayerCache
from .layers import Block
from .model_config import TransformerConfig, check_positive_int
from .stack import (
    DecoderStack,
    TokenStack,
    check_cache,
    check_targets,
    check_tokens,
    scored,
    token_logits,
    whole_logits,
)


@dataclass(frozen=True)
class Seq2SeqConfig(TransformerConfig):
    """The shape of a `Seq2Seq`.

    Args:
        source_vocab_size: number of distinct tokens of sources.
        target_vocab_size: number of distinct tokens of targets, V.
        source_length: longest source, in tokens.
        target_length: longest target, in tokens, that which begins it counted.
        num_decoder_layers: layers of the decoder; None = num_layers, which is the encoder's.
        share_embeddings: one token embedding for sources and targets, whose vocabularies then are
            one.

    The other fields are those of `TransformerConfig`, for both sides. window, stride and positions
    are the self-attentions'; cross-attention sees the whole source.

    Presets: "transformer-base" (Vaswani et al. 2017, arXiv 1706.03762, table 3; its vocabulary of
    37000 pairs of bytes).

    Raises:
        ValueError: a field is out of range, or fields disagree.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "transformer-base": {
            "source_vocab_size": 37000,
            "target_vocab_size": 37000,
            "source_length": 512,
            "target_length": 512,
            "num_layers": 6,
            "num_heads": 8,
            "embed_dim": 512,
            "positions": "sinusoidal",
            "block": "post",
            "activation": "relu",
            "bias": True,
            "dropout": 0.1,
            "label_smoothing": 0.1,
            "share_embeddings": True,
        },
    }

    source_vocab_size: int
    target_vocab_size: int
    source_length: int = 64
    target_length: int = 64
    num_decoder_layers: int | None = None
    share_embeddings: bool = False

    def __post_init__(self) -> None:
        names = ["source_vocab_size", "target_vocab_size", "source_length", "target_length"]
        for name in names + ["num_decoder_layers"] * (self.num_decoder_layers is not None):
            check_positive_int(name, getattr(self, name))
        super().__post_init__()
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                "share_embeddings needs one vocabulary, got source_vocab_size="
                f"{self.source_vocab_size} and target_vocab_size={self.target_vocab_size}"
            )


class Memory(NamedTuple):
    """A batch of encoded sources, as the decoder's layers read them.

    Attributes:
        layers: what each layer's cross-attention looks at.
    """

    layers: tuple[ProjectedMemory, ...]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.layers[0].k.shape[0]

    def repeat_rows(self, count: int) -> Memory:
        """Every row `count` times, one after the other."""
        return Memory(tuple(layer.repeat_rows(count) for layer in self.layers))


class _Encoder(TokenStack):
    """The encoder's side."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config, config.source_vocab_size, config.source_length, causal=False)
        self.initialise_weights()


class _Decoder(DecoderStack):
    """The decoder's side: masked self-attention, cross-attention, feed-forward."""

    length_field = "target_length"

    def __init__(self, config: Seq2SeqConfig) -> None:
        count = config.num_decoder_layers
        sizes = (config.target_vocab_size, config.target_length)
        super().__init__(config, *sizes, cross=True, num_layers=count)
        self.initialise_weights()


class Seq2Seq(nn.Module):
    """Encoder-decoder transformer (Vaswani et al. 2017, arXiv 1706.03762).

    Trained on all positions of a target at once, each given the true tokens before it (teacher
    forcing): with a begin token b and an end token e, a target x y z has inputs b x y z and targets
    x y z e. Used token by token, with a cache, the source's keys and values made once:

        >>> model = Seq2Seq(Seq2SeqConfig(20, 30, num_layers=2)).eval()
        >>> source = torch.randint(20, (1, 7))
        >>> with torch.no_grad():
        ...     memory, cache = model.encode(source), model.new_cache(1)
        ...     first = model.decode(torch.tensor([[0]]), memory, cache)  # [1, 1, 30]
        ...     second = model.decode(first.argmax(-1), memory, cache)

    Weights start as `GPT`'s do.

    Args:
        config: the shape of the model.

    Parameters:
        encoder, decoder: `TokenStack`s; their token embeddings are one where they are shared.
        head.weight: [V, C], unless tied to the decoder's token embedding.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config)
        self.decoder = _Decoder(config)
        if config.share_embeddings:
            self.decoder.token_embedding = self.encoder.token_embedding
        self.head = None
        if not config.tie_weights:
            self.head = nn.Linear(config.embed_dim, config.target_vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self,
        source: Tensor,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        target_count: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores what follows each token of the inputs.

        Args:
            source: [B, S] integers in [0, source_vocab_size), S <= source_length.
            inputs: [B, T] integers in [0, target_vocab_size), T <= target_length.
            targets: int64 [B, T], the token that follows each of the inputs; -100 leaves a position
                out of the loss.
            source_lengths, target_lengths: int32 or int64 [B]: how many tokens of a row of source
                and of inputs are real; the others are padding behind them, which none sees.
            target_count: of how many targets the loss is the mean, where these are a part of them;
                default: those that are not -100.

        Returns:
            logits [B, T, V], or (logits, mean cross-entropy in nats) when targets are given.

        Raises:
            ValueError: a tensor has another shape, or is longer than the model reads.
        """
        check_targets(targets, "inputs", inputs)
        memory = self.encode(source, source_lengths)
        logits = self._scores(inputs, memory, key_lengths=target_lengths)
        return scored(self, logits, targets, target_count)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Reads sources, and projects them for every layer of the decoder.

        Args:
            source, source_lengths: as for `forward`.

        Raises:
            ValueError: source has another shape, or is longer than source_length.
        """
        check_tokens("source", source, "source_length", self.config.source_length)
        hidden = self.encoder.hidden_states(source, key_lengths=source_lengths)
        return Memory(
            tuple(
                cast(CrossGQAttention, cast(Block, block).cross).project_memory(
                    hidden, source_lengths
                )
                for block in self.decoder.blocks
            )
        )

    def decode(
        self,
        inputs: Tensor,
        memory: Memory,
        cache: Sequence[LayerCache] | None = None,
        *,
        key_lengths: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Scores what follows each token, given encoded sources.

        Args:
            inputs: [B, T] integers in [0, target_vocab_size); with a cache they continue what it
                holds, and are added to it.
            memory: of B sources, from `encode`.
            cache: from `new_cache`, or another `LayerCache` a layer.
            key_lengths: int32 or int64 [B]: how many of a row's T tokens are real.
            last_only: score each row's last real token alone.

        Returns:
            logits [B, T, V], or [B, 1, V] with last_only.

        Raises:
            TypeError: cache is no sequence of caches.
            ValueError: a tensor has another shape, inputs are longer than target_length or do not
                fit the cache, or the memory is of another batch.
        """
        return whole_logits(
            self._scores(inputs, memory, cache, key_lengths=key_lengths, last_only=last_only)
        )

    def _scores(
        self,
        inputs: Tensor,
        memory: Memory,
        cache: Sequence[LayerCache] | None = None,
        *,
        key_lengths: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """`decode`, whose scores stay sharded where the vocabulary is."""
        check_tokens("inputs", inputs, "target_length", self.config.target_length)
        check_cache("inputs", inputs, cache, len(self.decoder.blocks))
        if memory.batch_size != inputs.shape[0]:
            raise ValueError(
                f"memory must be of {inputs.shape[0]} sources, one for each row of inputs, "
                f"got {memory.batch_size}"
            )
        hidden = self.decoder.hidden_states(
            inputs,
            key_lengths=key_lengths,
            cache=cache,
            memory=memory.layers,
            last_only=last_only,
        )
        embedding = self.decoder.token_embedding
        weight = embedding.weight if self.head is None else self.head.weight
        return token_logits(hidden, weight)

    def new_cache(
        self,
        batch_size: int,
        max_length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[KVCache]:
        """Empty caches of targets, one a layer of the decoder; arguments as for `GPT.new_cache`."""
        return self.decoder.new_cache(batch_size, max_length, device=device, dtype=dtype)

    def num_parameters(self) -> int:
        """Number of trained scalars, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
