"""`torch.compile(backend="fastattn")` serves attention in graphs, and warns of any in none."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from attention_blocks import BLOCKS, C, SelfMade
from nightly import gate_cases
from swapped_blocks import assert_equal, tokens
from torch import Tensor, nn

from fastattn.compat.swap.eager import backend

pytestmark = pytest.mark.usefixtures("one_thread", "served", "no_graphs_before")


@pytest.mark.parametrize("kind", gate_cases(["timm", "mingpt"], ["sam", "x-transformers"]))
def test_backend_of_torch_compile(kind, served):
    model, x = BLOCKS[kind](), tokens(kind)
    compiled = torch.compile(model, backend=backend, options={"inner": "eager"})
    assert_equal(compiled, model, x)
    # The model in fp64 and fp32, and the compiled one.
    assert len(served) == 1


def test_the_backend_logs_what_it_leaves(monkeypatch, capsys):
    monkeypatch.setenv("FASTATTN_LOG", "1")
    torch.compile(SelfMade("foreign"), backend=backend, options={"inner": "eager"})(tokens())
    left = "left a softmax: scores are changed by attention_blocks.tanh\n"
    assert capsys.readouterr().err == f'fastattn: torch.compile(backend="fastattn") {left}'


class Untraced(nn.Module):
    """torch.compile cannot trace the context manager."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(C, 3 * C), kind

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.random.fork_rng(
            devices=[],
        ):
            if self.kind == "torch's":
                return F.scaled_dot_product_attention(q, k, v)
            hidden = torch.ones(q.shape[2], q.shape[2]).triu(1) > 0
        return (q @ k.mT * 0.3).masked_fill(hidden, -math.inf).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.kind != "before":
            return self.attend(q, k, v).transpose(1, 2).flatten(2)
        o = F.scaled_dot_product_attention(q, k, v)
        with torch.random.fork_rng(devices=[]):
            return o.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", ["torch's", "own", "before"])
def test_the_backend_warns_of_what_is_in_no_graph(swap, served, kind):
    model, x = Untraced(kind), tokens()

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            actual = torch.compile(model, backend=backend, options={"inner": "eager"})(x)
        torch.testing.assert_close(actual, model(x))
        return [str(each.message) for each in told if "swap(model)" in str(each.message)]

    before = kind == "before"
    told = warned()
    assert len(served) == before and len(told) == (not before)
    line = Untraced.attend.__code__.co_firstlineno + 1
    assert before or f"test_compile_backend.py:{line} (with torch.random.fork_rng()" in told[0]
    if kind == "torch's":  # as the warning tells
        swap(model)
        warned()
        assert len(served) == 2  # and by the model itself
