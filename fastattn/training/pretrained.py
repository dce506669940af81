"""Fine-tuning: a run that starts with another run's encoder and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..models.encoder import EncoderConfig, MaskedLM, Tagger
from .checkpoint import CheckpointError, load_trained
from .tokenizers.base import Tokenizer

# What may differ from the earlier run: none of it changes the encoder's parameters.
_OWN_FIELDS = {"dropout", "attention_dropout", "label_smoothing"}


class Pretrained:
    """The encoder of a trained masked-token model.

    Args:
        path: its run's folder, or one checkpoint's.

    Raises:
        CheckpointError: there is no such checkpoint, or it holds another kind of model.
    """

    def __init__(self, path: str | Path) -> None:
        found = load_trained(path, "masked")
        assert isinstance(found.model, MaskedLM)
        self._path, self._encoder = path, found.model.encoder
        self._config: EncoderConfig = found.config
        self.tokenizer: Tokenizer = found.tokenizer

    def fields(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The encoder's configuration, with what a run may have of its own, but the vocabulary.

        Args:
            asked: fields that the user has named.
        """
        fields = self._config.to_dict()
        del fields["vocab_size"]
        for name, value in asked.items():
            if name not in _OWN_FIELDS and fields[name] != value:
                raise CheckpointError(
                    f"the encoder in {self._path} is of another configuration: its {name} is "
                    f"{fields[name]!r}, not {value!r}"
                )
        return {**fields, **asked}

    def give(self, model: nn.Module) -> None:
        """Copies the encoder's parameters into a model of `fields`."""
        assert isinstance(model, Tagger)
        model.encoder.load_state_dict(self._encoder.state_dict())
