"""Derivatives of score functions that are derived, and gradients of the tensors that they read."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from triton.language.extra import libdevice

import fastattn
from fastattn.jit_functions import derivative, stand_ins
from fastattn.kernels.launch.tiles import TileConfig, forced
from fastattn.ops import attention_ops, schema
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv, worst_naive
from fastattn.testing.budget import assert_all_within_budget
from fastattn.testing.inputs import draw, draws, to_device
from fastattn.torch_backend import block
from fastattn.torch_backend.triton_language import LANGUAGE, Pointer, Value

B, H, H_k, T_q, T_k, D = 2, 4, 2, 21, 37, 16
KNEE = tl.constexpr(0.5)


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    tile = TileConfig(16, 16)
    with forced(forward=tile, backward_dq=tile, backward_dkv=tile):
        yield


@triton.jit
def softsign(x, slope):
    return x / (1 + tl.abs(x)) * slope


@triton.jit
def arithmetic(x, b, h, q_pos, k_pos, table, ends):
    y = softsign(
        x, tl.load(table + h * 3 + tl.minimum(q_pos - k_pos, 2) % 3, mask=q_pos >= k_pos, other=0.5)
    )
    y = tl.where(x > KNEE, y - 2 * x, 0.1 * x * x - y)
    for n in tl.static_range(2):
        y = y * 0.5 + tl.load(ends + b) / (x * x + n + 1.5)
    return y + tl.fma(x, y, -x) + x % 2.0 + (x * 3).to(tl.float32) + x.to(tl.int32)


@triton.jit
def functions(x, b, h, q_pos, k_pos, table, ends):
    z = tl.abs(x) + 0.5
    y = tl.exp(-x * x) + tl.exp2(0.5 * x) + tl.log(z) + tl.log2(z) + tl.sqrt(z) + tl.rsqrt(z)
    y += tl.sin(x) * tl.cos(x) + x.sigmoid() + tl.erf(x) + tl.floor(x) + tl.math.fdiv(x, z)
    y += tl.maximum(x, tl.sin(x)) - tl.minimum(0.3, x * x) + tl.clamp(x, -0.5, 0.5)
    return y + tl.where(x > 10.0, tl.log(x - 10.0), tl.sqrt(tl.maximum(x, 0.0)))


@triton.jit
def library(x, b, h, q_pos, k_pos, table, ends):
    z = 0.5 * libdevice.tanh(x)
    y = libdevice.pow(1.5 + z, 3.0) + libdevice.pow(2.0 + z, x) + libdevice.log1p(z * z)
    y += libdevice.expm1(z) + libdevice.sinh(z) + libdevice.cosh(z) + libdevice.tan(z)
    y += libdevice.atan(x) + libdevice.asin(z) + libdevice.acos(z) + libdevice.asinh(x)
    return y + libdevice.log10(1 + z * z) + libdevice.erfc(x)


@triton.jit
def unchosen(x, b, h, q_pos, k_pos):
    return tl.where(q_pos > k_pos, tl.rsqrt((q_pos - k_pos) * (1 + x * x)), x)


@triton.jit
def untouched(x, b, h, q_pos, k_pos, table, ends):
    return tl.load(table + h)


@pytest.mark.parametrize(
    "mod", [arithmetic, functions, library, untouched], ids=lambda f: f.fn.__name__
)
def test_derivatives(mod: Any) -> None:
    """Derivatives of the score and of loads, against autograd of the function on torch, in fp64."""
    real = torch.float64
    x = (3 * draw(1, H, T_q, T_k)).double().requires_grad_()
    table, ends = draw(3 * H).double().requires_grad_(), draw(B).double().requires_grad_()
    places = [torch.arange(n, dtype=torch.int32).view(shape) for n, shape in (
        (1, (1, 1, 1, 1)), (H, (1, H, 1, 1)), (T_q, (1, 1, T_q, 1)), (T_k, (1, 1, 1, T_k)),
    )]  # fmt: skip
    dx = draw(1, H, T_q, T_k).double()

    def run(function: Any, *scores: Tensor) -> Tensor:
        values = [Value(y, real) for y in (*scores, *places)]
        return stand_ins.over(LANGUAGE, function)(
            *values, *(Pointer(y, 0, real) for y in (table, ends))
        ).x

    out = run(mod, x).expand(x.shape)
    wanted = torch.autograd.grad(out, (x, table, ends), dx, allow_unused=True)
    actual = run(derivative.score_mod_grad(mod, (table, ends)), dx, x).expand(x.shape)
    torch.testing.assert_close(actual, wanted[0] if wanted[0] is not None else torch.zeros_like(x))


def test_what_overflows_where_it_is_not_chosen(device: str) -> None:
    """The derivative is infinite where a query meets itself, and tl.where takes another there."""
    q, k, v = make_qkv(1, 1, 1, 16, 16, D, device=device)
    o = fastattn.attention(q, k, v, causal=True, score_mod=unchosen, backend="triton")
    gradients = torch.autograd.grad(o.sin().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("mod", [arithmetic, functions], ids=lambda f: f.fn.__name__)
def test_kernels_take_what_is_derived(mod: Any, device: str) -> None:
    q, k, v = make_qkv(B, H, H_k, T_q, T_k, D, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return fastattn.attention(q, k, v, backend="triton", **options)

    tensors = (draw(3 * H).to(device), draw(B).to(device))
    assert_matches_reference(attend, q, k, v, causal=True, score_mod=mod, mod_tensors=tensors)
    plain = [x.detach() for x in (q, k, v)]
    given = derivative.score_mod_grad(mod, tensors)
    tangents = []
    with forward_ad.dual_level():
        for how in ({}, {"score_mod_grad": given}):
            dual = forward_ad.make_dual(plain[0], plain[0].cos())
            o = attend(dual, *plain[1:], score_mod=mod, mod_tensors=tensors, **how)
            tangents.append(forward_ad.unpack_dual(o).tangent)
    assert torch.equal(*tangents)
    sinks, few = draw(H).to(device).requires_grad_(), [x[:1, :, :5] for x in plain]
    learned = []
    for how in ({}, {"score_mod_grad": given}):
        o = attend(*few, score_mod=mod, mod_tensors=tensors, sinks=sinks, **how)
        learned.append(torch.autograd.grad(o.sum(), sinks)[0])
    assert torch.equal(*learned)


@triton.jit
def forgetting(x, b, h, q_pos, k_pos, gates):
    rows = gates + (b * 4 + h) * 37
    return x + tl.load(rows + q_pos) - tl.load(rows + k_pos)


@triton.jit
def sloped(x, b, h, q_pos, k_pos, slopes):
    return x - tl.exp(tl.load(slopes + h)) * tl.abs(q_pos - k_pos)


@triton.jit
def tempered(x, b, h, q_pos, k_pos, heat):
    return x * tl.load(heat + h) / (0.5 + tl.load(heat + h) * tl.load(heat + h))


@triton.jit
def bucketed(x, b, h, q_pos, k_pos, table):
    apart = (q_pos - k_pos) // 2
    return x + tl.load(table + h * 8 + apart, mask=(apart >= 0) & (apart < 8), other=0.5)


APART = torch.arange(T_q)[:, None] + T_k - T_q - torch.arange(T_k)
# Function, the shape of what it reads, and what becomes of scores x, in plain torch.
LEARNED: dict[str, tuple[Any, tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "FoX": (forgetting, (B, H, T_k), lambda x, c: x + c[:, :, T_k - T_q :, None] - c[:, :, None]),
    "ALiBi": (sloped, (H,), lambda x, s: x - s.exp()[:, None, None] * APART.abs().to(x)),
    "temperature": (
        tempered,
        (H,),
        lambda x, t: x * (t / (0.5 + t.square()))[:, None, None],
    ),
    "T5": (
        bucketed,
        (H, 8),
        lambda x, t: x + torch.where(APART < 16, t[:, (APART // 2).clamp(0, 7)], 0.5),
    ),
}
WAYS = ["triton", "atomics", "formula", "torch"]


def not_differentiable(*_: Any) -> None:
    raise derivative.NotDifferentiable("of nothing a derivative is known")


@pytest.mark.parametrize(
    ("way", "name"),
    [*((WAYS[0], name) for name in LEARNED), *((way, "T5") for way in WAYS[1:]), ("torch", "FoX")],
)
def test_tensors_that_learn(
    way: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of o and lse are autograd's of the dense formula, beside dropout and hidden NaN.

    By exact sums, by atomics, and by the formula in chunks of 4 queries if no derivative is known.
    """
    if way == "formula":
        monkeypatch.setattr(derivative, "load_gradients", not_differentiable)
    monkeypatch.setattr(block, "_SCORES", 4 * B * H * T_k)
    mod, shape, dense = LEARNED[name]
    seed = torch.tensor([3, 5])
    keep = fastattn.dropout_keep_mask(seed, 0.3, B, H, T_q, T_k)
    directions = draws(seed=1)(B, H, T_q, D), draws(seed=2)(B, H, T_q)

    def of(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach().to(dtype) for x in make_qkv(B, H, H_k, T_q, T_k, D, device="cpu"))
        leaves = [q.requires_grad_(), draw(*shape).to(dtype).requires_grad_()]
        k, v = (x.repeat_interleave(H // H_k, 1) for x in (k, v))
        x = dense(D**-0.5 * leaves[0] @ k.mT, leaves[1]).masked_fill(APART < 0, -math.inf)
        o = torch.where(keep, x.softmax(-1), 0.0) / 0.7 @ v
        results, grads = (o, x.logsumexp(-1)), [x.to(dtype) for x in directions]
        return list(torch.autograd.grad(results, leaves, grads))

    q, k, v = make_qkv(B, H, H_k, T_q, T_k, D, device=device)
    learned = draw(*shape).to(device).requires_grad_()
    hidden = torch.zeros(T_q, T_k).masked_fill(APART < 0, math.nan)
    how: dict[str, Any] = {"dropout": 0.3, "dropout_seed": seed, "causal": True}
    how = to_device(how | {"attn_bias": hidden}, device)
    how |= {"backend": "torch" if way == "torch" else "triton", "deterministic": way != "atomics"}
    how |= {"score_mod": mod, "mod_tensors": (learned,), "return_lse": True}
    results, grads = fastattn.attention(q, k, v, **how), [x.to(device) for x in directions]
    actual = torch.autograd.grad(results, (q, learned), grads, retain_graph=True)
    exact = of(torch.float64)
    naive = worst_naive(exact, lambda: of(torch.float32))
    assert_all_within_budget(("dq", "learned"), [x.cpu() for x in actual], exact, naive)
    if way != "atomics":
        alone = torch.autograd.grad(results, learned, grads)[0]
        assert torch.equal(alone, actual[1])


def test_sums_of_loads_do_not_depend_on_their_order(device: str) -> None:
    """The batch in another order: the same bits. Each element has its own unit, and its own NaN."""
    q, k, v = (x.detach() for x in make_qkv(5, H, H_k, T_k, T_k, D, device=device))
    q[3, 2, -1] = torch.nan
    table, direction = draw(H, 8).to(device).requires_grad_(), draws(seed=1)(*q.shape).to(device)
    how: dict[str, Any] = {"causal": True, "score_mod": bucketed, "mod_tensors": (table,)}
    grads = []
    for order, power in (((0, 1, 2, 3, 4), 0), ((3, 1, 4, 2, 0), -60)):
        direction[:, 0] *= 2.0**power
        inputs = (x[list(order)] for x in (q, k, v))
        o = fastattn.attention(*inputs, backend="triton", **how)
        grads.append(torch.autograd.grad(o, table, direction[list(order)])[0])
    first, second = grads
    assert torch.equal(first[[1, 3]], second[[1, 3]])
    assert torch.equal(first[0], 2.0**60 * second[0]) and first[0].abs().min() > 0
    assert first.isnan().any(1).tolist() == [False, False, True, False]


def test_tensors_that_learn_by_operator(device: str) -> None:
    """torch's vmap before torch.func, and opcheck; a tensor that does not learn has no gradient."""
    q, k, v = (x.detach() for x in make_qkv(1, H, H_k, 16, 16, D, device=device))
    table, ends = draw(3 * H).to(device).requires_grad_(), draw(B).to(device)
    how: dict[str, Any] = {"score_mod": arithmetic, "mod_tensors": (table, ends)}
    o = fastattn.attention(q, k, v, backend="triton", **how)
    directions = draws(seed=1)(2, *o.shape).to(device)
    together = torch.autograd.grad(o, table, directions, is_grads_batched=True, retain_graph=True)
    for x, direction in zip(together[0], directions, strict=True):
        assert torch.equal(x, torch.autograd.grad(o, table, direction, retain_graph=True)[0])
    tensors = (table.detach(), ends)
    function, loads = derivative.load_gradients(arithmetic, tensors, [True, False])
    assert loads == [0]
    options = Options(**how | {"mod_tensors": tensors}, score_mod_grad=function, scale=0.25)
    inputs = (o.detach(), None, q, k, v, *attention_ops.attend(q, k, v, options), loads)
    torch.library.opcheck(
        attention_ops.attention_backward_mods.op, (*inputs, *schema.flat(options))
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tensors_that_learn_from_packed_sequences(backend: str, device: str) -> None:
    """Each sequence has its gradients by itself."""
    offsets = torch.tensor([0, 5, 5, T_k], device=device)
    q, k, v = (x[0].transpose(0, 1).detach() for x in make_qkv(1, 4, 2, T_k, T_k, D, device=device))
    table = draw(4, 8).to(device).requires_grad_()
    how: dict[str, Any] = {"score_mod": bucketed, "mod_tensors": (table,), "backend": backend}
    o = fastattn.attention_varlen(q, k, v, offsets, causal=True, **how)
    alone = []
    for rows in (slice(0, 5), slice(5, T_k)):
        one = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        alone.append(fastattn.attention(*one, causal=True, **how)[0].transpose(0, 1))
    actual, wanted = (torch.autograd.grad(x.sin().sum(), table)[0] for x in (o, torch.cat(alone)))
    torch.testing.assert_close(actual, wanted)


def test_gradients_of_gradients_mix_tensors_and_queries(device: str) -> None:
    q, k, v = make_qkv(1, 4, 2, 5, 5, D, device=device)
    table = draw(4, 8).to(device).requires_grad_()
    how: dict[str, Any] = {"score_mod": bucketed, "mod_tensors": (table,)}

    def second(backend: str) -> tuple[torch.Tensor, ...]:
        o = fastattn.attention(q, k, v, backend=backend, **how)
        first = torch.autograd.grad(o.sin().sum(), (q, table), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, table))

    torch.testing.assert_close(second("triton"), second("torch"), atol=1e-5, rtol=1e-4)


def test_what_has_no_gradient_is_refused(device: str) -> None:
    q, k, v = make_qkv(1, 4, 2, 5, 5, D, device=device)
    table = draw(4, 8).to(device).requires_grad_()
    how: dict[str, Any] = {"score_mod": bucketed, "mod_tensors": (table,)}
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: how,
        # A transform hides what requires a gradient outside of it.
        lambda: how | {"mod_tensors": (1 * table,)},
        lambda: {"alibi_slopes": 1 * table[:, 0]},
    ]
    for made in makers:

        def loss(q: torch.Tensor, made: Callable[[], dict[str, Any]] = made) -> torch.Tensor:
            return fastattn.attention(q, k, v, backend="triton", **made()).sum()

        with pytest.raises(ValueError, match=r"(mod_tensors require a|slopes have no) gradient"):
            torch.func.grad(loss)(q)
    with pytest.raises(ValueError, match=r"mod_tensors\[0\] has no gradient, but requires one"):
        fastattn.attention_statistics(q, k, **how)
