"""torch's own attention with the semantics of the kernels: the same cases, the same budget."""

import math
from functools import partial

import pytest
import torch

import fastattn
from fastattn import reference
from fastattn.testing import assert_within_budget, make_qkv, worst_naive
from fastattn.testing.compare import assert_matches_reference
from fastattn.torch_backend import attend as torch_backend

B, T_q, T_k = 3, 21, 34
PADDING = torch.rand(B, T_k, generator=torch.Generator().manual_seed(0)) < 0.5
PADDING[2] = False

ARGUMENTS = {
    "full": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "query_offset": 0},
    "causal-per-row": {"causal": True, "query_offset": torch.tensor([0, 13, -40])},
    "window": {"window": (7, 2)},
    "window-causal": {"window": 5},
    "padding": {"key_padding_mask": PADDING},
    "padding-causal": {"key_padding_mask": PADDING, "causal": True},
    "lengths": {"key_lengths": torch.tensor([34, 9, 0])},
    "lengths-causal": {"key_lengths": torch.tensor([50, 9, -1]), "causal": True, "scale": 0.4},
}


def torch_attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, backend="torch", **arguments)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_matches_the_oracle(case: str, dtype: torch.dtype) -> None:
    """Once with lse, which takes the plain formula, and once without, which takes torch's."""
    q, k, v = make_qkv(B, 4, 2, T_q, T_k, 16, 24, dtype=dtype)
    assert_matches_reference(torch_attention, q, k, v, **ARGUMENTS[case])

    def without_lse(q, k, v, *, return_lse, **arguments):
        o = torch_attention(q, k, v, **arguments)
        return o, torch.zeros(o.shape[:3]).requires_grad_()

    def oracle(q, k, v, *, return_lse, **arguments):
        return fastattn.reference.attention(q, k, v, **arguments), torch.zeros(1).requires_grad_()

    def run(attention, *inputs):
        o, _ = attention(*inputs, return_lse=False, **ARGUMENTS[case])
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        return (o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype)))

    exact = run(oracle, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    naive = worst_naive(exact, lambda: run(oracle, q, k, v))
    ours = run(without_lse, q, k, v)
    for name, *triple in zip(("o", "dq", "dk", "dv"), ours, exact, naive, strict=True):
        assert_within_budget(name, *triple)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -3e38], ids=["nan", "inf", "huge"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_padded_keys_reach_nothing(return_lse: bool, poison: float) -> None:
    q, k, v = make_qkv(B, 4, 2, T_q, T_k, 16)
    dirty = [x.detach().masked_fill(~PADDING[:, None, :, None], poison) for x in (k, v)]

    def run(k, v):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o = torch_attention(*inputs, causal=True, key_padding_mask=PADDING, return_lse=return_lse)
        total = o[0].sum() if return_lse else o.sum()
        return (total.detach(), *torch.autograd.grad(total, inputs))

    for clean, poisoned in zip(run(k, v), run(*dirty), strict=True):
        assert torch.equal(clean, poisoned)


def test_no_mask_is_built_where_torch_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = torch_backend.scaled_dot_product_attention

    def recorded(*inputs, **options):
        seen.append((options["attn_mask"] is None, options["is_causal"], options["enable_gqa"]))
        return original(*inputs, **options)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", recorded)
    square = make_qkv(1, 4, 2, 6, D=8)
    torch_attention(*square, causal=True)
    torch_attention(*square)
    torch_attention(*make_qkv(1, 2, 2, 1, 6, 8), causal=True)
    torch_attention(*make_qkv(1, 2, 2, 3, 6, 8), causal=True)
    assert seen == [
        (True, True, True),
        (True, False, True),
        (True, False, False),
        (False, False, False),
    ]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(sizes) -> None:
    q, k, v = make_qkv(2, 2, 1, *sizes, D=8)
    o = torch_attention(q, k, v)
    assert o.shape == (2, 2, sizes[0], 8)
    assert (o == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_no_sequences_have_gradients(backend: str, return_lse: bool, device: str) -> None:
    """Train on nothing; a step whose batch is empty on one rank must go on."""
    q, k, v = (torch.zeros(0, 2, D, device=device, requires_grad=True) for D in (8, 8, 12))
    sinks = torch.zeros(2, device=device, requires_grad=True)
    found = fastattn.attention_varlen(
        q, k, v, torch.zeros(1, dtype=torch.int32, device=device), sinks=sinks,
        return_lse=return_lse, backend=backend,
    )  # fmt: skip
    o, *rest = found if return_lse else (found,)
    assert o.shape == (0, 2, 12) and [x.shape for x in rest] == [(2, 0)] * return_lse
    leaves = (q, k, v, sinks)
    for grad, x in zip(
        torch.autograd.grad(sum(x.sum() for x in (o, *rest)), leaves), leaves, strict=True
    ):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("case", ARGUMENTS)
def test_asking_for_lse_changes_no_output(case: str) -> None:
    """The path with lse shares its formula with the oracle: torch's own attention judges it."""
    q, k, v = make_qkv(B, 4, 2, T_q, T_k, 16, dtype=torch.float64)
    o, lse = torch_attention(q, k, v, return_lse=True, **ARGUMENTS[case])
    fused = torch_attention(q, k, v, **ARGUMENTS[case])
    torch.testing.assert_close(o, fused, rtol=1e-12, atol=1e-12)
    # Values of 1 at one key and 0 elsewhere read a weight: exp(score - lse).
    picked = torch.zeros_like(v)
    picked[:, :, 13] = 1
    weight = torch_attention(q, k, picked, **ARGUMENTS[case])[..., 0]
    scale = ARGUMENTS[case].get("scale", 0.25)
    score = (q.unflatten(1, (2, 2)) @ k[:, :, None, 13, :, None]).flatten(1, 2)[..., 0] * scale
    seen = weight > 0
    torch.testing.assert_close((score - lse)[seen].exp(), weight[seen], rtol=1e-6, atol=0)
    assert seen.any()


@pytest.mark.parametrize("H_k", [1, 2, 4])
@pytest.mark.parametrize("arguments", [{"causal": True}, {"window": (3, 2)}], ids=str)
def test_second_derivatives(arguments, H_k: int) -> None:
    """Differentiate a gradient penalty, which torch's own fused kernel refuses."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, H, 9, 8, requires_grad=True) for H in (4, H_k, H_k))

    def penalty_gradients(attend, dtype):
        o = attend(*(x.to(dtype) for x in (q, k, v)), **arguments)
        first = torch.autograd.grad(o.square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    on_torch = partial(fastattn.attention, backend="torch")
    ours = penalty_gradients(on_torch, torch.float32)
    ref = penalty_gradients(reference.attention, torch.float64)
    naive = worst_naive(ref, lambda: penalty_gradients(reference.attention, torch.float32))
    for x, exact, plain in zip(ours, ref, naive, strict=True):
        assert_within_budget("second derivative", x, exact, plain)


def test_first_derivatives_stay_those_of_the_fused_kernel() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = fastattn.attention(q, k, v, causal=True, backend="torch")
    for x, y in zip(
        torch.autograd.grad(ours.sum(), (q, k, v)),
        torch.autograd.grad(plain.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)
