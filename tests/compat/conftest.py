"""Fixtures for the tests of several interfaces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fastattn
from fastattn import dispatch
from fastattn.functional import call_memo
from fastattn.functional import fused_attention as functional
from fastattn.ops.schema import flat, unflat
from fastattn.torch_backend import formula


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Calls as if kernels existed for the CPU, their results by the formula; lists q's shapes.

    torch.compile finds one operator in them, as it does in kernels, and nothing to guard.
    """
    calls: list[tuple[int, ...]] = []

    @torch.compiler.allow_in_graph
    def computed(q: Tensor, k: Tensor, v: Tensor, *fields: Any) -> Any:
        if not isinstance(q, FakeTensor):
            calls.append(tuple(q.shape))
        o, lse = formula.attention(q, k, v, unflat(fields), return_lse=True)
        # Strides of queries that were viewed and transposed, as kernels have them.
        return o.transpose(1, 2).contiguous().transpose(1, 2), lse

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any, *_: Any) -> Any:
        return computed(q, k, v, *flat(options))

    def why_not(inputs: dict[str, Tensor]) -> str | None:
        return "float64" if inputs["q"].dtype == torch.float64 else None

    # A known call would go past `attend`.
    monkeypatch.setattr(call_memo, "key_of", lambda *_: None)
    monkeypatch.setattr(dispatch, "why_no_kernel", why_not)
    monkeypatch.setattr(functional.ops, "attend", attend)
    return calls


@pytest.fixture
def swap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`fastattn.swap`, undone when the test ends."""

    def swapped(model: nn.Module, **options: Any) -> Any:
        done = fastattn.swap(model, **options)
        request.addfinalizer(done.undo)
        return done

    return swapped


@pytest.fixture
def no_graphs_before() -> Any:
    """Compile anew, and see that torch has its own function and settings again."""
    own, config = F.scaled_dot_product_attention, torch._dynamo.config
    settings = config.get_config_copy()  # type: ignore[attr-defined]
    torch._dynamo.reset()
    yield
    assert F.scaled_dot_product_attention is own, "a swap was not undone"
    assert config.get_config_copy() == settings  # type: ignore[attr-defined]
