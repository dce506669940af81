"""Rotary frequencies for contexts longer than in training.

Each class maps the frequencies base ** (-2 i / R) of the R / 2 channel pairs to others, and may
lengthen the rotated vectors. Arguments have the names of `rope_scaling` in checkpoints.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RotaryScaling(Protocol):
    """Interface that `rotary_tables` needs from a scaling."""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines, and so on rotated queries and keys."""
        ...

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """Radians per position, fp64 [rotary_dim // 2], fastest pair first."""
        ...


def plain_frequencies(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    """base ** (-2 i / rotary_dim) for every pair i, fp64 [rotary_dim // 2]."""
    exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64)
    return base ** (-exponent / rotary_dim)


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595, equation 4).

    Raises:
        ValueError: factor < 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        return plain_frequencies(rotary_dim, base, device) / self.factor


@dataclass(frozen=True)
class NTKScaling:
    """A larger base: the slowest pair turns `factor` times slower, the fastest is unchanged.

    base' = base * factor ** (R / (R - 2)), as in Peng et al. 2023, arXiv 2309.00071, section 3.1.
    The base is fixed: a base that depends on the sequence's length would not fit stored keys.

    Raises:
        ValueError: factor < 1; in `frequencies`: rotary_dim = 2, which has one pair only.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        if rotary_dim == 2:
            raise ValueError("rotary_dim must be at least 4 for NTKScaling, got 2")
        grown = base * self.factor ** (rotary_dim / (rotary_dim - 2))
        return plain_frequencies(rotary_dim, grown, device)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: slow pairs interpolated, fast ones kept, a linear ramp between; vectors lengthened.

    Peng et al. 2023, arXiv 2309.00071, section 3.2 and 3.4, with the ramp of their published code:
    it runs over pair numbers, between the pairs that turn beta_fast and beta_slow times in
    original_max_position_embeddings positions.

    Args:
        factor: ratio of the new and the original context lengths.
        original_max_position_embeddings: the context length in training.
        beta_fast, beta_slow: pairs with at least beta_fast turns are kept; pairs with at most
            beta_slow turns are interpolated in full.
        attention_factor: the amplitude; default 0.1 ln(factor) + 1.
        truncate: round the ends of the ramp outwards to whole pair numbers.

    Raises:
        ValueError: a number is out of its range.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow must be > 0 and < beta_fast = {self.beta_fast}, got {self.beta_slow}"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be > 0, got {self.attention_factor}")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        first = self._pair(self.beta_fast, rotary_dim, base)
        last = self._pair(self.beta_slow, rotary_dim, base)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        pair = torch.arange(rotary_dim // 2, device=device, dtype=torch.float64)
        # A ramp of length 0 would divide by zero: the published code uses a steep one.
        interpolated = ((pair - first) / (max(last - first, 0) or 0.001)).clamp(0, 1)
        plain = plain_frequencies(rotary_dim, base, device)
        return plain * (1 - interpolated) + plain / self.factor * interpolated

    def _pair(self, turns: float, rotary_dim: int, base: float) -> float:
        """The fractional pair number with so many turns in the original context."""
        length = self.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: pairs divided by `factor` or kept according to their wavelength.

    As in the model's published code (idea: Grattafiori et al. 2024, arXiv 2407.21783). A pair turns
    n = original_max_position_embeddings / wavelength times. It is divided if n < low_freq_factor,
    kept if n > high_freq_factor, and mixed linearly in n between.

    Raises:
        ValueError: a number is out of its range.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be > 0 and < high_freq_factor = {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        plain = plain_frequencies(rotary_dim, base, device)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)


def _check_factor(factor: float) -> None:
    if not (factor >= 1 and math.isfinite(factor)):
        raise ValueError(f"factor must be finite and >= 1, got {factor}")


def _check_original(length: int) -> None:
    if length < 1:
        raise ValueError(f"original_max_position_embeddings must be >= 1, got {length}")
