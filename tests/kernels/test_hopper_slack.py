"""Forward on Hopper rescales its output in blocks that raise a row's largest score enough."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_hopper import any_factor, forget
from gluon_emulator import assembly
from nightly import gate_cases
from torch import Tensor

import fastattn
from fastattn.kernels.hopper import forward
from fastattn.kernels.hopper.pipeline import ANY_FACTOR
from fastattn.testing import assert_matches_reference

pytestmark = pytest.mark.usefixtures("emulated")
BLOCK = 128  # keys, and queries of a tile
WARP = 16  # rows


@pytest.fixture
def rescaling(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Record which warps of a consumer multiply, for each block but the first."""
    flags_by_block: list[list[bool]] = []

    def recorded(factor: Any) -> Any:
        flags = any_factor(factor)
        flags_by_block.append(flags.data[::WARP].bool().tolist())
        return flags

    monkeypatch.setitem(assembly, ANY_FACTOR.value, recorded)
    return flags_by_block


def attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    return fastattn.attention(q, k, v, **arguments, backend="hopper")


def rising(levels: list[float], rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k and v whose scores, with scale=1, in block i are about levels[i] log2 units times the
    query's number in rows, and 1 less for half of the keys."""
    generator = torch.Generator().manual_seed(0)
    T_k = BLOCK * len(levels)
    q, k = torch.zeros(1, 1, len(rows), 64), torch.zeros(1, 1, T_k, 64)
    q[..., 0], k[..., 0] = rows, torch.tensor(levels).repeat_interleave(BLOCK) * math.log(2)
    q[..., 1], k[..., 1] = 1.0, -math.log(2) * (torch.arange(T_k) % 2)
    v = torch.randn(1, 1, T_k, 64, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


ALL, NONE = [True] * 4, [False] * 4


@pytest.mark.parametrize("dtype", gate_cases([torch.bfloat16], [torch.float16]), ids=str)
@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        pytest.param([0.0, 3.0, 7.5, -20.0, 7.0], [NONE] * 4, id="little"),
        pytest.param([0.0, 9.0, 0.0, 30.0], [ALL, NONE, ALL], id="jumps"),
        pytest.param([0.0, 5.0, 10.0, 15.0, 20.0], [NONE, ALL, NONE, ALL], id="steps"),
        pytest.param([40.0, 0.0, -40.0], [NONE, NONE], id="falls"),
    ],
)
def test_output_is_rescaled_where_a_row_rises(
    levels: list[float],
    expected: list[list[bool]],
    dtype: torch.dtype,
    rescaling: list[list[bool]],
) -> None:
    q, k, v = rising(levels, torch.ones(64), dtype)
    assert_matches_reference(attention, q, k, v, scale=1.0)
    # The other consumer's rows are zeros, and its scores are equal.
    assert [flags for flags in rescaling if flags != NONE] == [f for f in expected if f != NONE]
    assert len(rescaling) == 2 * len(expected)


def test_a_warp_follows_its_own_rows(rescaling: list[list[bool]]) -> None:
    """Other rows change no bit of a row."""
    rows = torch.ones(64)
    rows[20] = 4.0
    q, k, v = rising([0.0, 3.0, 6.0], rows)
    assert_matches_reference(attention, q, k, v, scale=1.0)
    raised = [False, True, False, False]
    assert [flags for flags in rescaling if flags != NONE] == [raised, raised]
    actual = attention(q, k, v, scale=1.0)
    rescaling.clear()
    alone = attention(rising([0.0, 3.0, 6.0], torch.ones(64))[0], k, v, scale=1.0)
    assert rescaling == [NONE] * 4
    others = rows == 1.0
    assert torch.equal(actual[:, :, others], alone[:, :, others])


@pytest.mark.parametrize("where", gate_cases(["query", "last-block"], ["first-block"]))
def test_nan_is_not_skipped(where: str) -> None:
    """NaN is in a query, or in keys that all queries or those from 290 on see."""
    q, k, v = (x.detach() for x in rising([0.0, 5.0, 12.0], torch.ones(384)))
    spoilt, row, first = {
        "query": (q, 7, 7),
        "first-block": (k, 0, 0),
        "last-block": (k, 290, 290),
    }[where]
    clean = attention(q, k, v, scale=1.0, causal=True)
    spoilt[:, :, row] = math.nan
    actual = attention(q, k, v, scale=1.0, causal=True)
    rows = torch.arange(384)
    expected = rows == first if where == "query" else rows >= first
    assert torch.equal(actual.isnan().any(-1)[0, 0], expected)
    assert actual[:, :, expected].isnan().all()
    assert torch.equal(actual[:, :, ~expected], clean[:, :, ~expected])


def test_wider_heads_sinks_and_no_slack(
    rescaling: list[list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = rising([0.0, 5.0, 12.0], torch.linspace(-1, 4, 70))
    wide = [torch.cat([x.detach()] * 4, -1).div(2).requires_grad_() for x in (q, k, v)]
    for inputs, sink in ((wide, None), ([q, k, v], -30.0), ([q, k, v], 3.0)):
        sinks = {} if sink is None else {"sinks": torch.tensor([sink])}
        rescaling.clear()
        assert_matches_reference(attention, *inputs, scale=1.0, **sinks)
        assert any(any(flags) and not all(flags) for flags in rescaling)
    configured: Callable[..., Any] = forward.forward_config
    monkeypatch.setattr(forward, "forward_config", lambda *a: configured(*a)._replace(SLACK=0))
    forget()
    rescaling.clear()
    assert_matches_reference(attention, q, k, v, scale=1.0)
    assert rescaling == []
