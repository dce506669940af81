"""Parts of the keys: their o is merged to that of the whole, their gradients add up to its."""

from functools import partial
from typing import Any

import pytest
import torch
from fuzz.judges import check_by_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import (
    BlockGradients,
    attention,
    attention_block_backward,
    attention_block_forward,
    attention_varlen,
    reference,
)
from fastattn.ops import attention_ops, schema
from fastattn.options import Options
from fastattn.testing import assert_within_budget, worst_naive

BACKENDS = ("triton", "torch")
CUT = 5


def drawn(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def by_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dtype: torch.dtype,
    **options,
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    o = reference.attention(*leaves, **options)
    return torch.autograd.grad(o, leaves, do.to(dtype))


def parts_of(options: dict) -> list[dict]:
    """Options of the keys before CUT and of those from it on, whose positions start at 0 again."""
    if not options.get("causal"):
        return [options, options]
    return [{**options, "query_offset": 3}, {**options, "query_offset": 3 - CUT}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "D", "D_v", "dtype"),
    [
        ({}, 16, 16, torch.float32),
        ({"softcap": 1.5, "causal": True}, 20, 12, torch.float16),
    ],
    ids=["plain", "causal-no-whole-16-bytes"],
)
def test_two_parts_add_up(options, D, D_v, dtype, backend, device):
    """Queries 3..8 of 9 keys: the first ones see nothing of the second part."""
    q, k, v, do = drawn(
        device, dtype, (2, 4, 6, D), (2, 2, 9, D), (2, 2, 9, D_v), (2, 4, 6, D_v)
    )  # fmt: skip
    o, lse = attention(q, k, v, return_lse=True, backend=backend, **options)
    shares = []
    for keep, given in zip((slice(CUT), slice(CUT, None)), parts_of(options), strict=True):
        keys, values = k[:, :, keep], v[:, :, keep]
        part = attention_block_backward(do, q, keys, values, o, lse, backend=backend, **given)
        grads = part[:3]
        assert all(x.dtype == dtype for x in grads)
        naive = (do.float() * o.float()).sum(-1)
        assert_within_budget("delta", part.delta, (do.double() * o.double()).sum(-1), naive)
        shares.append(grads)
    dq, dk, dv = zip(*shares, strict=True)
    actual = ((dq[0].double() + dq[1].double()).to(dtype), torch.cat(dk, 2), torch.cat(dv, 2))
    exact = by_oracle(q, k, v, do, torch.float64, **options)
    naive = worst_naive(exact, lambda: by_oracle(q, k, v, do, dtype, **options))
    for name, got, *both in zip(("dq", "dk", "dv"), actual, exact, naive, strict=True):
        assert_within_budget(name, got, *both)


@pytest.mark.parametrize("seed", range(8))
def test_generated_calls(seed: int, one_thread: None, device: str) -> None:
    check_by_kernels("attention_block", seed, device)


def tempered(factors: torch.Tensor) -> Any:
    """A score function that reads a factor for each head."""
    return lambda x, b, h, q_pos, k_pos: x * factors[h]


def values_of(found: BlockGradients) -> list[torch.Tensor]:
    """Gradients of options, which include what a score function reads."""
    of_options = dict(found.of_options)
    return [*of_options.pop("mod_tensors"), *of_options.values()]


R = 3
LEARNED = {
    "attn_bias": (1, 4, 6, 9),
    "relative_bias": (4, 2 * R + 1),
    "relative_keys": (2, 2 * R + 1, 12),
    "relative_query": (2, 4, 6, 12),
    "sinks": (4,),
}


