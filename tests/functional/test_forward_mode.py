"""Forward-mode AD: compositions, memory, errors. Generated calls have tangents of every option."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fuzz.derivatives import by_levels, by_reverse
from held import Held
from nightly import gate_cases
from torch import Tensor
from torch.autograd import forward_ad

import fastattn
from fastattn import reference
from fastattn.kernels.launch import tiles
from fastattn.ops import attention_ops
from fastattn.options import Options
from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_all_within_budget
from fastattn.testing.inputs import draw, draws, to_device
from fastattn.testing.option_examples import option_examples
from fastattn.torch_backend import torch_attention

B, H_q, H_k, T_q, T_k, D, D_v = 2, 4, 2, 21, 37, 16, 8
EXAMPLES = option_examples(H_q, H_k, T_q, T_k, D, reach=6)
Function = Callable[..., Any]
Tensors = dict[str, Tensor]


@triton.jit
def summed(x, b, h, q_pos, k_pos):
    return tl.cumsum(x, 1)


def qkv(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = draws(dtype=dtype)
    shapes = {"q": (B, H_q, T_q, D), "k": (B, H_k, T_k, D), "v": (B, H_k, T_k, D_v)}
    return {name: draw(*shape) for name, shape in shapes.items()}


TILE = tiles.TileConfig(16, 32)


def tangents(push: Function, attend: Function, tensors: Tensors, moves: Tensors) -> list[Tensor]:
    pairs = push(lambda **moved: attend(**tensors | moved), tensors, moves)
    return [torch.zeros_like(x) if tx is None else tx.detach() for x, tx in pairs]


@pytest.mark.parametrize("moved", ["q", "k", "v", "qv", "sinks", "attn_bias"])
def test_tangents_in_16_bits(moved: str, device: str) -> None:
    """Keys have a large part in common, as in models: tangents of scores are centred. They may be
    wider than what they are of.
    """
    given = qkv(torch.bfloat16)
    given |= {"attn_bias": draw(B, 1, T_q, T_k), "sinks": draw(H_q), "k": given["k"] + 16}
    names = [moved] if moved in given else list(moved)
    moves = {name: given[name].cos() for name in names}
    how: dict[str, Any] = {"causal": True, "return_lse": True}

    def in_dtype(dtype: torch.dtype) -> list[Tensor]:
        wide = [{name: x.to(dtype) for name, x in some.items()} for some in (given, moves)]
        return tangents(by_reverse, partial(reference.attention, **how), *wide)

    exact = in_dtype(torch.float64)
    naive = worst_naive(exact, lambda: in_dtype(torch.bfloat16))
    ours = partial(tangents, by_levels, partial(fastattn.attention, backend="triton", **how))
    on_device = to_device(given, device), to_device(moves, device)
    with tiles.forced(forward=TILE, relative=TILE, backward_dq=TILE):
        actual = ours(*on_device)
        of_wider = ours(on_device[0], {name: x.double() for name, x in on_device[1].items()})
    assert_all_within_budget(("to", "tlse"), actual, exact, naive)
    torch.testing.assert_close(of_wider, actual, rtol=0, atol=0)


def of_x(attend: Function, x: Tensor, **how: Any) -> Tensor:
    """A number that each of q, k, v and o takes part in, in a way that is not linear."""
    return attend(x, 2 * x, x.sin(), causal=True, **how).sin().sum()


def ours(x: Tensor) -> Tensor:
    return of_x(fastattn.attention, x, backend="torch")


def forward_of(f: Function, x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (x.cos(),))[1]


def gradient(f: Function) -> Function:
    return torch.func.grad(lambda x: f(x).sum())


def in_level(f: Function, x: Tensor, *, backward: bool) -> Tensor:
    """The tangent by forward_ad; or the gradient of the result and its tangent together."""
    leaf = x.clone().requires_grad_(backward)
    with forward_ad.dual_level():
        y, ty = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, x.cos())))
        assert ty is not None, "the tangent is dropped"
    return torch.autograd.grad(y + ty.sin(), leaf)[0] if backward else ty


def tangent_beside(f: Function, x: Tensor) -> Tensor:
    """`in_level` with its backward, by torch.func."""

    def loss(x: Tensor, direction: Tensor) -> Tensor:
        y, ty = torch.func.jvp(f, (x,), (direction,))
        return y + ty.sin()

    return torch.func.grad(loss)(x, x.cos())


def detached_tangent(f: Function, x: Tensor) -> Tensor:
    """The gradient of a consistency model's loss."""
    leaf = x.clone().requires_grad_()
    y, ty = torch.func.jvp(lambda z: f(z * leaf), (x,), (x.cos(),))
    return torch.autograd.grad((y - ty.detach()).square(), leaf)[0]


