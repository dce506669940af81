"""Speculative decoding: a small model drafts a tree of tokens, the large one checks it in one pass.

python examples/speculative.py runs/gpt runs/small "def main("   # two runs with one tokenizer

Leviathan et al. 2023, arXiv 2211.17192: a draft x from the small model's distribution q is accepted
with probability min(1, p(x) / q(x)), p being the large model's; after a rejection the token comes
from max(0, p - q), normalised: it follows p, whatever is drafted. In a tree (Miao et al. 2023,
arXiv 2305.09781) siblings, drawn without replacement, are tried in turn, each against what is left
of p. By a tree mask each draft sees the text and its own ancestors.
"""

# ruff: noqa: T201 (an example prints)

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch
from engine import packed_layers
from torch import Tensor

from fastattn.generation import Sampling
from fastattn.models.gpt import GPT
from fastattn.training.checkpoint import load_model


class Tree:
    """A model's cache of one text, and of a tree of drafts behind it."""

    def __init__(self, model: GPT, slots: int) -> None:
        c, absolute = model.config, ("learned", "sinusoidal", "rotary", "none")
        if c.window or c.stride or c.positions not in absolute or c.scoring == "additive":
            raise ValueError(f"a tree is for models that ignore distances in the cache, got {c}")
        if slots > c.context_length:
            raise ValueError(f"prompt, count and drafts must fit the context, got {slots} in {c}")
        self.model, self.cache = model.eval(), model.new_paged_cache(-(-slots // 16), max_rows=1)
        self.row, self.held = self.cache.allocate(), 0  # tokens of the text

    def read(self, tokens: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Scores [n, V] after the text's next tokens, if any, and drafts; parent -1: the text."""
        self.cache.truncate(self.row, self.held)
        n, total = len(tokens), len(tokens) + len(drafts)
        positions = list(range(self.held, self.held + n))
        self.held += n
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        for i, parent in enumerate(parents, start=n):
            sees[i, n:i] = sees[n + parent, n:i] if parent >= 0 else False
            positions.append(positions[n + parent] + 1 if parent >= 0 else self.held)
        device = self.cache.k.device
        layers = packed_layers(self.cache, [self.row], [total], positions, sees.to(device))
        packed = torch.tensor([*tokens, *drafts], device=device)[:, None]
        logits = self.model(packed, cache=layers)[0][max(0, n - 1) :, -1]
        if not logits.isfinite().all():
            raise FloatingPointError("a model's scores are not finite")
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """Make these drafts part of the text, and drop the others."""
        self.cache.compact(self.row, self.held, [self.held + node for node in path])
        self.held += len(path)


def verify(
    p: Tensor, q: list[Tensor], drafts: list[int], parents: list[int], numbers: list[float]
) -> tuple[list[int], Tensor]:
    """The accepted path, and the distribution [V] of what follows; numbers: uniform in [0, 1)."""
    path, wanted = [], p[0]
    for i, (token, parent) in enumerate(zip(drafts, parents, strict=True)):
        if parent == (path[-1] if path else -1):
            if numbers[i] * q[i][token] < wanted[token]:
                path.append(i)
                wanted = p[i + 1]
            elif (left := (wanted - q[i]).clamp(min=0)).any():  # by rounding nothing, if p equals q
                wanted = left / left.sum()
    return path, wanted


@torch.inference_mode()
def speculative_tokens(
    model: GPT, small: GPT, prompt: Sequence[int], count: int, *, widths: Sequence[int] = (3, 2),
    how: Sampling | None = None, seed: int = 0,
) -> Iterator[int]:  # fmt: skip
    """`generate_tokens` with drafts: widths[0] after the text, widths[1] after each, and so on."""
    how, generator = how or Sampling(), torch.Generator().manual_seed(seed)
    if how.needs_seen:
        raise ValueError(f"sampling must have no repetition_penalty, got {how}")
    if not prompt or model.config.vocab_size != small.config.vocab_size:
        raise ValueError("prompt must hold a token, and both models the same vocabulary")
    slots = len(prompt) + count + sum(accumulate(widths, mul))
    large, drafter = Tree(model, slots), Tree(small, slots)
    unread, behind = list(prompt), list(prompt)  # of the text by each model
    while count > 0:
        drafts, parents, q, level, read = [], [], [], [-1], 0
        for width in widths[: count - 1]:
            logits = drafter.read(behind, drafts, parents)[-len(level) :]
            behind, read = [], len(drafts)
            for _ in range(min(width, logits.shape[1])):
                chosen = how.choose(logits, generator)
                q += how.probabilities(logits).cpu()
                drafts, parents = drafts + chosen.tolist(), parents + level
                logits = logits.scatter(1, chosen[:, None], -torch.inf)  # the next one is another
            level = list(range(read, len(drafts)))
        p = how.probabilities(large.read(unread, drafts, parents)).cpu()
        numbers = torch.rand(len(drafts), generator=generator).tolist()
        path, following = verify(p, q, drafts, parents, numbers)
        large.keep(path)
        drafter.keep(held := [node for node in path if node < read])
        unread = [int(following.multinomial(1, generator=generator))]
        new = [drafts[node] for node in path] + unread
        behind, count = new[len(held) :], count - len(new)
        yield from new


if __name__ == "__main__":
    (model, tokenizer), (small, _) = map(load_model, sys.argv[1:3])
    for seed, prompt in enumerate(sys.argv[3:]):
        ids = tokenizer.encode(prompt)
        n = min(60, model.config.context_length - len(ids) - 9)
        print(prompt + tokenizer.decode([*speculative_tokens(model, small, ids, n, seed=seed)]))
