"""From scores of the next token to a token: greedy, temperature, top-k, top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    The filters apply in the order temperature, top-k, top-p; the highest score always stays.

    Args:
        temperature: divides the scores; below 1 prefers likely tokens, above 1 evens them out.
        top_k: keep the k highest scores, and those equal to the k-th; None = all.
        top_p: keep the fewest highest scores whose probabilities add up to at least top_p (nucleus
            sampling, Holtzman et al. 2020, arXiv 1904.09751); None = all.
        greedy: take the highest score, the first of equals; the other settings do not matter then.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, got {self.temperature}; "
                "for the most likely token every time use greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draws a token a row.

        Args:
            logits: [B, V], any floating dtype.
            generator: on logits' device; None = torch's own.

        Returns:
            int64 [B].
        """
        if self.greedy:
            return logits.argmax(dim=-1)
        probabilities = self.filter(logits).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    def filter(self, logits: Tensor) -> Tensor:
        """Scores [B, V] in fp32, divided by the temperature, -inf where a token is ruled out."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            lowest = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < lowest, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ranked, index = scores.sort(dim=-1, descending=True, stable=True)
            probabilities = ranked.softmax(dim=-1)
            # A token goes if those before it already reach top_p, so the first never does.
            before = probabilities.cumsum(dim=-1) - probabilities
            ranked = ranked.masked_fill(before >= self.top_p, -math.inf)
            scores = torch.empty_like(scores).scatter_(-1, index, ranked)
        return scores
