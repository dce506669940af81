"""Speculative decoding: a small model drafts tokens, the large one checks them all at once.

Leviathan et al. 2023, arXiv 2211.17192, algorithm 1 (and Chen et al. 2023, arXiv 2302.01318): the
draft model draws x_1 .. x_n from its distributions q_i, the model scores all of them in one step,
which gives its own distributions p_1 .. p_{n+1}, and x_i is accepted with probability
min(1, p_i(x_i) / q_i(x_i)). The first token that is not is drawn anew from max(0, p_i - q_i),
scaled to sum to 1; behind n accepted ones one more is drawn from p_{n+1}. So every token follows
the model's own distribution, whatever the draft model proposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..models.gpt import GPT
from ..models.sampling import Sampling, draw, uniform
from .request import Request, Tally, make_request
from .text import TextCodec, TextStream, encode_prompt
from .window import Window


class SpeculativeDecoder:
    """A model and its draft model on one text.

    Args:
        model: whose text it is, in evaluation mode.
        draft: a faster model with the same vocabulary, in evaluation mode. Its context may differ:
            it reads on by the rule of `Window`, as the model does.
        request: from `make_request`; its sampling applies to both models.
        drafts: tokens that the draft model proposes at a time, at most. There are fewer at the end
            of the text and where the model's context ends, so that the model's windows are those
            of `generate_tokens`.
        tally: counts drafted and accepted tokens.

    Raises:
        ValueError: the vocabularies differ, or drafts is not positive.
    """

    def __init__(self, model: GPT, draft: GPT, request: Request, drafts: int, tally: Tally) -> None:
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"draft must have the model's vocabulary of {model.config.vocab_size} tokens, "
                f"got {draft.config.vocab_size}"
            )
        if drafts < 1:
            raise ValueError(f"drafts must be at least 1, got {drafts}")
        self._request, self._drafts, self._tally = request, drafts, tally
        longest = len(request.prompt) + request.count
        self._model, self._draft = Window(model, 1, longest), Window(draft, 1, longest)
        # What each of them has not read of the text.
        self._unread, self._draft_unread = list(request.prompt), list(request.prompt)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """One step of the model: the tokens that it adds to the text, at least one.

        Fewer where the request is done before the last of them, none if its end token comes first.
        """
        request = self._request
        left = request.count - len(request.tokens)
        # One that has a prompt to read, or starts a new window, scores only what follows it.
        room = self._model.room(0) - 1 if len(self._unread) == 1 else 0
        drafts, q = self._propose(max(0, min(self._drafts, left - 1, room)))
        logits = self._model.read([self._unread + drafts], last_only=not drafts)
        p = self._distributions(logits.reshape(-1, logits.shape[-1]), drafts)
        numbers = uniform(len(drafts) + 1, request.generator).tolist()
        accepted, following = verify(p, q, drafts, numbers)
        self._tally.drafted += len(drafts)
        self._tally.accepted += accepted
        self._take_back(drafts, accepted, following)
        added = []
        for token in [*drafts[:accepted], following]:
            if request.done or not request.add(token):
                break
            added.append(token)
        return added

    def _propose(self, count: int) -> tuple[list[int], list[Tensor]]:
        """Tokens of the draft model, and the distribution [V] that each was drawn from."""
        drafts: list[int] = []
        distributions: list[Tensor] = []
        unread = self._draft_unread
        for _ in range(count):
            logits = self._draft.read([unread])
            q = self._distributions(logits, drafts)[-1]
            number = uniform(1, self._request.generator).to(q.device)
            unread = draw(q.unsqueeze(0), number).tolist()
            drafts += unread
            distributions.append(q)
        return drafts, distributions

    def _distributions(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Probabilities [n, V] of the next token behind the text and 0, 1, 2, ... of the drafts.

        The last row is for the text followed by all drafts.
        """
        request = self._request
        if request.seen is None:
            return request.sampling.probabilities(logits)
        seen = request.seen.repeat(len(drafts) + 1, 1)
        for i, token in enumerate(drafts):
            seen[i + 1 :, token] = True
        return request.sampling.probabilities(logits, seen[-len(logits) :])

    def _take_back(self, drafts: list[int], accepted: int, token: int) -> None:
        """Leaves both models with the accepted tokens, and the next one to read."""
        rejected = len(drafts) - accepted
        if rejected:
            self._model.take_back([rejected])
        self._unread = [token]
        if not drafts:
            self._draft_unread = [*self._draft_unread, token]
        elif rejected:
            # It has not read its last proposal.
            if rejected > 1:
                self._draft.take_back([rejected - 1])
            self._draft_unread = [token]
        else:
            self._draft_unread = [drafts[-1], token]


