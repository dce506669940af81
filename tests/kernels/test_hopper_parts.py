"""The Hopper kernels on parts of a sequence, in the emulator: positions, and results in fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_hopper import check_on_hopper, emulate_hopper, forget, grid_of
from nightly import gate_cases
from torch import Tensor

import fastattn
from fastattn import attention_block_backward, attention_block_forward, reference
from fastattn.functional.call_options import dense_options
from fastattn.kernels.hopper.host import why_not_hopper
from fastattn.testing import assert_within_budget, make_qkv, worst_naive

# Tiles are too small to share between threads.
pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 128


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    emulate_hopper(monkeypatch, request.node.name)
    yield
    forget()


def of_blocks(*blocks: int) -> Tensor:
    """Positions int32 of these blocks of a sequence, in this order."""
    return torch.cat([torch.arange(BLOCK) + BLOCK * n for n in blocks]).int()


def attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    options = {name: x for name, x in arguments.items() if name != "return_lse"}
    reason = why_not_hopper(q, k, v, dense_options(q, k, v, **options))
    assert reason is None, "another backward would be tested"
    return fastattn.attention(q, k, v, **arguments, backend="hopper")


# Out of order, with gaps; the queries end within a block.
POSITIONS = (of_blocks(2, 4, 0)[None, :300], of_blocks(3, 1, 0)[None])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, id="causal"),
        pytest.param({"D": 128, "window": (150, None)}, id="d128-window"),
        pytest.param({"key_lengths": [260], "softcap": 2.0}, id="lengths-softcap"),
        pytest.param(
            {"window": (20, 0), "keep_first": 3, "sinks": torch.tensor([0.5])},
            id="first-keys-kept-sinks",
        ),
        pytest.param({"prefix_lengths": torch.tensor([400]), "deterministic": False}, id="prefix"),
    ],
)
def test_positions(case: dict[str, Any]) -> None:
    check_on_hopper(attention, H_q=1, T_q=300, T_k=384, positions=POSITIONS, **case)


def test_a_part_of_the_heads() -> None:
    """Which only dropout and functions look at: that of a whole is served like a whole."""
    check_on_hopper(attention, H_q=2, T_q=100, heads=(2, 8))


def test_queries_before_every_key_see_nothing() -> None:
    """No block of theirs is visible: one is computed for all that, and gives nothing."""
    positions = (of_blocks(0, 3)[None], of_blocks(1, 2)[None])
    check_on_hopper(attention, H_q=1, T_q=256, T_k=256, positions=positions)


def shares(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dtype: torch.dtype, ranks: list[Tensor]
) -> dict[str, Tensor]:
    """o and gradients of a causal whole in float64, from parts whose results have this dtype."""
    options = {"causal": True, "backend": "hopper", "out_dtype": dtype}
    whole = {
        name: torch.zeros_like(x, dtype=torch.float64)
        for name, x in {"o": q, "q": q, "k": k, "v": v}.items()
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
            found = attention_block_backward(do[:, :, mine.long()], *qkv, o, lse, **given)
            assert {x.dtype for x in found[:3]} == {dtype}
            whole["q"][:, :, mine.long()] += found.dq
            whole["k"][:, :, theirs.long()] += found.dk
            whole["v"][:, :, theirs.long()] += found.dv
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
        found = shares(q, k, v, do, torch.float32, ranks)
        rounded = shares(q, k, v, do, torch.bfloat16, ranks)
    exact = by_oracle(torch.float64)
    naive = worst_naive(exact, lambda: by_oracle(torch.bfloat16))
    for (name, x), true, other in zip(found.items(), exact, naive, strict=True):
        assert_within_budget(name, x.to(q.dtype), true, other)
        assert (x - true).square().mean() < (rounded[name] - true).square().mean()
