"""Beam search for the most likely continuations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_count, check_int, check_number
from ..models.gpt import GPT
from .request import make_request
from .text import TextCodec, TextStream, encode_prompt, text_until_stop
from .window import Window


@dataclass(frozen=True)
class Beam:
    """A continuation by beam search.

    Args:
        tokens: ids, without the end token.
        log_probability: natural log of the probability of these tokens, and of the end token if
            any, given the prompt.
        score: log_probability over `length_divisor`, which ranks beams.
    """

    tokens: list[int]
    log_probability: float
    score: float


def length_divisor(length: int, length_penalty: float) -> float:
    """The divisor of a log-probability by Wu et al. 2016, arXiv 1609.08144, equation 14."""
    # With 0 the most likely continuation wins, often a short one; positive penalties favour long
    # ones.
    return ((5 + length) / 6) ** length_penalty


@torch.inference_mode()
def beam_search(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.0,
    end_token: int | None = None,
    is_end: Callable[[list[int]], bool] | None = None,
) -> list[Beam]:
    """Search for the continuations with the highest scores.

    Each step extends every beam by each token, and keeps the `beams` best unfinished ones by
    log-probability, and finished ones by score. The search ends when no beam can come to a
    score among the kept ones. With at least vocab_size ** (count - 1) beams nothing is ever
    dropped, so the result is exact. The model's context works as for `generate_tokens`.

    Args:
        model: run in evaluation mode.
        prompt: token ids, at least one.
        count: the most tokens of a continuation, the end token counted. One that is cut off there
            counts as ended.
        beams: number of unfinished beams.
        length_penalty: see `length_divisor`; the length counts the new tokens, with the end
            token.
        end_token: ends a continuation and is not among its tokens.
        is_end: whether a continuation's tokens end it, such as by a stop string in their text.

    Returns:
        At most `beams` continuations, the best first; of equals the one found first.

    Raises:
        ValueError: beams is not positive, length_penalty is not finite, the prompt is empty, a
            token is unknown to the model, or count is negative.
        FloatingPointError: the model's scores are not finite.
    """
    check_beams(beams, length_penalty)
    end_token = None if end_token is None else check_int("end_token", end_token)
    prompt = make_request(model, prompt, count, end_token=end_token).prompt
    if count == 0:
        return [Beam([], 0.0, 0.0)]
    search = Search(beams, count, length_penalty, end_token, is_end)
    window = Window(model, beams, len(prompt) + count)
    fresh: list[list[int]] = [prompt] * beams
    while True:
        logits = window.read(fresh)
        parents = search.step(logits.double().log_softmax(dim=-1))
        if not parents:
            return search.ended
        window.reorder(parents)
        fresh = [tokens[-1:] for tokens in search.tokens]


def check_beams(beams: int, length_penalty: float) -> None:
    """Raise TypeError or ValueError unless both are valid."""
    check_count("beams", beams, 1)
    if not math.isfinite(check_number("length_penalty", length_penalty)):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}")


def beam_texts(
    model: GPT,
    tokenizer: TextCodec,
    prompt: str,
    count: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.0,
    stop: Sequence[str] = (),
    end_token: int | None = None,
) -> list[tuple[str, Beam]]:
    """Search for the best continuations of a text, the best first, each with its text.

    Args:
        tokenizer: of the model.
        prompt: as for `generate_text`.
        stop: strings that end a continuation; neither they nor what follows them is in its text.
        model, count, beams, length_penalty, end_token: as for `beam_search`.

    Raises:
        ValueError: the tokenizer does not know a character of the prompt, a stop string is empty,
            or as `beam_search`.
        FloatingPointError: the model's scores are not finite.
    """
    TextStream(tokenizer, stop)

    def is_end(tokens: list[int]) -> bool:
        stream = TextStream(tokenizer, stop, prompt)
        for token in tokens:
            stream.feed(token)
        return stream.stopped

    searched = beam_search(
        model,
        encode_prompt(tokenizer, prompt),
        count,
        beams=beams,
        length_penalty=length_penalty,
        end_token=end_token,
        is_end=is_end if stop else None,
    )
    return [(text_until_stop(tokenizer, beam.tokens, stop, prompt), beam) for beam in searched]


class Search:
    """The beams that go on, and the best that have ended; independent of any model.

    There are as many rows as beams. Rows that no continuation is left for hold a copy of row 0 with
    log-probability -inf, so that nothing comes of them: at first all rows but one.
    """

    def __init__(
        self,
        beams: int,
        count: int,
        length_penalty: float,
        end_token: int | None,
        is_end: Callable[[list[int]], bool] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[]] * beams
        self.ended: list[Beam] = []
        self._totals = [0.0] + [-math.inf] * (beams - 1)
        self._beams, self._count, self._penalty = beams, count, length_penalty
        self._end_token, self._is_end = end_token, is_end

    def step(self, log_probabilities: Tensor) -> list[int]:
        """Extend every row by a token, given log-probabilities, fp64 [beams, V].

        Returns:
            For each row, the row that it continues; none where the search is over.
        """
        length = len(self.tokens[0]) + 1
        going: list[tuple[float, int, list[int]]] = []
        for total, row, token in self._best(log_probabilities, length, going):
            tokens = [*self.tokens[row], token]
            if token == self._end_token:
                self._end(tokens[:-1], total, length)
            elif length == self._count or (self._is_end is not None and self._is_end(tokens)):
                self._end(tokens, total, length)
            elif len(going) < self._beams:
                going.append((total, row, tokens))
        if not going or not self._hopeful(going[0][0], length):
            return []
        going += [(-math.inf, *going[0][1:])] * (self._beams - len(going))
        self._totals = [total for total, _, _ in going]
        self.tokens = [tokens for _, _, tokens in going]
        return [row for _, row, _ in going]

    def _best(
        self, log_probabilities: Tensor, length: int, going: list[tuple[float, int, list[int]]]
    ) -> Iterator[tuple[float, int, int]]:
        """Return (log-probability, row, token) of the best continuations, the best first.

        Twice as many as there are beams leave enough that go on even if every row's end token is
        among them. Only `is_end` can take more away: then more are looked at, until enough go on.
        """
        V = log_probabilities.shape[1]
        totals = torch.tensor(self._totals, dtype=torch.float64, device=log_probabilities.device)
        flat = (log_probabilities + totals.unsqueeze(1)).flatten()
        begin, end = 0, 2 * self._beams
        while begin < flat.numel() and not going[self._beams - 1 :]:
            best = flat.topk(min(end, flat.numel()))
            for value, index in zip(
                best.values[begin:].tolist(), best.indices[begin:].tolist(), strict=True
            ):
                if value == -math.inf:
                    return
                yield value, *divmod(index, V)
            if length == self._count:
                return
            begin, end = end, 2 * end

    def _end(self, tokens: list[int], total: float, length: int) -> None:
        score = total / length_divisor(length, self._penalty)
        self.ended.append(Beam(tokens, total, score))
        self.ended.sort(key=lambda beam: -beam.score)
        del self.ended[self._beams :]

    def _hopeful(self, total: float, length: int) -> bool:
        """Whether a beam of this log-probability can end among the kept ones.

        It only loses by going on, and the divisor is largest or smallest at the greatest length.
        """
        if len(self.ended) < self._beams:
            return True
        divisors = [length_divisor(n, self._penalty) for n in (length + 1, self._count)]
        return total / max(divisors) > self.ended[-1].score
