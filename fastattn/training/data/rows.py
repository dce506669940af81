"""Padding: rows of ids as one tensor, with their lengths or mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..tokenizers.base import Tokenizer, TokenizerError

IGNORED = -100  # a target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class Padded:
    """Rows padded on the right to one length.

    tokens: int64 [B, T]. lengths: int64 [B], a row's own tokens: `key_lengths` of the modules.
    """

    tokens: Tensor
    lengths: Tensor


def pad(rows: Sequence[Sequence[int]], fill: int) -> Padded:
    """Pad rows (at least one) on the right with an id, to the longest row."""
    tensors = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows]
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    return Padded(pad_sequence(tensors, batch_first=True, padding_value=fill), lengths)


def pad_id(tokenizer: Tokenizer) -> int:
    """Get the id of padding, or 0 if the tokenizer has none: lengths mask it anyway."""
    try:
        return tokenizer.special_id("pad")
    except TokenizerError:
        return 0
