"""Second derivatives by kernels: backward of tangents, double backward; and which go to the
formula."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from nightly import gate_cases, gate_sets
from torch import Tensor
from torch.autograd import forward_ad

import fastattn
from fastattn import reference
from fastattn.kernels.launch import tiles
from fastattn.ops.derivatives import second_order, transforms
from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_all_within_budget
from fastattn.testing.inputs import draws, to_device
from fastattn.testing.option_examples import option_examples, sets_that_cover_pairs, together

B, H_q, H_k, T_q, T_k, D, D_v = 2, 2, 1, 21, 37, 16, 8
TILE, OF_ROWS = tiles.TileConfig(16, 32), tiles.TileConfig(16, 16)
KINDS = ("forward", "relative", "backward_dq", "backward_dkv")
by_tile = partial(tiles.forced, **dict.fromkeys(KINDS, TILE), decode=OF_ROWS, decode_chunk=OF_ROWS)
EXAMPLES = {
    name: x
    for name, x in option_examples(H_q, H_k, T_q, T_k, D, reach=6).items()
    if not x.keys() & {"relative_keys", "key2", "score_mod"} and name != "bias-with-holes"
}
Function = Callable[..., Any]
Tensors = dict[str, Tensor]


def qkv(dtype: torch.dtype = torch.float32, groups: int = 2) -> Tensors:
    """q, k and v, by as many heads of keys as groups."""
    draw = draws(dtype=dtype)
    keys = B, groups * H_k, T_k
    shapes = {"q": (B, groups * H_q, T_q, D), "k": (*keys, D), "v": (*keys, D_v)}
    return {name: draw(*shape) for name, shape in shapes.items()}


def leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    return {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}


def like(tensors: Iterable[Tensor], seed: int = 1) -> list[Tensor]:
    """Random numbers that are the same in every dtype."""
    draw = draws(seed=seed, dtype=torch.bfloat16)
    return [draw(*x.shape).to(x) for x in tensors]


def pushed(oracle: Function, tensors: Tensors, moves: Tensors) -> list[Tensor]:
    """Results of the oracle and their tangents, which are derivatives of its gradients."""
    results = oracle(**tensors)
    us = [torch.zeros_like(x, requires_grad=True) for x in results]
    grads = torch.autograd.grad(
        results, [tensors[name] for name in moves], us, create_graph=True, materialize_grads=True
    )
    tangents = torch.autograd.grad(
        grads, us, list(moves.values()), create_graph=True, materialize_grads=True
    )
    return [*results, *tangents]


def by_levels(function: Function, tensors: Tensors, moves: Tensors) -> list[Tensor]:
    """`pushed` by torch.autograd.forward_ad."""
    with forward_ad.dual_level():
        still = {name: x.detach() if "bias" in name else x for name, x in tensors.items()}
        duals = {name: forward_ad.make_dual(still[name], x) for name, x in moves.items()}
        pairs = [forward_ad.unpack_dual(x) for x in function(**tensors | duals)]
    return [x for pair in zip(*pairs, strict=True) for x in pair]


def twice(function: Function, tensors: Tensors, moves: Tensors) -> list[Tensor]:
    """Double backward, with the moves as its gradients; of do and dlse too."""
    results = function(**tensors)
    dos = [x.requires_grad_() for x in like(results)]
    grads = torch.autograd.grad(results, [tensors[name] for name in moves], dos, create_graph=True)
    of = [*dos, *tensors.values()]
    return list(torch.autograd.grad(grads, of, list(moves.values()), materialize_grads=True))


def backward(push: Function, function: Function, tensors: Tensors, moves: Tensors) -> list[Tensor]:
    """Gradients of inputs and moves, of all that `push` computes; not of biases themselves."""
    results = push(function, tensors, moves)
    of = [*(x for name, x in tensors.items() if "bias" not in name), *moves.values()]
    return list(torch.autograd.grad(results, of, like(results), materialize_grads=True))


def within_budget(
    ours: Function, its: Function, how: dict[str, Any], tensors: Tensors, moved: Iterable[str],
    varlen: bool = False,
) -> None:  # fmt: skip
    """ours: a derivative of the kernels. its: of the oracle."""
    moves = dict(zip(moved, like(tensors[name] for name in moved), strict=True))
    name = "attention_varlen" if varlen else "attention"
    oracle = partial(getattr(reference, name), **to_device(how, "cpu"))

    def in_dtype(dtype: torch.dtype | None) -> list[Tensor]:
        cpu = [{n: x.detach().cpu() for n, x in some.items()} for some in (tensors, moves)]
        return [x.detach() for x in its(oracle, *(leaves(some, dtype) for some in cpu))]

    exact = in_dtype(torch.float64)
    naive = worst_naive(exact, lambda: in_dtype(None))
    attend = partial(getattr(fastattn, name), **how, backend="triton")
    with by_tile():
        actual = [x.detach().cpu() for x in ours(attend, leaves(tensors), leaves(moves))]
    assert_all_within_budget(map(str, range(len(exact))), actual, exact, naive)


@pytest.fixture
def no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's formula, which would be right too."""
    monkeypatch.setattr(second_order, "_by_formula", None)
    monkeypatch.setattr(second_order, "differentiable_gradients", None)
    monkeypatch.setattr(transforms, "gradients_by_formula", None)


