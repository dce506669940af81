"""The Hopper kernels on parts of a sequence, in the emulator: results in fp32 add up."""

from typing import Any

import pytest
import torch
from emulated_hopper import grid_of
from nightly import gate_cases
from torch import Tensor

import fastattn
from fastattn import attention_block_backward, attention_block_forward, reference
from fastattn.testing import assert_within_budget, make_qkv, worst_naive

pytestmark = pytest.mark.usefixtures("emulated")
BLOCK = 128


def of_blocks(*blocks: int) -> Tensor:
    """Positions int32 of these blocks of a sequence, in this order."""
    return torch.cat([torch.arange(BLOCK) + BLOCK * n for n in blocks]).int()


def shares(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dtype: torch.dtype, ranks: list[Tensor]
) -> dict[str, Tensor]:
    """o and gradients of a causal whole in float64, from parts whose results have this dtype."""
    options = {"causal": True, "backend": "hopper", "out_dtype": dtype}
    whole = {
        name: torch.zeros_like(x).double() for name, x in zip("oqkv", (q, q, k, v), strict=True)
    }
    for mine in ranks:
        parts = []
        for theirs in ranks:
            qkv = (q[:, :, mine.long()], k[:, :, theirs.long()], v[:, :, theirs.long()])
            given: dict[str, Any] = {**options, "positions": (mine[None], theirs[None])}
            parts.append((qkv, given, attention_block_forward(*qkv, **given)))
            assert parts[-1][2][0].dtype == dtype
        o, lse = parts[0][2]
        for _, _, part in parts[1:]:
            o, lse = fastattn.merge(o, lse, *part)
        whole["o"][:, :, mine.long()] = o.double()
        for (qkv, given, _), theirs in zip(parts, ranks, strict=True):
            actual = attention_block_backward(do[:, :, mine.long()], *qkv, o, lse, **given)
            assert {x.dtype for x in actual[:3]} == {dtype}
            whole["q"][:, :, mine.long()] += actual.dq
            whole["k"][:, :, theirs.long()] += actual.dk
            whole["v"][:, :, theirs.long()] += actual.dv
    return whole


@pytest.mark.parametrize(("D", "H_q"), gate_cases([(64, 2), (256, 1)], [(128, 1)]))
def test_parts_in_fp32_add_up_to_the_whole(D: int, H_q: int) -> None:
    """Sums of fp32 parts are within one call's budget, and more exact than sums of bf16 parts."""
    q, k, v = (x.detach() for x in make_qkv(1, H_q, 1, 512, None, D, dtype=torch.bfloat16))
    do = torch.randn_like(q)
    ranks = [of_blocks(0, 3), of_blocks(1, 2)]

    def by_oracle(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = reference.attention(*leaves, causal=True)
        return (o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype)))

    with grid_of(3):
        actual = shares(q, k, v, do, torch.float32, ranks)
        rounded = shares(q, k, v, do, torch.bfloat16, ranks)
    exact = by_oracle(torch.float64)
    naive = worst_naive(exact, lambda: by_oracle(torch.bfloat16))
    for (name, x), true, other in zip(actual.items(), exact, naive, strict=True):
        assert_within_budget(name, x.to(q.dtype), true, other)
        assert (x - true).square().mean() < (rounded[name] - true).square().mean()
