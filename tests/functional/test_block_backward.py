"""Gradients of parts of the keys add up to those of the whole."""

import pytest
import torch

from fastattn import attention, attention_varlen, reference
from fastattn.functional import call_options
from fastattn.functional.block_backward import part_gradients
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
        ({"causal": True}, 20, 12, torch.float16),
        ({"softcap": 1.5, "causal": True}, 16, 16, torch.float32),
    ],
    ids=["plain", "causal-no-whole-16-bytes", "softcap"],
)
def test_two_parts_add_up(options, D, D_v, dtype, backend, device):
    """Queries 3..8 of 9 keys: the first ones see nothing of the second part."""
    q, k, v, do = drawn(
        device, dtype, (2, 4, 6, D), (2, 2, 9, D), (2, 2, 9, D_v), (2, 4, 6, D_v)
    )  # fmt: skip
    o, lse = attention(q, k, v, return_lse=True, backend=backend, **options)
    shares = []
    for part, given in zip((slice(CUT), slice(CUT, None)), parts_of(options), strict=True):
        keys, values = k[:, :, part], v[:, :, part]
        checked = call_options.dense_options(q, keys, values, **given)
        *grads, delta = part_gradients(do, q, keys, values, o, lse, checked, backend=backend)
        assert all(x.dtype == dtype for x in grads)
        naive = (do.float() * o.float()).sum(-1)
        assert_within_budget("delta", delta, (do.double() * o.double()).sum(-1), naive)
        shares.append(grads)
    dq, dk, dv = zip(*shares, strict=True)
    found = ((dq[0].double() + dq[1].double()).to(dtype), torch.cat(dk, 2), torch.cat(dv, 2))
    exact = by_oracle(q, k, v, do, torch.float64, **options)
    naive = worst_naive(exact, lambda: by_oracle(q, k, v, do, dtype, **options))
    for name, got, *both in zip(("dq", "dk", "dv"), found, exact, naive, strict=True):
        assert_within_budget(name, got, *both)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_packed_sequences_and_dropout(dropout, backend, device):
    """One part with all keys: what autograd of the whole call gives. One sequence is empty."""
    q, k, v, do = drawn(device, torch.float32, (7, 4, 8), (9, 2, 8), (9, 2, 8), (7, 4, 8))
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 3, 7], [0, 4, 5, 9])
    )
    options = {"causal": True}
    if dropout:
        seed = torch.tensor([3, 4], device=device)
        options = {"dropout": dropout, "dropout_seed": seed}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention_varlen(*leaves, cu_q, cu_k, return_lse=True, backend=backend, **options)
    wanted = torch.autograd.grad(o, leaves, do)
    checked = call_options.packed_options(q, k, v, cu_q, cu_k, **options)
    with torch.no_grad():
        *found, delta = part_gradients(do, q, k, v, o, lse, checked, backend=backend)
    assert delta.shape == lse.shape
    for name, got, exact in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert_within_budget(name, got, exact.double(), exact)
