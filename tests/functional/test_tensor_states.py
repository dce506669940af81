"""Tensors that are more than their memory: the negative bit, tangents, those of transforms."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from nightly import gate_cases
from outcomes import outcome, parts, succeeded
from public_calls import Function, calls
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn
from fastattn.options import LEARNED
from fastattn.testing.inputs import draws

pytestmark = pytest.mark.usefixtures("nothing_known")


CALLS = tuple(calls("cpu"))


def tensors_of(result: Any) -> list[Tensor]:
    """Every tensor in a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    result = result.values() if isinstance(result, dict) else result
    return [x for part in result if part is not None for x in tensors_of(part)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def negated(x: Tensor) -> Tensor:
    """x, equal and in its strides, whose memory holds -x."""
    actual = torch._neg_view(-x)
    assert actual.is_neg() and torch.equal(actual, x) and actual.stride() == x.stride()
    return actual


def outcome_of(name: str, function: Function, tensors: dict[str, Tensor]) -> list[Any]:
    """`outcome`; of packed sequences the results, as strides of their one row may differ."""
    if name == "attention_varlen":
        return [*parts(function(**tensors))]
    return outcome(function, **tensors)


@pytest.mark.parametrize("name", CALLS)
def test_the_negative_bit_changes_no_result(name: str, device: str) -> None:
    """Launches are those of a call without it, even where that one is known."""
    function, tensors = calls(device)[name]
    function = partial(function, "triton")
    expected = outcome_of(name, function, tensors)
    assert succeeded(expected), expected
    arguments = [name for name, x in tensors.items() if x.itemsize > 1]  # torch negates no codes
    # Not q and k together, whose signs would cancel; options alone, beside a q that is known.
    first, options = arguments[:3], arguments[3:]
    for some in (first[::2], first[1:2], options):
        changed = {argument: negated(tensors[argument]) for argument in some}
        assert outcome_of(name, function, tensors | changed) == expected, some


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", [name for name in CALLS if "append" in name])
def test_the_default_device_changes_no_append(name: str, backend: str) -> None:
    """Other calls are generated, some with a default device of their own."""
    function, tensors = calls("cpu")[name]
    with torch.device("meta"):  # first, of a call that is not known
        actual = outcome_of(name, partial(function, backend), tensors)
    assert succeeded(actual), actual
    assert outcome_of(name, partial(function, backend), tensors) == actual


# torch derives by itself what it computes backward.
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "triton") for name in CALLS]
    + [(name, "torch") for name in CALLS if "gradients" not in name],
)
def test_tangents_are_refused(name: str, backend: str, device: str) -> None:
    """Whichever tensor has one, also where the same call without it is known."""
    function, tensors = calls(device)[name]
    arguments = [name for name, x in tensors.items() if x.itemsize > 1]
    if "gradients" in name:
        arguments = ["do", "dlse"]
    if name in ("attention", "attention_varlen"):  # which carry those of other tensors
        arguments = [name for name in arguments if name not in ("q", "k", "v", *LEARNED)]
    function = partial(function, backend)
    expected = outcome_of(name, function, tensors)
    with forward_ad.dual_level():
        assert outcome_of(name, function, tensors) == expected
        for argument in arguments:
            dual = forward_ad.make_dual(tensors[argument], torch.ones_like(tensors[argument]))
            with pytest.raises(NotImplementedError, match=r"has a tangent .*use reverse mode"):
                function(**tensors | {argument: dual})
                pytest.fail(f"{argument} has lost its tangent")


def mapped(f: Function, *given: Tensor) -> list[Tensor]:
    """The second of two calls."""
    both = torch.vmap(f)(*(torch.stack([0.5 * x, x]) for x in given))
    return [x[1] for x in tensors_of(both)]


def loss(f: Function, *given: Tensor) -> Any:
    return sum(x.float().sin().sum() for x in tensors_of(f(*given)))