def call_with_learned(device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict]:
    """q, k, v, do, dlse and options of every kind that learns; rows are no whole 16 bytes."""
    shapes = ((2, 4, 6, 12), (2, 2, 9, 12), (2, 2, 9, 20), (2, 4, 6, 20), (2, 4, 6))
    inputs = drawn(device, dtype, *shapes)
    inputs[4] = inputs[4].float()
    learned = zip(LEARNED, drawn(device, dtype, *LEARNED.values()), strict=True)
    options: dict[str, Any] = {name: x.requires_grad_() for name, x in learned}
    options["score_mod"] = tempered(options["sinks"].detach().clone().requires_grad_())
    return inputs, {"causal": True, "dropout": 0.2, "dropout_seed": torch.tensor([3, 4]), **options}


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_in_fp32_are_those_of_16_bits_before_they_are_rounded(backend, device):
    (q, k, v, do, dlse), options = call_with_learned(device, torch.bfloat16)
    options["dropout_seed"] = options["dropout_seed"].to(device)
    options["backend"] = backend
    narrow, lse = attention_block_forward(q, k, v, **options)
    wide, wide_lse = attention_block_forward(q, k, v, out_dtype=torch.float32, **options)
    assert wide.dtype == torch.float32 and torch.equal(wide_lse, lse)
    assert torch.equal(wide.bfloat16(), narrow) and not torch.equal(wide, narrow.float())
    given = (do, q, k, v, wide, lse)
    rounded = attention_block_backward(*given, dlse=dlse, **options)
    actual = attention_block_backward(*given, dlse=dlse, out_dtype=torch.float32, **options)
    assert torch.equal(actual.delta, rounded.delta)
    for x, y in zip(
        (*actual[:3], *values_of(actual)),
        (*rounded[:3], *values_of(rounded)),
        strict=True,
    ):
        assert x.dtype == torch.float32 and y.dtype == torch.bfloat16
        assert torch.equal(x.bfloat16(), y) and not torch.equal(x, y.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences(backend, device):
    """One part with all keys: what autograd of the whole call gives. One sequence is empty, and
    gradients of what all of them share are sums over them.
    """
    tensors = drawn(
        device, torch.float32, (7, 4, 8), (9, 2, 8), (9, 2, 8), (4, 7), (4, 7, 8), (7, 4, 8), (4,),
        (4,), (7, 4, 8),
    )  # fmt: skip
    *leaves, do = [x.requires_grad_() for x in tensors[:-1]] + tensors[-1:]
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 3, 7], [0, 4, 5, 9])
    )
    names = ("relative_bias", "relative_keys", "relative_query", "sinks")
    options = {"causal": True, "dropout": 0.4, "dropout_seed": torch.tensor([3, 4], device=device)}
    options |= {**dict(zip(names, leaves[3:], strict=False)), "backend": backend}
    options["score_mod"] = tempered(leaves[-1])
    o, lse = attention_varlen(*leaves[:3], cu_q, cu_k, return_lse=True, **options)
    wanted = torch.autograd.grad(o, leaves, do)
    given = (do, *leaves[:3], o.detach(), lse.detach(), cu_q, cu_k)
    actual = attention_block_backward(*given, **options)
    assert actual.delta.shape == lse.shape
    results = (*actual[:3], *(actual.of_options[name] for name in names))
    results += actual.of_options["mod_tensors"]
    named = ("dq", "dk", "dv", *names, "factors")
    for name, got, exact in zip(named, results, wanted, strict=True):
        assert_within_budget(name, got, exact.double(), exact)


def test_tracers_know_that_results_are_fp32(device):
    (q, k, v, do, _), _ = call_with_learned(device, torch.bfloat16)
    q, k = (torch.nn.functional.pad(x, (0, 4)) for x in (q, k))
    v, do = (torch.nn.functional.pad(x, (0, 4)) for x in (v, do))
    flat = schema.flat(Options(fp32_results=True, relative_query=q, relative_keys=k[0, :, :7]))
    check = partial(torch.library.opcheck, test_utils="test_faketensor")
    check(attention_ops.attention_forward.op, (q, k, v, *flat))
    o, lse = attention_ops.attention_forward.op(q, k, v, *flat)
    check(attention_ops.attention_backward.op, (do, None, q, k, v, o.bfloat16(), lse, "qkv", *flat))


def test_tracers_see_the_operators_of_its_gradients(device: str) -> None:
    with FakeTensorMode():
        q, k, v, do = (torch.empty(1, 2, 16, 32, device=device) for _ in range(4))
        o, lse = attention_block_forward(q, k, v, causal=True, backend="triton")
        actual = attention_block_backward(do, q, k, v, o, lse, causal=True, backend="triton")
    assert [x.shape for x in (actual.dq, actual.dk, actual.dv)] == [q.shape] * 3
    assert actual.delta.shape == lse.shape