def moved_tangent(f: Function, x: Tensor) -> Tensor:
    """The gradient of a tangent with respect to what is outside of the transform."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(torch.func.jvp(lambda z: f(z * leaf), (x,), (x.cos(),))[1], leaf)[0]


def twice_backward(f: Function, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    first = torch.autograd.grad(f(leaf), leaf, create_graph=True)[0]
    return torch.autograd.grad(first.sin().sum(), leaf)[0]


def rows(x: Tensor) -> Tensor:
    """Two inputs with small scores: weights are as inexact as fp32 rounds scores and lse."""
    return torch.stack([x, 0.25 - x])


COMPOSITIONS: dict[str, Function] = {
    "forward_ad": partial(in_level, backward=False),
    "backward of forward_ad": partial(in_level, backward=True),
    "jvp": forward_of,
    "jvp, tangent detached": detached_tangent,
    "jvp, backward of the tangent": moved_tangent,
    "jvp(grad)": lambda f, x: forward_of(gradient(f), x),
    "grad(jvp)": lambda f, x: gradient(partial(forward_of, f))(x),
    "grad(grad)": lambda f, x: gradient(lambda y: gradient(f)(y).sin())(x),
    "create_graph": twice_backward,
    "vmap(jvp)": lambda f, x: torch.vmap(partial(forward_of, f))(rows(x)),
    "jvp(vmap)": lambda f, x: forward_of(torch.vmap(f), rows(x)),
    "vmap(jvp(grad))": lambda f, x: torch.vmap(partial(forward_of, gradient(f)))(rows(x)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "grad(jvp(grad))": lambda f, x: gradient(partial(forward_of, gradient(f)))(x),
    "backward of jvp(grad)": lambda f, x: moved_tangent(lambda z: gradient(f)(z).sum(), x),
    "jvp(jvp)": lambda f, x: forward_of(partial(forward_of, f), x),
}
# In forward_ad the tangent of torch's own softmax has no backward.
BY_TRANSFORMS: dict[str, Function] = {"backward of forward_ad": tangent_beside}
# What torch traces, in its own way; the others it refuses.
COMPILED = ("forward_ad", "jvp", "grad(jvp)", "vmap(jvp)", "jacfwd")


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name: str) -> None:
    x = draw(1, 2, 3, 4).double()
    composition = COMPOSITIONS[name]
    actual = composition(ours, x)
    expected = BY_TRANSFORMS.get(name, composition)(partial(of_x, reference.attention), x)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_by_kernels(name: str, device: str) -> None:
    """In fp32, whose nested derivatives are good to torch's own limits for that dtype."""
    x, composition = draw(1, 2, 3, 8) / 4, COMPOSITIONS[name]

    def by_kernels(x: Tensor) -> Tensor:
        return of_x(fastattn.attention, x, backend="triton")

    if name == "jvp(jvp)":
        with pytest.raises(ValueError, match="q has tangents of several transforms"):
            composition(by_kernels, x.to(device))
        return
    by_oracle = BY_TRANSFORMS.get(name, composition)
    expected = by_oracle(partial(of_x, reference.attention), x.double()).float()
    torch.testing.assert_close(composition(by_kernels, x.to(device)).cpu(), expected)


@pytest.mark.parametrize("learned", ["sinks", "attn_bias"])
def test_hessian_vector_products_with_options(learned: str, device: str) -> None:
    """Kernels compute them; with a bias that needs a gradient, the formula does."""
    tensors = qkv(torch.float32) | {"sinks": draw(H_q), "attn_bias": draw(H_q, T_q, T_k)}
    names = ["q", "k", "v", learned]
    direction = draws(seed=1)
    moves = [direction(*tensors[name].shape) for name in names]
    how: dict[str, Any] = {"causal": True, "softcap": 2.0, "return_lse": True}

    def loss(attend: Function, fixed: dict[str, Tensor], *leaves: Tensor) -> Tensor:
        o, lse = attend(**fixed | dict(zip(names, leaves, strict=True)), **how)
        return o.sin().sum() + lse.square().sum()

    def twice_backward(dtype: torch.dtype) -> list[Tensor]:
        fixed = {name: x.to(dtype) for name, x in tensors.items()}
        leaves = [fixed[name].requires_grad_() for name in names]
        first = torch.autograd.grad(
            loss(reference.attention, fixed, *leaves), leaves, create_graph=True
        )
        return [*torch.autograd.grad(first, leaves, [x.to(dtype) for x in moves])]

    exact = twice_backward(torch.float64)
    naive = worst_naive(exact, lambda: twice_backward(torch.float32))
    fixed = to_device(tensors, device)
    by_kernels = partial(loss, partial(fastattn.attention, backend="triton"), fixed)
    leaves = tuple(fixed[name] for name in names)
    with tiles.forced(forward=TILE, relative=TILE, backward_dq=TILE, backward_dkv=TILE):
        of_loss = torch.func.grad(by_kernels, tuple(range(len(names))))
        products = torch.func.jvp(of_loss, leaves, tuple(x.to(device) for x in moves))[1]
    assert_all_within_budget(names, products, exact, naive)


