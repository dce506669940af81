"""Sampling of the next token: temperature, filters such as top-k and top-p, and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flag, check_int, check_number
from .transfer import to_device

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "epsilon_cutoff")
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLOATS, check_number),
    "top_k": check_int,
    "greedy": check_flag,
}
_NOT_FINITE = "the model's scores are not finite: its training has diverged"


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Filters apply one after the other: repetition penalty, temperature, top-k, top-p, min-p, epsilon
    cutoff. The highest score always stays.

    Args:
        temperature: divides the scores; below 1 sharpens the distribution, above 1 flattens it.
        top_k: keep the k highest scores, and ties with the k-th; None = all.
        top_p: keep the fewest highest scores whose probabilities add up to at least top_p (nucleus
            sampling, Holtzman et al. 2020, arXiv 1904.09751); None = all.
        min_p: keep tokens at least min_p times as likely as the top one (Nguyen et al. 2024, arXiv
            2407.01082); None = all.
        epsilon_cutoff: keep tokens of at least this probability (epsilon sampling, Hewitt et al.
            2022, arXiv 2210.15191; some courses call it top-p); None = all.
        repetition_penalty: divide positive scores of tokens in the text by it, and multiply
            negative ones, so that values above 1 lower both. Keskar et al. 2019, arXiv 1909.05858,
            section 4.1, only divide, which raises negative scores.
        greedy: take the highest score, the first of equals; only repetition_penalty applies then.

    Raises:
        TypeError: a setting has a wrong type.
        ValueError: a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False
    min_p: float | None = None
    repetition_penalty: float = 1.0
    epsilon_cutoff: float | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            given = getattr(self, name)
            if given is not None or name in ("temperature", "repetition_penalty", "greedy"):
                object.__setattr__(self, name, check(name, given))
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, got {self.temperature}; "
                "greedy=True takes the most likely token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name in ("top_p", "min_p", "epsilon_cutoff"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {share}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be positive and finite, got {self.repetition_penalty}"
            )

    @property
    def needs_seen(self) -> bool:
        """Whether the choice depends on the tokens in the text."""
        return self.repetition_penalty != 1

    def filter(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Filter scores; ignores `greedy`.

        Args:
            logits: [B, V], any floating dtype.
            seen: bool [B, V], True = the token is in the row's text; None = no text.

        Returns:
            fp32 [B, V] (fp64 for fp64 logits), -inf for excluded tokens.
        """
        scores = self._penalised(logits, seen) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            lowest = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < lowest, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ranked, index = scores.sort(dim=-1, descending=True, stable=True)
            probabilities = ranked.softmax(dim=-1)
            # A token is dropped if those before it reach top_p, so never the first.
            before = probabilities.cumsum(dim=-1) - probabilities
            ranked = ranked.masked_fill(before >= self.top_p, -math.inf)
            scores = torch.empty_like(scores).scatter_(-1, index, ranked)
        if self.min_p is not None:
            lowest = scores.amax(dim=-1, keepdim=True) + math.log(self.min_p)
            scores = scores.masked_fill(scores < lowest, -math.inf)
        if self.epsilon_cutoff is not None:
            unlikely = scores.softmax(dim=-1) < self.epsilon_cutoff
            unlikely &= scores < scores.amax(dim=-1, keepdim=True)
            scores = scores.masked_fill(unlikely, -math.inf)
        return scores

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Compute the distribution of the next token; one-hot if greedy.

        Args, and the result's shape and dtype: as `filter`.
        """
        if not self.greedy:
            return self.filter(logits, seen).softmax(dim=-1)
        scores = self._penalised(logits, seen)
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)

    def choose(
        self,
        logits: Tensor,
        generator: torch.Generator | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Draw a token per row.

        Args:
            logits, seen: as `filter`.
            generator: on any device; None = torch's CPU generator.

        Returns:
            int64 [B].
        """
        if self.greedy:
            return self._penalised(logits, seen).argmax(dim=-1)
        numbers = uniform(logits.shape[0], generator)
        return draw(self.probabilities(logits, seen), numbers.to(logits.device))

    def _penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if seen is None or not self.needs_seen:
            return scores
        factor = self.repetition_penalty
        return torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)


def check_finite(logits: Tensor) -> None:
    """Raise FloatingPointError if a score is not finite."""
    if not logits.isfinite().all():
        raise FloatingPointError(_NOT_FINITE)


def uniform(count: int, generator: torch.Generator | None = None) -> Tensor:
    """fp64 [count] in [0, 1), on the generator's device, or the CPU if it is None."""
    device = "cpu" if generator is None else generator.device
    return torch.rand(count, generator=generator, device=device, dtype=torch.float64)


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Sample a token per row, int64 [B], by inverse transform of numbers, fp64 [B], of `uniform`.

    probabilities: [B, V], non-negative, with any positive sum; those of 0 are never sampled.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    # Less than the sum after rounding too, as 2**-53 of it is at least half its last bit.
    target = numbers.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def choose_rows(
    logits: Tensor,
    settings: Sequence[Sampling],
    generators: Sequence[torch.Generator | None],
    seen: Sequence[Tensor | None] = (),
) -> list[int]:
    """Draw a token per row of logits [B, V], each with its own settings and generator.

    Rows with equal settings are filtered together. seen: bool [V] for rows whose setting
    `needs_seen`; or empty.

    Returns:
        B tokens, the same as `Sampling.choose` draws for each row alone.

    Raises:
        FloatingPointError: a score is not finite.
    """
    groups: dict[Sampling, list[int]] = {}
    for row, setting in enumerate(settings):
        groups.setdefault(setting, []).append(row)
    chosen, order = [], []
    for setting, rows in groups.items():
        alone = len(groups) == 1
        part = logits if alone else logits.index_select(0, to_device(rows, logits.device))
        held = [seen[row] for row in rows] if setting.needs_seen and seen else []
        part_seen = torch.stack([mask for mask in held if mask is not None]) if held else None
        if setting.greedy:
            chosen.append(setting.choose(part, seen=part_seen))
        else:
            drawn = torch.cat([uniform(1, generators[row]).cpu() for row in rows])
            numbers = to_device(drawn, logits.device)
            chosen.append(draw(setting.probabilities(part, part_seen), numbers))
        order += rows
    # The only synchronisation of a generation step.
    *tokens, finite = torch.cat([*chosen, logits.isfinite().all().long()[None]]).tolist()
    if not finite:
        raise FloatingPointError(_NOT_FINITE)
    return [token for _, token in sorted(zip(order, tokens, strict=True))]


def make_generator(seed: int | None) -> torch.Generator | None:
    """Make a seeded CPU generator, for the same results on every device; None without a seed."""
    return None if seed is None else torch.Generator().manual_seed(check_int("seed", seed) % 2**64)
