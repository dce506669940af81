"""Encoder-decoder transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..cache.dense import KVCache
from ..checks import check_is
from ..modules.cross_attention import CrossGQAttention, ProjectedMemory
from ..modules.self_attention import LayerCache
from . import stack
from .layers import Block
from .model_config import TransformerConfig
from .stack import DecoderStack, TokenStack


@dataclass(frozen=True)
class Seq2SeqConfig(TransformerConfig):
    """The shape of a `Seq2Seq`.

    Args:
        source_vocab_size: number of distinct tokens of sources.
        target_vocab_size: number of distinct tokens of targets, V.
        source_length: longest source, in tokens.
        target_length: longest target, in tokens, including the begin token.
        num_decoder_layers: layers of the decoder; None = num_layers, which is the encoder's.
        share_embeddings: one token embedding for sources and targets, which then share a
            vocabulary.

    Other fields, for both sides: see `TransformerConfig`. window, stride and positions apply to
    self-attention; cross-attention sees the whole source.

    Presets: "transformer-base" (Vaswani et al. 2017, arXiv 1706.03762, table 3; its vocabulary of
    37000 pairs of bytes).

    Raises:
        ValueError: a field is of a wrong type or out of range, or fields disagree.
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
        super().__post_init__()
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                "share_embeddings needs one vocabulary, got source_vocab_size="
                f"{self.source_vocab_size} and target_vocab_size={self.target_vocab_size}"
            )


class Memory(NamedTuple):
    """A batch of encoded sources, for the decoder's layers.

    Attributes:
        layers: keys and values of each layer's cross-attention.
    """

    layers: tuple[ProjectedMemory, ...]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.layers[0].k.shape[0]

    def repeat_rows(self, count: int) -> Memory:
        """Repeat every row `count` times."""
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

    Training uses teacher forcing: with begin token b and end token e, a target x y z has inputs b x
    y z and targets x y z e. Generation is token by token, with a cache, after one `encode` of the
    source:

        >>> model = Seq2Seq(Seq2SeqConfig(20, 30, num_layers=2)).eval()
        >>> source = torch.randint(20, (1, 7))
        >>> with torch.no_grad():
        ...     memory, cache = model.encode(source), model.new_cache(1)
        ...     first = model.decode(torch.tensor([[0]]), memory, cache)  # [1, 1, 30]
        ...     second = model.decode(first.argmax(-1), memory, cache)

    Initialised as `GPT`.

    Args:
        config: the shape of the model.

    Parameters:
        encoder, decoder: `TokenStack`s, with one token embedding if shared.
        head.weight: [V, C], unless tied to the decoder's token embedding.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        check_is("config", config, Seq2SeqConfig)
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
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits of the next token at each input, and the loss.

        Args:
            source: [B, S] integers in [0, source_vocab_size), S <= source_length.
            inputs: [B, T] integers in [0, target_vocab_size), T <= target_length.
            targets: int64 [B, T], the next token of each input; -100 excludes a position from the
                loss.
            source_lengths, target_lengths: int32 or int64 [B]: numbers of real tokens in rows of
                source and inputs, followed by masked padding.
            target_count: divisor of the loss, if these targets are a part of a batch; default: the
                number of targets that are not -100.

        Returns:
            (logits [B, T, V], mean cross-entropy in nats), the latter None without targets.

        Raises:
            TypeError: targets are not int64.
            ValueError: a tensor has another shape, is longer than the model reads, or, on a CPU,
                has an id out of range.
        """
        stack.check_targets(targets, "inputs", inputs)
        memory = self.encode(source, source_lengths)
        logits = self._scores(inputs, memory, None, key_lengths=target_lengths)
        return stack.scored(self, logits, targets, target_count)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Encode sources, and project keys and values for each decoder layer.

        Args:
            source, source_lengths: as for `forward`.

        Raises:
            ValueError: source has another shape, is longer than source_length, or, on a CPU, has an
                id out of range.
        """
        sizes = self.config.source_length, self.config.source_vocab_size
        stack.check_tokens("source", source, "source_length", *sizes)
        hidden = self.encoder.hidden_states(source, key_lengths=source_lengths)
        layers = (cast(CrossGQAttention, cast(Block, x).cross) for x in self.decoder.blocks)
        return Memory(tuple(layer.project_memory(hidden, source_lengths) for layer in layers))

    def decode(
        self,
        inputs: Tensor,
        memory: Memory,
        cache: Sequence[LayerCache] | None = None,
        *,
        key_lengths: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Compute the logits of the next token at each input, given encoded sources.

        Args:
            inputs: [B, T] integers in [0, target_vocab_size); with a cache they continue its
                sequences and are appended.
            memory: of B sources, from `encode`.
            cache: from `new_cache`, or another `LayerCache` per layer.
            key_lengths: int32 or int64 [B]: number of real tokens of a row.
            last_only: return logits of each row's last real token only.

        Returns:
            logits [B, T, V], or [B, 1, V] with last_only.

        Raises:
            TypeError: cache is no sequence of caches.
            ValueError: a tensor has a wrong shape, inputs are longer than target_length or do not
                fit the cache, or the memory has another batch size.
        """
        return stack.whole_logits(
            self._scores(inputs, memory, cache, key_lengths=key_lengths, last_only=last_only)
        )

    def _scores(
        self, inputs: Tensor, memory: Memory, cache: Sequence[LayerCache] | None, **how: Any
    ) -> Tensor:
        """Compute `decode`, with sharded logits if the vocabulary is sharded."""
        sizes = self.config.target_length, self.config.target_vocab_size
        stack.check_tokens("inputs", inputs, "target_length", *sizes)
        stack.check_cache("inputs", inputs, cache, len(self.decoder.blocks))
        if memory.batch_size != inputs.shape[0]:
            raise ValueError(
                f"memory must be of {inputs.shape[0]} sources, one for each row of inputs, "
                f"got {memory.batch_size}"
            )
        hidden = self.decoder.hidden_states(inputs, cache=cache, memory=memory.layers, **how)
        return stack.token_logits(hidden, self.head, self.decoder.token_embedding)

    def new_cache(
        self,
        batch_size: int,
        max_length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[KVCache]:
        """Make empty caches of targets, one per decoder layer; arguments as for `GPT.new_cache`."""
        return self.decoder.new_cache(batch_size, max_length, device=device, dtype=dtype)

    def num_parameters(self) -> int:
        """Count the trained scalars, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())