@pytest.mark.parametrize(
    "name",
    gate_cases(COMPILED, sorted(COMPOSITIONS.keys() - {*COMPILED, "create_graph", "grad(grad)"})),
)
def test_compiled_compositions(name: str) -> None:
    """Right where torch.compile takes them, else an error; never a tangent of zeros."""
    x = draw(1, 2, 3, 4).double()
    run = torch.compile(partial(COMPOSITIONS[name], ours), backend="aot_eager", fullgraph=True)
    try:
        actual = run(x)
    except Exception:
        if name in COMPILED:
            raise
        return
    expected = BY_TRANSFORMS.get(name, COMPOSITIONS[name])(partial(of_x, reference.attention), x)
    torch.testing.assert_close(actual, expected)


def packed(x: Tensor) -> Tensor:
    offsets = torch.tensor([0, 2, 3])
    return fastattn.attention_varlen(x[0], x[0], x[0], offsets, backend="torch").sum()


@pytest.mark.parametrize("function", [ours, packed])
def test_a_compiled_call_of_a_dual_tensor(function: Function) -> None:
    """Refused, whether or not an input was dual when it was compiled."""
    x = draw(1, 3, 2, 4).double()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(x)
    # By torch itself from 2.14 on.
    refusal = NotImplementedError, torch._dynamo.exc.Unsupported
    with pytest.raises(refusal, match=r"forward AD|q has a tangent|a dual tensor"):
        in_level(compiled, x, backward=False)
    if function is packed:
        with pytest.raises(Exception, match="q has a tangent, which packed calls do not"):
            torch.compile(partial(forward_of, function), backend="eager")(x)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of no chunk hold more scores than a chunk does."""
    monkeypatch.setattr(torch_attention, "_WITH_TANGENTS", 4 * 64)
    x = draw(1, 1, 64, 4)
    with torch.no_grad(), forward_ad.dual_level(), Held() as held:
        dual = forward_ad.make_dual(x, x.cos())
        o = fastattn.attention(dual, dual, dual, causal=True, backend="torch")
        assert forward_ad.unpack_dual(o).tangent is not None
    assert held.largest == 4 * 64


def test_an_operator_alone_refuses_tangents_of_tensors_and_options() -> None:
    q, k, v = qkv(torch.float32).values()
    run = attention_ops.attention_forward.by_op
    slopes = draw(H_q)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="q has a tangent"):
            run(forward_ad.make_dual(q, q), k, v, Options(scale=1.0))
        dual = forward_ad.make_dual(slopes, slopes)
        with pytest.raises(NotImplementedError, match="alibi_slopes has a tangent"):
            run(q, k, v, Options(scale=1.0, alibi_slopes=dual))


def test_what_has_no_tangent_is_refused() -> None:
    tensors = qkv(torch.float32)
    dual = forward_ad.make_dual
    attend = partial(fastattn.attention, backend="torch")
    with forward_ad.dual_level():
        slopes = draw(H_q)
        with pytest.raises(NotImplementedError, match="alibi_slopes has a tangent"):
            attend(**tensors, alibi_slopes=dual(slopes, slopes))
        mods = tuple(EXAMPLES["score-mod"]["mod_tensors"])
        table = dual(mods[0], mods[0])
        with pytest.raises(NotImplementedError, match=r"mod_tensors\[0\] has a tangent"):
            attend(
                **tensors, mask_mod=EXAMPLES["mask-mod"]["mask_mod"], mod_tensors=(table, mods[1])
            )
        q = dual(tensors["q"], tensors["q"])
        with pytest.raises(ValueError, match=r"score_mod needs score_mod_grad .* as q has"):
            attend(**tensors | {"q": q}, score_mod=summed)
        with pytest.raises(ValueError, match=r"k must have shape .*got"):
            attend(q, tensors["k"][..., :3], tensors["v"])
