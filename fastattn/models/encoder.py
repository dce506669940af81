"""Bidirectional encoder, with heads for tagging and for masked-language modelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import check_count, check_is
from .model_config import TextConfig
from .stack import TokenStack, check_targets, check_tokens, scored, token_logits


@dataclass(frozen=True)
class EncoderConfig(TextConfig):
    """The shape of an `Encoder`.

    Args:
        vocab_size: number of distinct tokens V.
        context_length: longest sequence the model reads, in tokens.

    Other fields: see `TransformerConfig`.

    Presets: "bert-base" (Devlin et al. 2018, arXiv 1810.04805; without its segments and pooler).

    Raises:
        ValueError: a field is of a wrong type or out of range, or fields disagree.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "bert-base": {
            "vocab_size": 30522,
            "context_length": 512,
            "num_layers": 12,
            "num_heads": 12,
            "embed_dim": 768,
            "bias": True,
            "block": "post",
            "embedding_norm": True,
            "norm_eps": 1e-12,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
    }


class Encoder(TokenStack):
    """Bidirectional transformer encoder: every token sees all tokens except padding.

    Initialised as `GPT`.
    """

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        check_is("config", config, EncoderConfig)
        super().__init__(config, config.vocab_size, config.context_length, causal=False)
        self.initialise_weights()

    def forward(self, tokens: Tensor, *, key_lengths: Tensor | None = None) -> Tensor:
        """Encode tokens.

        Args:
            tokens: [B, T] integers in [0, vocab_size), T <= context_length.
            key_lengths: int32 or int64 [B]: row b's tokens from key_lengths[b] on are padding,
                which no token sees.

        Returns:
            [B, T, C]; rows at padding are unspecified, though finite.

        Raises:
            ValueError: tokens have another shape, T is over context_length, or, on a CPU, an id is
                out of range.
        """
        config = self.config
        check_tokens("tokens", tokens, "context_length", config.context_length, config.vocab_size)
        return self.hidden_states(tokens, key_lengths=key_lengths)


class _Scoring(nn.Module):
    """An encoder with a classification head for every token."""

    config: EncoderConfig
    encoder: Encoder

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        target_count: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits of tags (`Tagger`) or of the vocabulary (`MaskedLM`), and the loss.

        Args:
            tokens, key_lengths: as for `Encoder.forward`; a `MaskedLM` takes masked tokens.
            targets: int64 [B, T], tags or masked tokens; -100 excludes a token from the loss.
            target_count: divisor of the loss, if these targets are a part of a batch; default: the
                number of targets that are not -100.

        Returns:
            (logits [B, T, num_tags or V], mean cross-entropy in nats), the latter None without
            targets.

        Raises:
            TypeError: targets are not int64.
            ValueError: as `Encoder.forward`, of tokens or targets.
        """
        check_targets(targets, "tokens", tokens)
        logits = self._scores(self.encoder(tokens, key_lengths=key_lengths))
        return scored(self, logits, targets, target_count)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Compute logits of vectors [B, T, C]."""
        raise NotImplementedError


class Tagger(_Scoring):
    """An encoder with a linear layer for the tags of every token.

    Args:
        config: of the encoder; label_smoothing is the loss's.
        num_tags: number of tags.

    Parameters:
        encoder: an `Encoder`.
        head.weight, head.bias: [num_tags, C] and [num_tags].
    """

    def __init__(self, config: EncoderConfig, num_tags: int) -> None:
        super().__init__()
        self.config, self.num_tags = config, check_count("num_tags", num_tags, 1)
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.embed_dim, num_tags)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def _scores(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(hidden)
        return scores


class MaskedLM(_Scoring):
    """An encoder that predicts masked tokens.

    Masked language model (Devlin et al. 2018, arXiv 1810.04805). The output layer is the tied token
    embedding, or a weight of its own, and a bias.

    Args:
        config: of the encoder; label_smoothing is the loss's.

    Parameters:
        encoder: an `Encoder`.
        head.weight: [V, C], unless tied.
        head_bias: [V], from 0.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = None
        if not config.tie_weights:
            self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def _scores(self, hidden: Tensor) -> Tensor:
        return token_logits(hidden, self.head, self.encoder.token_embedding, self.head_bias)
