"""Operators with every option at once: as registered, the bits of a direct call, derived twice."""

from functools import partial

import pytest
import torch

from fastattn.functional.call_options import dense_options
from fastattn.ops import attention_ops, schema
from fastattn.ops.derivatives import second_order
from fastattn.options import LEARNED, Options
from fastattn.testing import assert_within_budget, make_qkv, worst_naive
from fastattn.testing.inputs import to_device
from fastattn.testing.option_examples import option_examples, together
from fastattn.torch_backend import formula

SIZES = {"B": 2, "H_q": 2, "H_k": 1, "T_q": 20, "D": 16}


def everything(device: str) -> Options:
    """Options of every kind that an op has to carry."""
    examples = option_examples(2, 1, 20, 20, 16, reach=4)
    names = ("lengths", "bias", "relative-bias", "sinks", "dropout", "softcap", "window")
    given = to_device(together(examples, (*names, "mask-mod", "score-mod")), device)
    given |= {name: x.requires_grad_() for name, x in given.items() if name in LEARNED}
    q, k, v = make_qkv(**SIZES, device=device, requires_grad=False)
    return dense_options(q, k, v, **given)


@pytest.mark.parametrize("which", ["band", "everything"])
def test_both_ways_to_the_kernels_give_the_same_bits(which: str, device: str) -> None:
    inputs = make_qkv(**SIZES, device=device, dtype=torch.bfloat16)
    options = everything(device) if which == "everything" else Options(left=4, right=2, scale=0.3)
    leaves = [x for x in (*inputs, *options.differentiable) if x is not None]

    def run(function, *arguments):
        o, lse = function(*inputs, *arguments)
        loss = o.float().sin().sum() + lse.cos().sum()
        return (o, lse, *torch.autograd.grad(loss, leaves))

    short, op = (
        run(attention_ops.attend, options),
        run(attention_ops.attention_forward.op, *schema.flat(options)),
    )
    for ours, theirs in zip(short, op, strict=True):
        assert torch.equal(ours, theirs)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """x in its memory order, from between 16 bytes on, which kernels copy."""
    memory = x.new_empty(x.numel() + 1)
    return memory.as_strided(x.shape, x.stride(), 1).copy_(x)


def test_ops_with_every_option_are_registered_right(device: str) -> None:
    layout = {"layout": "bthd", "dtype": torch.bfloat16}
    q, k, v = (shifted(x.detach()) for x in make_qkv(**SIZES, device=device, **layout))
    flat = tuple(
        x.detach() if isinstance(x, torch.Tensor) else x for x in schema.flat(everything(device))
    )
    torch.library.opcheck(attention_ops.attention_forward.op, (q, k, v, *flat))
    o, lse = attention_ops.attention_forward.op(q, k, v, *flat)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    torch.library.opcheck(
        attention_ops.attention_backward.op, (do, dlse, q, k, v, o, lse, "qkv", *flat)
    )
    delta = attention_ops.attention_backward.op(do, dlse, q, k, v, o, lse, "d", *flat)[3]
    for op in (
        attention_ops.attention_backward_bias.op,
        attention_ops.attention_backward_relative.op,
    ):
        torch.library.opcheck(op, (do, q, k, v, lse, delta, *flat))


def test_operators_of_tangents_have_fakes(device: str) -> None:
    q, k, v = (x.detach() for x in make_qkv(**SIZES, device=device, layout="bthd"))
    flat = schema.flat(Options(scale=0.3))
    o, lse = attention_ops.attention_forward.op(q, k, v, *flat)
    check = partial(torch.library.opcheck, test_utils="test_faketensor")
    moved = (q, k, v, *map(torch.cos, (q, k, v)), None, None)
    check(second_order.attention_tangent.op, (*moved, None, o, lse, *flat))
    grads = torch.cos(o), torch.cos(lse), torch.sin(o), torch.sin(lse)
    check(second_order.attention_tangent_backward.op, (*grads, *moved, o, lse, o, lse, *flat))


@pytest.mark.parametrize("way", ["short", "op"])
def test_second_derivatives(way: str, device: str) -> None:
    """Differentiate a gradient penalty, and compare with the oracle."""
    options = everything(device)
    inputs = make_qkv(**SIZES, device=device)
    leaves = [x for x in (*inputs, *options.differentiable) if x is not None]

    def ours(q, k, v):
        if way == "short":
            return attention_ops.attend(q, k, v, options)
        return attention_ops.attention_forward.op(q, k, v, *schema.flat(options))

    def plain(dtype):
        return lambda q, k, v: formula.attention(
            *(x.to(dtype) for x in (q, k, v)), options, return_lse=True
        )

    def penalty_gradients(attend):
        o, lse = attend(*inputs)
        loss = o.square().sum() + lse.sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(x.float().square().sum() for x in first)
        return torch.autograd.grad(penalty, leaves)

    exact = penalty_gradients(plain(torch.float64))
    naive = worst_naive(exact, lambda: penalty_gradients(plain(torch.float32)))
    for x, ref, rough in zip(penalty_gradients(ours), exact, naive, strict=True):
        assert_within_budget("second derivative", x, ref, rough)


@pytest.mark.parametrize(
    ("which", "outputs"), [("causal", "lse"), ("everything", "both"), ("packed", "both")]
)
def test_many_gradients_at_once(which: str, outputs: str, device: str) -> None:
    """`is_grads_batched=True`, torch's vmap before torch.func: the bits of one after the other."""
    inputs = make_qkv(**SIZES, device=device)
    options = {
        "causal": Options(causal=True, scale=0.25),
        "everything": everything(device),
        "packed": Options(
            causal=True,
            scale=0.25,
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 13, 20]).to(device)),
            relative_keys=torch.randn(1, 9, 16, device=device).requires_grad_(),
        ),
    }[which]
    if which == "packed":
        inputs = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs]
    leaves = [x for x in (*inputs, *options.differentiable) if x is not None]
    o, lse = attention_ops.attend(*inputs, options)
    wanted = {"lse": (lse,), "both": (o, lse)}[outputs]
    dout = [torch.randn(3, *x.shape, device=device) for x in wanted]

    def gradients(dout, batched=False):
        return torch.autograd.grad(
            wanted, leaves, dout, is_grads_batched=batched, retain_graph=True
        )

    each = [gradients([x[i] for x in dout]) for i in range(3)]
    for x, rows in zip(gradients(dout, batched=True), zip(*each, strict=True), strict=True):
        assert torch.equal(x, torch.stack(rows))
