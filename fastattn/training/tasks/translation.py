"""Translation: pairs of token sequences for an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ...generation.translate import translate
from ...models.seq2seq import Seq2Seq
from ..data.rows import IGNORED, pad, pad_id
from ..data.text import DataError
from ..data.text_pairs import Pair
from ..tokenizers.base import Tokenizer
from .scores import text_scores
from .task import Batch, ExampleTask

# Decoding is slow, and this many pairs estimate the scores well enough.
_SCORED_PAIRS = 500


@dataclass(frozen=True)
class EncodedPair:
    """Pair of texts as ids, without begin and end tokens."""

    source: tuple[int, ...]
    target: tuple[int, ...]


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    source_length: int,
    target_length: int,
    truncate: bool = False,
) -> list[EncodedPair]:
    """Encode pairs and check their lengths.

    target_length: most tokens of a target, begin token included. truncate: cut longer texts instead
    of raising.

    Raises:
        DataError: a text is too long, has no token, or is cut to none; the message names its line.
    """
    sources = [(pair.source, pair.place) for pair in pairs]
    targets = [(pair.target, pair.place) for pair in pairs]
    columns = (
        encode_texts(sources, tokenizer, source_length, truncate=truncate),
        encode_texts(targets, tokenizer, target_length, side="target", truncate=truncate),
    )
    return [EncodedPair(*both) for both in zip(*columns, strict=True)]


def encode_texts(
    texts: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    length: int,
    *,
    side: Literal["source", "target"] = "source",
    truncate: bool = False,
) -> list[tuple[int, ...]]:
    """Encode one side of pairs, each text with its file and line, for `encode_pairs`.

    White space around a text is dropped, as in `read_pairs`. length: most tokens, begin token
    included.
    """
    begin = side == "target"
    extra = int(begin)
    room, rows = length - extra, []
    encoded = tokenizer.encode_batch([text.strip() for text, _ in texts])
    for (_, place), ids in zip(texts, encoded, strict=True):
        kept = ids[:room] if truncate else ids
        if not kept:
            cause = f"cut to {room} tokens has none left" if ids else "has no token"
            raise DataError(f"{place}: the {side} {cause}")
        if len(kept) > room:
            with_begin = " with its begin token" if begin else ""
            raise DataError(
                f"{place}: the {side} has {len(ids) + extra} tokens{with_begin}, the model reads "
                f"at most {length}; --truncate cuts longer ones"
            )
        rows.append(tuple(kept))
    return rows


class TranslationTask(ExampleTask[EncodedPair]):
    """Translation with teacher forcing.

    references: the texts of the validation pairs' targets. fingerprint: SHA-256 of all pairs.

    Raises:
        TokenizerError: the tokenizer, of both languages, has no begin or end token.
    """

    def __init__(
        self,
        train: Sequence[EncodedPair],
        validation: Sequence[EncodedPair],
        references: Sequence[str],
        *,
        tokenizer: Tokenizer,
        fingerprint: str,
    ) -> None:
        super().__init__(train, validation)
        self._references, self._tokenizer = list(references), tokenizer
        self._begin, self._end = tokenizer.special_id("begin"), tokenizer.special_id("end")
        self.fingerprint = fingerprint
        self.extent = f"{len(train):,} training and {len(validation):,} validation pairs"

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Compute `text_scores` of greedy translations, and "pairs", their number.

        Translates the first 500 validation pairs.
        """
        assert isinstance(model, Seq2Seq), "the task's batches suit no other model"
        sources = [pair.source for pair in self.rows["validation"][:_SCORED_PAIRS]]
        got: list[str] = []
        for i in range(0, len(sources), batch_size):
            got += translate_tokens(model, self._tokenizer, sources[i : i + batch_size])
        return {**text_scores(got, self._references[: len(got)]), "pairs": len(got)}

    def batch(self, pairs: Sequence[EncodedPair]) -> Batch:
        source = pad([pair.source for pair in pairs], pad_id(self._tokenizer))
        inputs = pad([(self._begin, *pair.target) for pair in pairs], pad_id(self._tokenizer))
        targets = pad([(*pair.target, self._end) for pair in pairs], IGNORED)
        lengths = {"source_lengths": source.lengths, "target_lengths": inputs.lengths}
        return Batch((source.tokens, inputs.tokens), targets.tokens, lengths)


def translate_tokens(
    model: Seq2Seq, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], *, beams: int = 1
) -> list[str]:
    """Translate sources, greedily or by beam search.

    The model is in evaluation mode; sources are rows of ids, at least one of at least one.
    """
    rows = translate_ids(model, tokenizer, sources, beams=beams)
    special = tokenizer.special_ids
    return [tokenizer.decode([x for x in row if x not in special]).strip() for row in rows]


def translate_ids(
    model: Seq2Seq, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], *, beams: int = 1
) -> list[list[int]]:
    """Translate as `translate_tokens`, to ids without begin and end tokens."""
    device = next(model.parameters()).device
    padded = pad(sources, pad_id(tokenizer))
    return translate(
        model,
        padded.tokens.to(device),
        begin=tokenizer.special_id("begin"),
        end=tokenizer.special_id("end"),
        source_lengths=padded.lengths.to(device),
        beams=beams,
    )
