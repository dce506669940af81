"""Sequence tagging: a tag for every word, predicted at its first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.rows import IGNORED, pad, pad_id
from ..data.tagged_text import Sentence
from ..data.text import DataError
from ..tokenizers.base import Tokenizer, TokenizerError
from .scores import confusion, tag_scores
from .task import Batch, ExampleTask


@dataclass(frozen=True)
class Segment:
    """Tokens of consecutive words, each word's first token, and the words' indices."""

    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    words: tuple[int, ...]


def cut_rows(words: Sequence[str], tokenizer: Tokenizer, length: int) -> list[Segment]:
    """Tokenize words, at least one, one by one, and split a long sentence between words.

    A word longer than a row, `length` tokens, is cut. One without a token becomes the unknown
    token.

    Raises:
        TokenizerError: a word has no token and the tokenizer no unknown token.
    """
    rows: list[Segment] = []
    tokens: list[int] = []
    starts: list[int] = []
    first = 0
    for i, ids in enumerate(tokenizer.encode_batch(words)):
        pieces = (ids or [tokenizer.special_id("unknown")])[:length]
        if len(tokens) + len(pieces) > length:
            rows.append(Segment(tuple(tokens), tuple(starts), tuple(range(first, i))))
            tokens, starts, first = [], [], i
        starts.append(len(tokens))
        tokens += pieces
    rows.append(Segment(tuple(tokens), tuple(starts), tuple(range(first, len(words)))))
    return rows


class TaggingTask(ExampleTask[tuple[list[int], list[int]]]):
    """Task of tagging the words of sentences; tags are numbered from 0.

    fingerprint: SHA-256 of the sentences.

    Raises:
        DataError: the tokenizer has no token for a word; the message names its line.
    """

    def __init__(
        self,
        train: Sequence[Sentence],
        validation: Sequence[Sentence],
        *,
        tags: Sequence[str],
        tokenizer: Tokenizer,
        context_length: int,
        fingerprint: str,
    ) -> None:
        self.tags, self.fingerprint = tuple(tags), fingerprint
        self._fill = pad_id(tokenizer)
        words = [sum(len(x.words) for x in sentences) for sentences in (train, validation)]
        kinds = f"of {len(self.tags)} tags"
        self.extent = f"{words[0]:,} training and {words[1]:,} validation words {kinds}"

        def rows(sentences: Sequence[Sentence]) -> list[tuple[list[int], list[int]]]:
            examples: list[tuple[list[int], list[int]]] = []
            for sentence in sentences:
                try:
                    cut = cut_rows(sentence.words, tokenizer, context_length)
                except TokenizerError as error:
                    raise DataError(f"{sentence.places[0]}: {error}") from None
                for row in cut:
                    targets = [IGNORED] * len(row.tokens)
                    for start, word in zip(row.starts, row.words, strict=True):
                        targets[start] = numbers[sentence.tags[word]]
                    examples.append((list(row.tokens), targets))
            return examples

        numbers = {tag: i for i, tag in enumerate(self.tags)}
        super().__init__(rows(train), rows(validation))

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Compute `tag_scores` over all words."""
        device = next(model.parameters()).device
        K = len(self.tags)
        counts = torch.zeros(K, K, dtype=torch.int64, device=device)
        for batch in self.validation(batch_size):
            batch = batch.to(device)
            got = model(*batch.inputs, **batch.keywords)[0].argmax(-1)
            real = batch.targets != IGNORED
            counts += confusion(batch.targets[real], got[real], K)
        return tag_scores(counts, self.tags)

    def batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
        tokens = pad([tokens for tokens, _ in rows], self._fill)
        targets = pad([targets for _, targets in rows], IGNORED)
        return Batch((tokens.tokens,), targets.tokens, {"key_lengths": tokens.lengths})


@torch.no_grad()
def tag_words(
    model: nn.Module,
    tokenizer: Tokenizer,
    words: Sequence[str],
    *,
    tags: Sequence[str],
    context_length: int,
) -> list[str]:
    """Tag the words of a sentence; the model is in evaluation mode.

    tags: the model's, numbered from 0. context_length: most tokens that the model reads.
    """
    if not words:
        return []
    device = next(model.parameters()).device
    rows = cut_rows(words, tokenizer, context_length)
    padded = pad([row.tokens for row in rows], pad_id(tokenizer))
    logits, _ = model(padded.tokens.to(device), key_lengths=padded.lengths.to(device))
    got = logits.argmax(-1).tolist()
    return [tags[got[i][start]] for i, row in enumerate(rows) for start in row.starts]
