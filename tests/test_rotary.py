"""Rotary embedding: the formula, its invariants, and every argument message."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch

from fastattn import rotary
from fastattn.rotary import RotaryPositions, apply_rotary, rotary_tables
from fastattn.testing.inputs import draw

STYLES = ("half", "interleaved")


def pair_channels(style: str, i: int, rotary_dim: int) -> tuple[int, int]:
    return (i, i + rotary_dim // 2) if style == "half" else (2 * i, 2 * i + 1)


def rotate_by_matrix(x: torch.Tensor, rotary_dim: int, style: str, base: float) -> torch.Tensor:
    """Equation 15 of the paper: one D x D rotation matrix a position, in fp64."""
    T, D = x.shape[-2:]
    out = torch.empty_like(x, dtype=torch.float64)
    for p in range(T):
        matrix = torch.eye(D, dtype=torch.float64)
        for i in range(rotary_dim // 2):
            angle = p * base ** (-2 * i / rotary_dim)
            a, b = pair_channels(style, i, rotary_dim)
            matrix[a, a] = matrix[b, b] = math.cos(angle)
            matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
        out[..., p, :] = x[..., p, :].double() @ matrix.T
    return out


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("rotary_dim", "base"),
    [pytest.param(8, 10000.0, id="full"), pytest.param(6, 500.0, id="partial")],
)
def test_equals_the_rotation_matrix_of_the_paper(style, rotary_dim, base):
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    cos, sin = rotary_tables(7, rotary_dim, base=base, dtype=torch.float64)
    expected = rotate_by_matrix(x, rotary_dim, style, base)
    torch.testing.assert_close(apply_rotary(x, cos, sin, style=style), expected)
    inputs = [t.requires_grad_() for t in (x[:1, :1], cos, sin)]
    assert torch.autograd.gradcheck(partial(apply_rotary, style=style), inputs)


def test_tables_stay_accurate_at_long_positions():
    position = torch.tensor([131071])
    cos, sin = rotary_tables(position, 64)
    assert rotary_tables(position, 64, device="meta")[0].is_meta
    angles = [131071 * 10000.0 ** (-2 * i / 64) for i in range(32)]
    half_ulp = torch.finfo(torch.float32).eps / 2
    assert (cos[0].double() - torch.tensor([math.cos(a) for a in angles])).abs().max() < half_ulp
    assert (sin[0].double() - torch.tensor([math.sin(a) for a in angles])).abs().max() < half_ulp


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(style, dtype):
    x = torch.randn(2, 3, 40, 16).to(dtype)
    cos, sin = rotary_tables(40, 12)
    y = apply_rotary(x, cos, sin, style=style)
    assert y.dtype == dtype
    assert torch.equal(y, apply_rotary(x.float(), cos, sin, style=style).to(dtype))


@pytest.mark.parametrize("style", STYLES)
def test_strided_input_equals_contiguous_and_keeps_its_layout(style):
    x = torch.randn(2, 5, 3, 8)
    cos, sin = rotary_tables(5, 8)
    view = x.transpose(1, 2)
    y = apply_rotary(view, cos, sin, style=style)
    assert torch.equal(y, apply_rotary(view.contiguous(), cos, sin, style=style))
    assert y.stride() == view.stride()


X, (COS, SIN) = draw(2, 3, 5, 8), rotary_tables(5, 8)


def test_a_complex_table_turns_neighbours_as_a_product_of_complex_numbers() -> None:
    freqs_cis = torch.complex(COS, SIN)
    expected = torch.view_as_real(torch.view_as_complex(X.unflatten(-1, (4, 2))) * freqs_cis)
    torch.testing.assert_close(apply_rotary(X, freqs_cis), expected.flatten(-2))
    assert torch.equal(apply_rotary(X, freqs_cis, style="half"), apply_rotary(X, COS, SIN))


def test_kept_tables_grow_and_are_those_of_the_positions() -> None:
    cpu = torch.device("cpu")
    kept = RotaryPositions(6, base=500.0)
    first = kept.up_to(5, cpu)
    assert first[0].shape == (5, 3)
    assert kept.up_to(3, cpu) is first
    longer = kept.up_to(6, cpu)
    assert longer[0].shape == (10, 3), "twice as long, not by one"
    for ours, expected in zip(longer, rotary_tables(10, 6, base=500.0), strict=True):
        assert torch.equal(ours, expected)
    for start in (4, torch.tensor([2, 7])):
        steps = torch.arange(3)
        positions = steps + (start if isinstance(start, int) else start[:, None])
        for ours, expected in zip(
            kept.at(start, 3, 10, cpu), rotary_tables(positions, 6, base=500.0), strict=True
        ):
            assert torch.equal(ours, expected)


def test_padding_past_the_kept_tables_gets_some_row() -> None:
    cos, _ = RotaryPositions(4).at(torch.tensor([0, 3]), 3, 5, torch.device("cpu"))
    assert torch.equal(cos[0], rotary_tables(3, 4)[0])
    assert torch.equal(cos[1, :2], rotary_tables(5, 4)[0][3:])


def test_tables_made_for_inference_serve_training() -> None:
    kept = RotaryPositions(4)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    with torch.inference_mode():
        kept.up_to(3, x.device)
    apply_rotary(x, *kept.at(0, 3, 3, x.device)).sum().backward()
    assert x.grad is not None


def test_tables_made_in_a_transform_are_not_kept() -> None:
    """torch wraps them, and says `escaped?` where they are used after it."""
    kept = RotaryPositions(4)
    x = torch.randn(1, 2, 3, 4)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary(x, *kept.at(0, 3, 3, x.device)).square().sum()

    products = [torch.func.jvp(torch.func.grad(rotated), (x,), (x,))[1] for _ in range(2)]
    assert torch.equal(*products)
    torch.testing.assert_close(rotated(x), x.square().sum())


def test_a_graph_keeps_the_tables_that_it_reads_and_none_that_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    kept = RotaryPositions(4)

    def recorded() -> tuple[torch.Tensor, torch.Tensor]:
        with monkeypatch.context() as patched:
            patched.setattr(rotary, "may_keep", lambda device: False)
            return kept.up_to(3, cpu)

    made = recorded()
    assert kept.up_to(3, cpu) is not made
    read = weakref.ref(recorded()[0])
    kept.up_to(30, cpu)
    gc.collect()
    assert read() is not None, "a replay would read whatever is there"
