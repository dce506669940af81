"""Speculative decoding: a small model drafts tokens, the large one checks them all at once.

Leviathan et al. 2023, arXiv 2211.17192, algorithm 1 (and Chen et al. 2023, arXiv 2302.01318): the
draft model draws x_1 .. x_n from its distributions q_i, the model scores all of them in one step,
which gives its own distributions p_1 .. p_{n+1}, and x_i is accepted with probability
min(1, p_i(x_i) / q_i(x_i)). The first rejected token is redrawn from max(0, p_i - q_i), normalised;
after n accepted ones one more is drawn from p_{n+1}. So every token follows the model's own
distribution, whatever the draft model proposes.

In a tree of drafts (Miao et al. 2023, arXiv 2305.09781) the children of a node are tried in turn,
each drawn without replacement (Jeon et al. 2024, arXiv 2402.14160), against the residual of p after
rejections. The model reads all nodes in one step, each seeing the text and its own ancestors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import mul

import torch
from torch import Tensor

from ..checks import check_count
from ..models.gpt import GPT
from ..models.sampling import Sampling, draw, uniform
from .drafts import Chain, Tree
from .request import Request, Tally, make_request
from .text import TextCodec, TextStream, encode_prompt


class SpeculativeDecoder:
    """A model and its draft model on one text.

    Args:
        model: the target model, run in evaluation mode.
        draft: a faster model with the same vocabulary, run in evaluation mode. Its context may
            differ; both follow `Window`.
        request: from `make_request`; its sampling applies to both models.
        drafts: the most tokens that the draft model proposes in sequence; or for a tree, the
            numbers of tokens after the text, after each of these, and so on. There are fewer at the
            ends of the text and of a context, so that the model's windows are as in
            `generate_tokens`.
        tally: counts drafted and accepted tokens.

    Raises:
        ValueError: the vocabularies differ, drafts is not positive, or a model reads no tree, see
            `drafts.Tree`.
    """

    def __init__(
        self, model: GPT, draft: GPT, request: Request, drafts: int | Sequence[int], tally: Tally
    ) -> None:
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"draft must have the model's vocabulary of {model.config.vocab_size} tokens, "
                f"got {draft.config.vocab_size}"
            )
        self._widths = _widths(drafts)
        self._request, self._tally = request, tally
        longest = len(request.prompt) + request.count
        nodes = None if max(self._widths) == 1 else sum(accumulate(self._widths, mul))
        self._model, self._draft = (
            Chain(x, longest) if nodes is None else Tree(x, longest, nodes) for x in (model, draft)
        )
        # Unread tokens of each model.
        self._unread, self._draft_unread = list(request.prompt), list(request.prompt)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Run a step of the model; return the tokens that it adds, at least one.

        Fewer at the end of the request, none if an end token comes first.
        """
        request = self._request
        left = request.count - len(request.tokens)
        # A step that reads a prompt, or starts a new window, only scores the next token.
        room = max(0, self._model.room - 1) if len(self._unread) == 1 else 0
        drafts, parents, q = self._propose(self._widths[: max(0, left - 1)], room)
        p = self._distributions(self._model.read(self._unread, drafts, parents), drafts, parents)
        numbers = uniform(len(drafts) + 1, request.generator).tolist()
        path, following = verify(p, q, drafts, numbers, parents)
        self._tally.drafted += len(drafts)
        self._tally.accepted += len(path)
        self._model.keep(path)
        held = self._draft.keep(path)
        tokens = [*(drafts[node] for node in path), following]
        self._unread, self._draft_unread = [following], self._draft_unread + tokens[held:]
        return list(takewhile(lambda token: not request.done and request.add(token), tokens))

    def _propose(
        self, widths: Sequence[int], room: int
    ) -> tuple[list[int], list[int], list[Tensor]]:
        """Drafted tokens, at most `room`, the number of each one's parent (-1: the text), and the
        distribution [V] that it was drawn from.
        """
        drafts: list[int] = []
        parents: list[int] = []
        distributions: list[Tensor] = []
        level = [-1]
        for width in widths:
            if len(drafts) == room or not self._draft.holds(len(drafts)):
                break
            unread, self._draft_unread = self._draft_unread, []
            logits = self._draft.read(unread, drafts, parents)[-len(level) :]
            first = len(drafts)
            for n in range(min(width, logits.shape[-1])):
                q = self._distributions(logits, drafts[:first], parents[:first])
                numbers = uniform(len(level), self._request.generator).to(q.device)
                tokens = draw(q, numbers)
                drafts += tokens.tolist()
                parents += level
                distributions += q.unbind()
                if n + 1 < width:  # the next ones are drawn without replacement
                    logits = logits.scatter(1, tokens[:, None], float("-inf"))
            level = list(range(first, len(drafts)))
            # As many as fit, each node's first ones.
            del drafts[room:], parents[room:], distributions[room:], level[max(0, room - first) :]
        return drafts, parents, distributions

    def _distributions(
        self, logits: Tensor, drafts: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """Probabilities [n, V] of the next token after the text and after each draft, or the last n
        of these.
        """
        request = self._request
        if request.seen is None:
            return request.sampling.probabilities(logits)
        seen = request.seen.repeat(len(drafts) + 1, 1)
        for i, (token, parent) in enumerate(zip(drafts, parents, strict=True), 1):
            seen[i] = seen[parent + 1]
            seen[i, token] = True
        return request.sampling.probabilities(logits, seen[-len(logits) :])


def _widths(drafts: int | Sequence[int]) -> list[int]:
    """Number of children per node on each level."""
    if isinstance(drafts, Sequence):
        widths = [check_count("a number of drafts", width, 1) for width in drafts]
        if not widths:
            raise ValueError("drafts must hold at least one number, got none")
        return widths
    return [1] * check_count("drafts", drafts, 1)


def verify(
    p: Tensor,
    q: Sequence[Tensor],
    drafts: Sequence[int],
    numbers: Sequence[float],
    parents: Sequence[int],
) -> tuple[list[int], int]:
    """The accepted path of drafts, and the token that follows it.

    Args:
        p: [n + 1, V], the model's distributions after the text and after each of the n drafts.
        q: n distributions [V] of the drafts.
        drafts: n tokens.
        numbers: n + 1 independent numbers, uniform in [0, 1).
        parents: number of each draft's parent; -1: the text.
    """
    path: list[int] = []
    wanted = p[0]
    index = torch.tensor(drafts, dtype=torch.int64, device=p.device)
    before = torch.tensor(parents, dtype=torch.int64, device=p.device) + 1
    proposed = torch.stack(list(q)).gather(1, index[:, None])[:, 0].tolist() if drafts else []
    shares = p[before, index].tolist()
    rejected = False
    for i, token in enumerate(drafts):
        if parents[i] != (path[-1] if path else -1):
            continue
        share = float(wanted[token]) if rejected else shares[i]
        # As a product, as the quotient may overflow for small q.
        rejected = numbers[i] * proposed[i] >= share
        if not rejected:
            path.append(i)
            wanted = p[i + 1]
            continue
        left = (wanted - q[i]).clamp(min=0)
        # By rounding, nothing may be left if p and q are equal.
        wanted = left / left.sum() if bool(left.any()) else wanted
    last = torch.tensor(numbers[-1:], dtype=torch.float64, device=p.device)
    return path, int(draw(wanted.unsqueeze(0), last))


def speculative_tokens(
    model: GPT,
    draft: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    drafts: int | Sequence[int] = 4,
    sampling: Sampling | None = None,
    seed: int | None = None,
    end_token: int | Collection[int] | None = None,
    tally: Tally | None = None,
) -> Iterator[int]:
    """`generate_tokens` with speculative decoding.

    The tokens follow the same distribution; with greedy sampling they are equal, except for ties
    decided by rounding. With other settings a seed gives a different text.

    Args:
        draft: a faster model with the same vocabulary, run in evaluation mode.
        drafts: the most tokens that it proposes in sequence; or for a tree, the numbers of tokens
            after the text, after each of these, and so on: (3, 2) are three tokens with two after
            each, nine in all, and a step accepts at most two. The model reads all in one step.
        tally: counts all, drafted and accepted tokens; see `Tally.acceptance_rate`.
        model, prompt, count, sampling, seed, end_token: as for `generate_tokens`.

    Yields:
        token ids.

    Raises:
        ValueError: the vocabularies differ, drafts is not positive, a tree is for a model that sees
            tokens by their distance (a window, a stride, ALiBi, relative positions) or scores them
            additively, or as `generate_tokens`.
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
    drafts: int | Sequence[int] = 4,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    end_token: int | Collection[int] | None = None,
    tally: Tally | None = None,
) -> Iterator[str]:
    """`generate_text` with speculative decoding.

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
