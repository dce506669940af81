"""Padding: rows of ids as one tensor, with their lengths or mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    @property
    def mask(self) -> Tensor:
        """bool [B, T], True = a row's own token: `key_padding_mask` of the modules."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return places < self.lengths[:, None]


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


def encode_padded(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    max_length: int | None = None,
    length: int | None = None,
    begin: bool = False,
    end: bool = False,
) -> Padded:
    """Encodes texts, cuts them and pads them, ready for a model.

    Args:
        tokenizer: with a pad token; 0 stands in where it has none, as no real token sees it.
        texts: at least one.
        max_length: tokens that a row keeps, special ones included; None = all. The begin and end
            tokens are kept, the text between them is cut behind.
        length: as for `pad`.
        begin, end: put the special token before, or behind, each text.

    Raises:
        TokenizerError: the tokenizer has no such special token, or cannot encode a text.
        ValueError: as `pad`, a text has no token, or max_length leaves none of it.
    """
    first = [tokenizer.special_id("begin")] if begin else []
    last = [tokenizer.special_id("end")] if end else []
    around = len(first) + len(last)
    rows = []
    for i, ids in enumerate(tokenizer.encode_batch(texts)):
        kept = ids if max_length is None else ids[: max(0, max_length - around)]
        if not kept:
            cause = (
                f"max_length={max_length} leaves none of text {i}" if ids else f"text {i} has none"
            )
            raise ValueError(f"every text must have a token, but {cause}")
        rows.append([*first, *kept, *last])
    return pad(rows, pad_id(tokenizer), length)


def pad_id(tokenizer: Tokenizer) -> int:
    """The id of padding; 0 where the tokenizer has none of its own, as lengths hide it anyway."""
    try:
        return tokenizer.special_id("pad")
    except TokenizerError:
        return 0
