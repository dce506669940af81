"""Users' functions on torch tensors give what Triton gives, kernel by kernel."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fastattn.torch_backend import triton_language

SHIFT = tl.constexpr(2)
N = 8


def places(B: int = 1, H: int = 2, T: int = 3) -> triton_language.Places:
    t = torch.arange(T, dtype=torch.int32)
    return triton_language.Places(0, B, 0, H, t.view(1, 1, -1, 1), t.view(1, 1, 1, -1))


def run_both(mod, tensors: tuple[torch.Tensor, ...], device: str):
    """mod(x, b, h, q_pos, k_pos, *tensors) by Triton and by torch, [2, 3, N, N]."""
    x = torch.randn(2, 3, N, N, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.zeros_like(x)
    a = tensors[0] if tensors else x

    @triton.jit
    def kernel(x_ptr, out_ptr, table_ptr, mod: tl.constexpr, TABLE: tl.constexpr):
        b = tl.program_id(0)
        h = tl.program_id(1)
        i = tl.arange(0, 8)[:, None]
        j = tl.arange(0, 8)[None, :]
        place = (b * 3 + h) * 64 + i * 8 + j
        x = tl.load(x_ptr + place)
        y = mod(x, b, h, i - 3, j, table_ptr) if TABLE else mod(x, b, h, i - 3, j)
        tl.store(out_ptr + place, y.to(tl.float32))

    kernel[(2, 3)](x, out, a, mod, len(tensors) > 0)
    at = places(2, 3, N)
    at = at._replace(q_pos=(at.q_pos - 3).to(device), k_pos=at.k_pos.to(device))
    return out, triton_language.score_mod(mod, x, at, tensors)


@triton.jit
def whole_numbers(x, b, h, q_pos, k_pos):
    d = q_pos - k_pos
    y = d // 3 + d % 3 * 10 + (d << 1) - (k_pos >> 1) + (k_pos ^ 5) + (k_pos & 6) + (b | 1)
    return y + d / 4 + (d * 0.5).to(tl.int32) + (-d)


@triton.jit
def helper(x, y, times=SHIFT):
    return tl.minimum(x, y) + tl.maximum(x, SHIFT) * times


@triton.jit
def functions(x, b, h, q_pos, k_pos):
    z = tl.abs(x) + 1.0
    y = tl.exp(-z) + tl.exp2(-z) + tl.log(z) + tl.log2(z) + tl.sqrt(z) + tl.rsqrt(z)
    y += tl.sigmoid(x) + tl.sin(x) + tl.cos(x) + tl.floor(x) + tl.ceil(x) + tl.math.erf(x)
    return y + helper(x, 0.25) + tl.cdiv(k_pos, 3) + tl.fma(x, x, z) + tl.fdiv(x, z)


@triton.jit
def methods(x, b, h, q_pos, k_pos):
    near = (k_pos > 2).logical_and(q_pos > 1).logical_or(h == 1)
    y = tl.where(near, x.abs() + x.sigmoid(), k_pos.cast(tl.float32))
    return y + k_pos.cdiv(3) + k_pos.to(x.dtype)


@triton.jit
def bounds(x, b, h, q_pos, k_pos):
    y = tl.clamp(x, -0.5, 0.5) + tl.clamp(x, tl.minimum(x, 0.0), 0.1)
    for n in tl.static_range(1, 4, 2):
        y += tl.clamp(x * n, -1.0, 1.0)
    return tl.add(y, tl.mul(x, tl.sub(x, tl.zeros_like(x))))


@triton.jit
def choices(x, b, h, q_pos, k_pos):
    keep = (q_pos >= k_pos) & ~(k_pos == 2) | (q_pos < -1) ^ (k_pos > 6)
    y = tl.where(keep, x, -1.0) + (q_pos <= k_pos) * 2 + (q_pos != k_pos).to(tl.int32)
    return tl.where(keep & (h > 0), y, 2) + tl.cast(x, tl.float16).to(tl.float32)


@triton.jit
def branches(x, b, h, q_pos, k_pos):
    if h < 1:
        x = x * 2
    elif b == 1:
        x = x - k_pos
    return x + 1


@triton.jit
def reads(x, b, h, q_pos, k_pos, table):
    inside = tl.load(table + q_pos, mask=q_pos >= 0, other=9.0)
    return x * tl.load(table + h) + inside + tl.load(table + 1 + k_pos % 4)


@pytest.mark.parametrize("mod", [whole_numbers, functions, methods, bounds, choices, branches])
def test_as_triton_computes(mod, device: str) -> None:
    by_triton, by_torch = run_both(mod, (), device)
    torch.testing.assert_close(by_torch, by_triton, rtol=1e-5, atol=1e-5)


# Triton's interpreter lets NaN through, which its compiler does on request.
def test_bounds_pass_over_nan_unless_told_otherwise() -> None:
    tl = triton_language.LANGUAGE
    x = triton_language.Value(torch.tensor([math.nan, 0.5, 7.0]), torch.float32)
    assert tl.maximum(x, 1.0).x.tolist() == [1.0, 1.0, 7.0]
    assert tl.minimum(x, 1.0).x.tolist() == [1.0, 0.5, 1.0]
    assert tl.clamp(x, 0.0, 1.0).x.tolist() == [0.0, 0.5, 1.0]
    told = tl.clamp(x, 0.0, 1.0, propagate_nan=tl.PropagateNan.ALL).x
    assert told.isnan().tolist() == [True, False, False]


# Nor has it these as methods.
@pytest.mark.parametrize("name", [
    "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt", "sqrt_rn",
])  # fmt: skip
def test_methods_are_functions_of_their_name(name: str) -> None:
    x = triton_language.Value(torch.rand(5) + 0.5, torch.float32)
    expected = getattr(torch, name.removesuffix("_rn"))(x.x)
    assert torch.equal(getattr(x, name)().x, expected)
    assert torch.equal(getattr(triton_language.LANGUAGE, name)(x).x, expected)


# Triton's interpreter has no libdevice: Python's own functions stand for it here.
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *((name, (0.4,)) for name in ("asin", "acos", "atan", "asinh", "atanh", "tan", "tanh")),
        *((name, (0.4,)) for name in ("sinh", "cosh", "expm1", "log1p", "log10", "erfc", "isnan")),
        *((name, (1.3, -2.5)) for name in ("atan2", "hypot", "copysign", "fmod")),
        *((name, (-2.5,)) for name in ("trunc", "isinf")),
        ("acosh", (1.7,)),
        ("pow", (1.3, 2.5)),
    ],
)
def test_libdevice_as_python_computes(name: str, inputs: tuple[float, ...]) -> None:
    real = torch.float64
    values = [triton_language.Value(torch.tensor(x, dtype=real), real) for x in inputs]
    actual = getattr(triton_language.LANGUAGE, name)(*values)
    torch.testing.assert_close(actual.x.double().item(), float(getattr(math, name)(*inputs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_reads_as_triton_does(dtype: torch.dtype, device: str) -> None:
    table = (torch.arange(N, device=device) * 3 - 4).to(dtype)
    by_triton, by_torch = run_both(reads, (table,), device)
    torch.testing.assert_close(by_torch, by_triton, rtol=1e-5, atol=1e-5)


@triton.jit
def by_row_and_head(b, h, q_pos, k_pos):
    if b == 2:
        return k_pos < 6
    if h == 2:
        return k_pos > 0
    return k_pos <= q_pos


def test_a_row_and_head_that_are_branched_on_keep_their_places() -> None:
    """In a part of a whole: rows 1 and 2 with positions of their own, heads 1 and 2."""
    at = places(2, 2, 3)
    k_pos = torch.cat((at.k_pos, at.k_pos + 5))
    first = torch.cat((k_pos[:1] <= at.q_pos, (k_pos[:1] > 0).expand(1, 1, 3, 3)), 1)
    expected = torch.cat((first, (k_pos[1:] < 6).expand(1, 2, 3, 3)))
    at = at._replace(first_row=1, first_head=1, k_pos=k_pos)
    assert torch.equal(triton_language.mask_mod(by_row_and_head, at, ()), expected)


@triton.jit
def gate(x, b, h, q_pos, k_pos):
    return x * tl.sigmoid(x)


def test_scores_are_differentiable_twice_and_in_their_own_dtype() -> None:
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def call(x):
        return triton_language.score_mod(gate, x, places(), ())

    assert torch.autograd.gradgradcheck(call, x)
    torch.testing.assert_close(call(x), x * x.sigmoid(), rtol=1e-14, atol=0)


@triton.jit
def unknown(b, h, q_pos, k_pos):
    return tl.sum(k_pos, 0) > 0


@triton.jit
def attribute(b, h, q_pos, k_pos):
    return k_pos.trans() > 0


@triton.jit
def tile_branch(b, h, q_pos, k_pos):
    if q_pos > k_pos:
        return q_pos > 1
    return q_pos > 0


@triton.jit
def far(b, h, q_pos, k_pos, table):
    return tl.load(table + k_pos - 1) > 0


@triton.jit
def constant(b, h, q_pos, k_pos):
    return True


FAULTS = [
    (unknown, (), NotImplementedError, "tl.sum is not supported by the torch"),
    (attribute, (), NotImplementedError, ".trans of a Triton value"),
    (tile_branch, (), NotImplementedError, "tile_branch branches on a tile of values"),
    (far, (torch.ones(3),), IndexError, "outside of a mod tensor of 3 elements, at offsets -1"),
]


@pytest.mark.parametrize(("mod", "tensors", "error", "message"), FAULTS)
def test_faults_are_named(mod, tensors, error, message) -> None:
    with pytest.raises(error, match=message):
        triton_language.mask_mod(mod, places(), tensors)


def test_holders_and_constants() -> None:
    class Holder:
        mask_mod = constant

    assert triton_language.mask_mod(Holder(), places(), ()).all()
