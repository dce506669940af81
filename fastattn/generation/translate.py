"""Greedy decoding and beam search of encoder-decoders.

The source is encoded once, for all steps and beams. The target grows in key/value caches by a token
per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_count, check_input, check_int, check_is
from ..models.sampling import check_finite
from ..models.seq2seq import Seq2Seq, Seq2SeqConfig
from ..models.stack import evaluating
from .search import Beam, Search, check_beams


def translate(
    model: Seq2Seq,
    source: Tensor,
    *,
    begin: int,
    end: int,
    source_lengths: Tensor | None = None,
    max_length: int | None = None,
    beams: int = 1,
    length_penalty: float = 0.0,
) -> list[list[int]]:
    """Translate each source: `beam_translate`, or `greedy_translate` with one beam and no penalty.

    Args:
        model, source, begin, end, source_lengths, max_length: as for `greedy_translate`.
        beams, length_penalty: as for `beam_translate`.

    Returns:
        B lists of tokens, without the begin and end tokens.

    Raises:
        ValueError, FloatingPointError: as those two.
    """
    check_beams(beams, length_penalty)
    lengths: dict[str, Any] = {"source_lengths": source_lengths, "max_length": max_length}
    texts = {"begin": begin, "end": end, **lengths}
    if beams == 1 and length_penalty == 0:
        return greedy_translate(model, source, **texts)
    beams_of = beam_translate(model, source, beams=beams, length_penalty=length_penalty, **texts)
    return [best[0].tokens for best in beams_of]


@torch.inference_mode()
def greedy_translate(
    model: Seq2Seq,
    source: Tensor,
    *,
    begin: int,
    end: int,
    source_lengths: Tensor | None = None,
    max_length: int | None = None,
) -> list[list[int]]:
    """Translate each source greedily.

    Args:
        model: run in evaluation mode.
        source: [B, S] tokens on the model's device, S >= 1.
        begin: the begin token of targets.
        end: the token that ends a target.
        source_lengths: int32 or int64 [B], number of real tokens of each source.
        max_length: most chosen tokens, end token included; default, and with learned positions at
            most, the model's target_length.

    Returns:
        B lists of tokens, without the begin and end tokens.

    Raises:
        ValueError: begin or end is unknown to the model, or a length is out of range.
        FloatingPointError: the model's scores are not finite.
    """
    steps = _Steps(model, source, source_lengths, begin, end, max_length, rows=1)
    B = source.shape[0]
    tokens: list[list[int]] = [[] for _ in range(B)]
    going = [True] * B
    for _ in range(steps.count):
        chosen = steps.scores().argmax(-1).tolist()
        for row, token in enumerate(chosen):
            going[row] = going[row] and token != end
            if going[row]:
                tokens[row].append(token)
        if not any(going):
            break
        steps.go_on(chosen)
    return tokens


@torch.inference_mode()
def beam_translate(
    model: Seq2Seq,
    source: Tensor,
    *,
    begin: int,
    end: int,
    source_lengths: Tensor | None = None,
    max_length: int | None = None,
    beams: int = 4,
    length_penalty: float = 0.0,
) -> list[list[Beam]]:
    """Translate all sources together by beam search, as `beam_search`.

    Args:
        model, source, begin, end, source_lengths, max_length: as for `greedy_translate`.
        beams: number of beams per source.
        length_penalty: see `length_divisor`.

    Returns:
        At most `beams` targets per source, the best first.

    Raises:
        ValueError: beams is not positive, length_penalty is not finite, or as `greedy_translate`.
        FloatingPointError: the model's scores are not finite.
    """
    check_beams(beams, length_penalty)
    steps = _Steps(model, source, source_lengths, begin, end, max_length, rows=beams)
    B = source.shape[0]
    searches = [Search(beams, steps.count, length_penalty, end, None) for _ in range(B)]
    going = set(range(B))
    tokens = [begin] * (B * beams)
    while True:
        scores = steps.scores().double().log_softmax(-1).view(B, beams, -1)
        parents = list(range(B * beams))
        for n in sorted(going):
            rows = slice(n * beams, (n + 1) * beams)
            kept = searches[n].step(scores[n])
            if not kept:
                going.discard(n)
                continue
            parents[rows] = [n * beams + row for row in kept]
            tokens[rows] = [text[-1] for text in searches[n].tokens]
        if not going:
            return [search.ended for search in searches]
        steps.go_on(tokens, parents)


class _Steps:
    """A batch of targets in progress: the caches, and the next step's tokens.

    rows: adjacent targets per source. count: most steps; others as for `greedy_translate`.
    """

    def __init__(
        self,
        model: Seq2Seq,
        source: Tensor,
        source_lengths: Tensor | None,
        begin: int,
        end: int,
        max_length: int | None,
        *,
        rows: int,
    ) -> None:
        check_is("model.config", getattr(model, "config", None), Seq2SeqConfig)
        limit = model.config.target_length
        self.count = limit if max_length is None else check_count("max_length", max_length, 1)
        V = model.config.target_vocab_size
        for name, token in (("begin", begin), ("end", end)):
            if not 0 <= check_int(name, token) < V:
                raise ValueError(f"{name} must be a token in 0..{V - 1}, got {token}")
        check_input("source", source, "integer", "...", source, {})
        if source.dim() == 2 and source.shape[1] == 0:
            raise ValueError("source must hold at least one token a row, got none")
        if source_lengths is not None and source.dim() == 2:
            rows_of = {"B": source.shape[0]}
            check_input("source_lengths", source_lengths, "integer", "B", source, rows_of)
        with evaluating(model):
            memory = model.encode(source, source_lengths)
        self._model = model
        self._memory = memory if rows == 1 else memory.repeat_rows(rows)
        B = self._memory.batch_size
        self._caches = model.new_cache(B, self.count)
        self._tokens = torch.full((B, 1), begin, device=source.device)

    def scores(self) -> Tensor:
        """Return the logits [B, V] of the next tokens, and count the step's tokens as read."""
        with evaluating(self._model):
            logits = self._model.decode(self._tokens, self._memory, self._caches)[:, -1]
        check_finite(logits)
        return logits

    def go_on(self, tokens: list[int], parents: list[int] | None = None) -> None:
        """Prepare the next step: row b extends the former row parents[b] by tokens[b]."""
        if parents is not None and parents != list(range(len(parents))):
            index = torch.tensor(parents, device=self._tokens.device)
            for cache in self._caches:
                cache.reorder(index)
        self._tokens = torch.tensor(tokens, device=self._tokens.device)[:, None]
