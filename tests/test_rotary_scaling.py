"""Scaled rotary frequencies against formulas written out pair by pair, and at numbers known."""

import math

import pytest
import torch

from fastattn.rotary import rotary_tables
from fastattn.rotary_scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling

CPU = torch.device("cpu")


def frequencies(scaling, rotary_dim: int, base: float) -> list[float]:
    return scaling.frequencies(rotary_dim, base, CPU).tolist()


def linear(pair: int, R: int, base: float, factor: float) -> float:
    return base ** (-2 * pair / R) / factor


def ntk(pair: int, R: int, base: float, factor: float) -> float:
    return (base * factor ** (R / (R - 2))) ** (-2 * pair / R)


def yarn(pair: int, R: int, base: float, factor: float, length: int, fast=32, slow=1) -> float:
    """The mixture by pair numbers, ends rounded outwards."""

    def pair_that_turns(times: float) -> float:
        return R / 2 * math.log(length / (2 * math.pi * times), base)

    first = max(math.floor(pair_that_turns(fast)), 0)
    last = min(math.ceil(pair_that_turns(slow)), R - 1)
    plain = base ** (-2 * pair / R)
    if pair <= first:
        return plain
    if pair >= last:
        return plain / factor
    weight = (pair - first) / (last - first)
    return weight * plain / factor + (1 - weight) * plain


def llama3(pair: int, R: int, base: float, factor: float, length: int, low: float, high: float):
    plain = base ** (-2 * pair / R)
    wavelength = 2 * math.pi / plain
    if wavelength < length / high:
        return plain
    if wavelength > length / low:
        return plain / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


@pytest.mark.parametrize(
    ("scaling", "formula", "arguments"),
    [
        pytest.param(LinearScaling(4.0), linear, (4.0,), id="linear"),
        pytest.param(NTKScaling(8.0), ntk, (8.0,), id="ntk"),
        pytest.param(YarnScaling(4.0, 4096), yarn, (4.0, 4096), id="yarn"),
        pytest.param(YarnScaling(40.0, 2048, 16, 2), yarn, (40.0, 2048, 16, 2), id="yarn-betas"),
        pytest.param(YarnScaling(2.0, 64, 32, 1), yarn, (2.0, 64, 32, 1), id="yarn-short"),
        pytest.param(Llama3Scaling(8.0, 8192), llama3, (8.0, 8192, 1.0, 4.0), id="llama3"),
        pytest.param(Llama3Scaling(32, 512, 2, 6), llama3, (32.0, 512, 2, 6), id="llama3-factors"),
    ],
)
@pytest.mark.parametrize(("R", "base"), [(64, 10000.0), (128, 500000.0)])
def test_equals_the_formula(scaling, formula, arguments, R, base):
    expected = [formula(pair, R, base, *arguments) for pair in range(R // 2)]
    assert frequencies(scaling, R, base) == pytest.approx(expected, rel=1e-12)
    plain = [base ** (-2 * pair / R) for pair in range(R // 2)]
    assert expected != pytest.approx(plain, rel=1e-3), "the case would pass without scaling"


def test_yarn_ramp_that_is_not_rounded():
    """Between the ends the weight is that of the exact pair numbers."""
    R, base, factor, length = 64, 10000.0, 4.0, 4096
    first, last = (R / 2 * math.log(length / (2 * math.pi * n), base) for n in (32, 1))
    pair = 16
    weight = (pair - first) / (last - first)
    plain = base ** (-2 * pair / R)
    got = frequencies(YarnScaling(factor, length, truncate=False), R, base)[pair]
    assert got == pytest.approx(plain * (1 - weight) + plain / factor * weight, rel=1e-12)
    assert got != pytest.approx(frequencies(YarnScaling(factor, length), R, base)[pair], rel=1e-6)


def test_yarn_lengthens_and_the_others_do_not():
    assert YarnScaling(4.0, 4096).amplitude == pytest.approx(1.1386294361)
    assert YarnScaling(1.0, 4096).amplitude == 1.0
    assert YarnScaling(4.0, 4096, attention_factor=0.5).amplitude == 0.5
    assert {s.amplitude for s in (LinearScaling(2), NTKScaling(2), Llama3Scaling(2, 8))} == {1.0}


@pytest.mark.parametrize("scaling", [YarnScaling(4.0, 32), LinearScaling(2.0)], ids=str)
def test_tables_hold_scaled_angles_and_lengths(scaling):
    positions = torch.tensor([0, 3, 1000])
    cos, sin = rotary_tables(positions, 16, base=500.0, scaling=scaling, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies(scaling, 16, 500.0)):
            angle = position * frequency
            assert float(cos[row, pair]) == pytest.approx(scaling.amplitude * math.cos(angle))
            assert float(sin[row, pair]) == pytest.approx(scaling.amplitude * math.sin(angle))