def verify(
    p: Tensor, q: Sequence[Tensor], drafts: Sequence[int], numbers: Sequence[float]
) -> tuple[int, int]:
    """How many of the drafts are accepted, and the token that follows those.

    Args:
        p: [n + 1, V], the model's distributions at and behind the n drafts.
        q: n distributions [V], which the drafts were drawn from.
        drafts: n tokens.
        numbers: n + 1 independent ones, uniform in [0, 1).
    """
    index = torch.tensor(drafts, dtype=torch.int64, device=p.device)
    proposed = torch.stack(list(q))[range(len(drafts)), index].tolist() if drafts else []
    wanted = p[range(len(drafts)), index].tolist()
    for i in range(len(drafts)):
        # As a product, since q may be so small that the quotient overflows.
        if numbers[i] * proposed[i] < wanted[i]:
            continue
        left = (p[i] - q[i]).clamp(min=0)
        # Rounding alone can leave nothing, where p and q are equal.
        return i, _draw_one(left if bool(left.any()) else p[i], numbers[-1])
    return len(drafts), _draw_one(p[-1], numbers[-1])


def _draw_one(distribution: Tensor, number: float) -> int:
    device = distribution.device
    one = torch.tensor([number], dtype=torch.float64, device=device)
    return int(draw(distribution.unsqueeze(0), one))


def speculative_tokens(
    model: GPT,
    draft: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    drafts: int = 4,
    sampling: Sampling | None = None,
    seed: int | None = None,
    end_token: int | None = None,
    tally: Tally | None = None,
) -> Iterator[int]:
    """Continues a prompt as `generate_tokens` does, with a draft model's help.

    The tokens follow the same distribution; with greedy sampling they are the same tokens, but for
    ties that rounding decides. With the other settings a seed gives another text than there.

    Args:
        draft: a faster model with the same vocabulary, in evaluation mode.
        drafts: tokens that it proposes at a time, at most.
        tally: counts tokens, drafted and accepted ones; see `Tally.acceptance_rate`.
        model, prompt, count, sampling, seed, end_token: as for `generate_tokens`.

    Yields:
        token ids.

    Raises:
        ValueError: the vocabularies differ, drafts is not positive, or as `generate_tokens`.
        FloatingPointError: a model's scores are not finite.
    """
    request = make_request(model, prompt, count, sampling=sampling, seed=seed, end_token=end_token)
    tally = Tally() if tally is None else tally
    decoder = SpeculativeDecoder(model, draft, request, drafts, tally)
    while not request.done:
        for token in decoder.step():
            tally.tokens += 1
            yield token


def speculative_text(
    model: GPT,
    draft: GPT,
    tokenizer: TextCodec,
    prompt: str,
    count: int,
    *,
    drafts: int = 4,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    end_token: int | None = None,
    tally: Tally | None = None,
) -> Iterator[str]:
    """Continues a text as `generate_text` does, with a draft model's help.

    Args, yields and errors: as `generate_text` and `speculative_tokens`.
    """
    stream = TextStream(tokenizer, stop, prompt)
    tokens = speculative_tokens(
        model,
        draft,
        encode_prompt(tokenizer, prompt),
        count,
        drafts=drafts,
        sampling=sampling,
        seed=seed,
        end_token=end_token,
        tally=tally,
    )
    for token in tokens:
        if piece := stream.feed(token):
            yield piece
        if stream.stopped:
            return
    if rest := stream.finish():
        yield rest