WAYS: dict[str, Function] = {
    "compile": lambda f, *x: torch.compile(f, fullgraph=True, backend="aot_eager")(*x),
    "make_fx": lambda f, *x: make_fx(f, tracing_mode="symbolic")(*x)(*x),
    "vmap": mapped,
    "vmap(grad)": lambda f, *x: mapped(torch.func.grad(partial(loss, f), tuple(range(len(x)))), *x),
}
# With torch.autograd.grad, or allocating; of codes, or written in place; not all with gradients.
UNTRACED = {"gradients", "gradients of selected_attention", "attention_block_backward"}
UNTRACED |= {"KVCache.append", "PagedKVCache.append"}
UNMAPPED = {"attention_fp8", "append_paged"}
UNLEARNED = {"attention", "attention_varlen", "decode_attention", *UNMAPPED}
UNLEARNED.add("attention_block_forward")
BY_DAY = [(x, "torch") for x in ("attention", "additive_attention", "append_paged")]
BY_DAY.append(("decode_attention", "triton"))
EACH = itertools.product(CALLS, ("torch", "triton"))
BY_NIGHT = [x for x in EACH if x[0] not in UNTRACED and x not in BY_DAY]


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("name", "backend"), gate_cases(BY_DAY, BY_NIGHT))
def test_what_torch_traces_and_maps(name: str, backend: str) -> None:
    torch._dynamo.reset()
    function, tensors = calls("cpu")[name]

    def call(*given: Tensor) -> Any:
        return function(backend, **dict(zip(tensors, given, strict=True)))

    given = list(tensors.values())
    leaves = [x.clone().requires_grad_(name not in UNLEARNED) for x in given]
    expected = tensors_of(call(*leaves))
    for way, serve in WAYS.items():
        if name in (UNLEARNED if "grad" in way else UNMAPPED if way == "vmap" else ()):
            continue
        if way == "make_fx" and name in ("selected_attention", "attention_varlen"):  # own tensors
            continue
        if "grad" in way:
            loss(call, *leaves).backward()
            expected = [x.grad for x in leaves]
        for x, y in zip(tensors_of(serve(call, *given)), expected, strict=True):
            assert torch.allclose(x, y, rtol=1e-4, atol=1e-5), way


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled_autograd(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces the backward of eager calls, and loses gradients of views of what they saved."""
    torch._dynamo.reset()
    # Its code allocates by torch's own function, which the tests replace.
    monkeypatch.setattr(torch, "empty_strided", torch._C._VariableFunctions.empty_strided)
    made = draws()
    q, k, v, u = leaves = [made(1, 2, 5, 8, grad=True) for _ in range(4)]

    def gradients() -> tuple[Tensor, ...]:
        o = fastattn.attention(q, k, v, causal=True, backend=backend)
        o = o + fastattn.additive_attention(q, k, v, u[0, :, 0])
        return torch.autograd.grad(o.sin().sum(), leaves)

    expected = gradients()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.testing.assert_close(gradients(), expected)


def attended(x: Tensor) -> Tensor:
    return fastattn.attention(x, x.detach(), x.detach(), backend="triton").sum()


def of_detached(x: Tensor) -> Tensor:
    return attended(x.detach()) + x.sum()


def forward_of(f: Function, x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


TRANSFORMS: dict[str, Function] = {
    "jvp": forward_of,
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp(jvp)": lambda f, x: forward_of(lambda y: forward_of(lambda z: f(y) + f(z), x), x),
    "jvp(grad)": lambda f, x: forward_of(lambda y: torch.func.grad(f)(y).sum(), x),
    "grad(jvp)": lambda f, x: torch.func.grad(lambda y: forward_of(f, y))(x),
    "vmap(jvp)": lambda f, x: torch.vmap(partial(forward_of, f))(torch.stack([x, x])),
    "jvp(vmap)": lambda f, x: forward_of(lambda y: torch.vmap(f)(y).sum(), torch.stack([x, x])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_that_go_forward(name: str) -> None:
    """Serve as ever what has no tangent at any level."""
    x = draws()(1, 1, 3, 4)
    assert TRANSFORMS[name](of_detached, x).isfinite().all()