of_tangents = partial(backward, by_levels), partial(backward, pushed)


@pytest.mark.parametrize("names", gate_sets(sets_that_cover_pairs(EXAMPLES, 8)), ids="+".join)
@pytest.mark.usefixtures("no_formula")
def test_every_option(names: tuple[str, ...], device: str) -> None:
    """Gradients of q, k, v, sinks and their tangents, from o, lse and their tangents."""
    how: dict[str, Any] = to_device({**together(EXAMPLES, names), "return_lse": True}, device)
    tensors = {name: x.to(device) for name, x in qkv(groups=1).items()}
    if "sinks" in how:
        tensors["sinks"] = how.pop("sinks")
    within_budget(*of_tangents, how, tensors, list(tensors))


@pytest.mark.parametrize(
    ("moved", "dtype"),
    gate_cases(
        [("kv", torch.float32), ("q", torch.bfloat16), ("v", torch.bfloat16)],
        [("kv", torch.bfloat16), ("q", torch.float32), ("v", torch.float32)],
    ),
    ids=str,
)
@pytest.mark.usefixtures("no_formula")
def test_some_have_no_tangent(moved: str, dtype: torch.dtype, device: str) -> None:
    tensors = {name: x.to(device) for name, x in qkv(dtype).items()}
    within_budget(*of_tangents, {"causal": True, "return_lse": True}, tensors, list(moved))


@pytest.mark.usefixtures("no_formula")
def test_biases_have_tangents(device: str) -> None:
    """Tangents of biases have gradients, as q, k and v and their tangents do."""
    tensors = {name: x[:1, :2, :16] for name, x in qkv().items()}
    tensors |= {"attn_bias": draws()(1, 2, 16, 16), "relative_bias": draws()(2, 7)}
    tensors = {name: x.to(device) for name, x in tensors.items()}
    within_budget(*of_tangents, {"return_lse": True}, tensors, list(tensors))


@pytest.mark.parametrize("dtype", gate_cases([torch.float32], [torch.bfloat16]), ids=str)
@pytest.mark.usefixtures("no_formula")
def test_gradients_of_gradients(dtype: torch.dtype, device: str) -> None:
    """A row of queries sees no key."""
    tensors = {name: x.to(device) for name, x in qkv(dtype).items()}
    tensors["sinks"] = draws()(2 * H_q).to(device)
    how = {"causal": True, "query_offset": -2, "softcap": 2.0, "return_lse": True}
    for results in (slice(1), slice(2)):  # lse has a gradient in some calls

        def some(function: Function, *rest: Any, results: slice = results) -> list[Tensor]:
            return twice(lambda **tensors: function(**tensors)[results], *rest)

        within_budget(some, some, how, tensors, list(tensors))


@pytest.mark.usefixtures("no_formula")
def test_packed_sequences(device: str) -> None:
    """One without queries, one without keys, one with fewer queries than keys."""
    how: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 0, 4, T_q], device=device),
        "cu_seqlens_k": torch.tensor([0, 5, 5, T_k], device=device),
        "causal": True,
        "return_lse": True,
    }
    tensors = {n: x[0].transpose(0, 1).contiguous().to(device) for n, x in qkv().items()}
    within_budget(twice, twice, how, tensors, list(tensors), varlen=True)


LEFT = {
    "attn_bias needs a gradient": {"attn_bias": draws()(1, 1, 16, 16)},
    "relative_keys has no kernel": {"relative_keys": draws()(1, 7, D)},
}


@pytest.mark.parametrize("reason", LEFT)
def test_the_formula_serves_the_rest(
    reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str | None] = []

    def why(*arguments: Any) -> str | None:
        reasons.append(why_no_second(*arguments))
        return reasons[-1]

    why_no_second = second_order.why_no_second
    monkeypatch.setattr(second_order, "why_no_second", why)
    rows = {name: x[:1, :, :16] for name, x in qkv(groups=1).items()}
    tensors = {name: x.to(device) for name, x in (rows | LEFT[reason]).items()}
    within_budget(twice, twice, {"return_lse": True}, tensors, list(tensors))
    assert reasons and all(x is not None and x.startswith(reason) for x in reasons)
