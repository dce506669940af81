"""Padding: rows of ids as one tensor, with their lengths or mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tokenizers.base import Tokenizer, TokenizerError

IGNORED = -100  # a target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class Padded:
    """Rows padded on the right to one length.

    Args:
        tokens: int64 [B, T].
        lengths: int64 [B], how many of a row's tokens are its own: `key_lengths` of the modules.
    """

    tokens: Tensor
    lengths: Tensor


def pad(rows: Sequence[Sequence[int]], fill: int, length: int | None = None) -> Padded:
    """Pads rows on the right.

    Args:
        rows: at least one, each of any length.
        fill: the id that follows a row's own.
        length: T; default the longest row's.

    Raises:
        ValueError: there is no row, or one is over length.
    """
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    longest = max(map(len, rows))
    T = longest if length is None else length
    if longest > T:
        raise ValueError(f"rows must be at most length={T} long, got one of {longest}")
    filled = [[*row, *[fill] * (T - len(row))] for row in rows]
    return Padded(
        torch.tensor(filled, dtype=torch.int64).view(len(rows), T),
        torch.tensor([len(row) for row in rows], dtype=torch.int64),
    )


def pad_id(tokenizer: Tokenizer) -> int:
    """The id of padding; 0 where the tokenizer has none of its own, as lengths hide it anyway."""
    try:
        return tokenizer.special_id("pad")
    except TokenizerError:
        return 0
