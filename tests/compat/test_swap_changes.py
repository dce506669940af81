"""`fastattn.swap`: what changes after a swap counts, in the block and in what it holds."""

import copy
from typing import Any

import pytest
import torch
from attention_blocks import BLOCKS, C, Timm
from naive_layers import Block
from swapped_blocks import assert_equal, tokens, total
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fastattn
from fastattn.compat.swap import eager

STATS = torch._dynamo.utils.counters["stats"]
pytestmark = pytest.mark.usefixtures("one_thread", "served", "no_graphs_before")


def test_dropout_changed_after_the_swap(swap):
    for fused in (True, False):
        model = Timm(fused)
        done = swap(model, eager=True)
        model(tokens())
        model.attn_drop.p = 0.5
        assert not torch.equal(model(tokens()), model(tokens()))
        model.eval()
        assert torch.equal(model(tokens()), model(tokens()))
        assert done.calls[""].passed == 0, str(done)
        assert done.calls[""].served >= 5
        done.undo()


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
def test_hooks_of_parts(swap, when):
    model, x = BLOCKS["timm-eager"](), tokens()
    plain, seen = copy.deepcopy(model), []
    if when != "before":
        done = swap(model, eager=True)
    if when == "after a call":
        model(x)
    model.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    if when == "before":
        done = swap(model, eager=True)
    assert torch.equal(model(x), plain(x))
    assert seen == [(2, 4, 7, 7)]
    assert "a hook, or a forward of its own, is on a part of it" in str(done)
    model.attn_drop.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert not torch.equal(model(x), plain(x))
    model.attn_drop._forward_hooks.clear()
    before = total(done)
    model(x)
    assert total(done) == before + 1


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("remade", [lambda model: model, copy.deepcopy])
def test_a_swap_ends_the_one_before(swap, eager, remade):
    """Only the later one counts and undoes, what a parametrization has derived too."""
    model = nn.ModuleList([Timm(not eager), nn.MultiheadAttention(C, 4)])
    parametrize.register_parametrization(model[1], "in_proj_bias", nn.Identity())
    first, x = swap(model, eager=eager), tokens()
    model = remade(model)
    second = swap(model, eager=eager)
    parametrize.register_parametrization(model[1], "in_proj_weight", nn.Identity())
    first.undo()
    model[1](model[0](x), x, x, need_weights=False)
    assert [total(first), total(second)] == [0, 2], f"{first}\n{second}"
    second.undo()
    model[1](model[0](x), x, x, need_weights=False)
    assert total(second) == 2 and not isinstance(model[1], fastattn.MultiheadAttention)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class Holding(Block):
    """Scores by functions of its class, of a part's class and of the class of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.held = nn.Identity(), Held()

    def scores(self, scores: Tensor) -> Tensor:
        return self.held.apply(self.part(scores))


class Held:
    def apply(self, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("place", [(Holding, "scores"), (nn.Identity, "forward"), (Held, "apply")])
def test_functions_of_classes_that_change(swap, monkeypatch, place):
    model = Holding()
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    monkeypatch.setattr(*place, lambda self, scores: 3 * scores)
    assert_equal(model, plain, tokens())
    assert total(done) == 2, str(done)


class Cached(Block):
    """Keeps keys, counts its tokens and reads its own number."""

    def __init__(self, kept: str = "", depth: int = 0) -> None:
        super().__init__(kept=kept, depth=depth, factor=1 + depth / 3, k=None, rows=[], pos=0)

    def forward(self, x: Tensor, weights: bool = False) -> Tensor:
        q, k = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)[:2]
        if self.kept == "tensor":
            k = self.k = k if self.k is None else torch.cat([self.k, k], 2)
            self.pos += x.shape[1]
        if self.kept == "list":
            self.rows.append(k)
            k = torch.cat(self.rows, 2)
        weighed = (q @ k.mT * self.factor / (self.depth + self.pos + 1)).softmax(-1)
        self.last = weighed if weights else None
        return (weighed @ k).transpose(1, 2).flatten(2)


class Widening(nn.Module):
    """A layer of a pyramid: each has half the tokens, twice the width and twice the heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.merge = heads, nn.Linear(2 * heads, 4 * heads)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        x = ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)
        return self.merge(x[:, : x.shape[1] // 2])


def test_layers_share_what_was_captured(swap):
    model = nn.Sequential(*(Cached(depth=i) for i in range(5)))
    plain, before = copy.deepcopy(model), STATS["unique_graphs"]
    done = swap(model, eager=True)
    for T in (7, 5, 6):
        assert_equal(model, plain, tokens(T=T))
    assert total(done) == 15 and STATS["unique_graphs"] - before <= 4, str(done)


@pytest.mark.parametrize(("kept", "count"), [("tensor", 20), ("list", eager.LIMIT)])
def test_caches_are_not_captured_at_each_token(swap, kept, count):
    model = Cached(kept)
    plain, before = copy.deepcopy(model), STATS["unique_graphs"]
    done = swap(model, eager=True)
    with torch.no_grad():
        for i in range(20):
            x = tokens(T=1, seed=i)
            assert torch.allclose(model(x), plain(x), atol=1e-5)
    assert STATS["unique_graphs"] - before <= min(count, eager.LIMIT) and total(done) == count
    assert ("captures of such calls fits" in str(done)) == (kept == "list")


def test_captures_of_a_class_have_a_ceiling(swap, monkeypatch):
    model = nn.Sequential(Cached(), Timm())
    done = swap(model, eager=True)
    model(tokens())
    monkeypatch.setattr(eager, "CEILING", 0.0)
    for x in (tokens(), tokens(T=1)):
        model(x)
    assert done.calls["0"].served == 2 and "the limit is 0" in done.calls["0"].reason
    assert done.calls["1"].served == 3, "its calls of torch's function are"


def test_layers_of_another_width_share_no_numbers(swap, monkeypatch):
    """Sizes and heads as variables would take torch.compile half a minute where windows are cut."""
    rewrite, numbers = eager.rewrite, list[Any]()

    def recorded(graph: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        numbers.extend(x for x in values if isinstance(x, (torch.SymInt, torch.SymFloat)))
        return rewrite(graph)

    monkeypatch.setattr(eager, "rewrite", recorded)
    model = nn.Sequential(Widening(2), Widening(4))
    done = swap(model, eager=True)
    model(tokens()[..., :4])
    assert total(done) == 2 and numbers == []


def test_calls_are_refused_by_their_form(swap):
    model = nn.Sequential(Cached(), Cached())
    done = swap(model, eager=True)
    for weights in (True, False, True, False):
        model[0](tokens(), weights=weights)
    with pytest.raises(RuntimeError):
        model[0](tokens()[..., 1:])
    model[0](tokens())
    assert (done.calls["0"].served, done.calls["0"].passed) == (3, 2)
    assert "weights are kept or returned" in str(done) and list(done.unseen) == ["1"]


@pytest.mark.parametrize("inner", ["fastattn", "eager"])
def test_models_compiled_after_the_swap(swap, served, inner):
    model = nn.Sequential(Cached(), Timm(), Timm(fused=False))
    done, left = swap(model[:2], eager=True), swap(model[2])
    model[2](tokens())
    assert "its code has a softmax of its own" in left.left[""]
    options = {"options": {"inner": "eager"}} if inner == "fastattn" else {}
    torch.compile(model[:2], backend=inner, **options)(tokens())
    assert list(done.replaced) == (["0", "1"] if inner == "fastattn" else ["1"])
    assert len(served) == len(done.replaced)
    assert ("traced its forward for another backend" in str(done)) == (inner == "eager")


@pytest.mark.parametrize(("way", "captures"), [("whole", True), ("whole", False), ("alone", False)])
def test_a_call_that_a_backend_serves_counts_once(swap, way, captures):
    model = nn.Sequential(Timm(fused=False), Timm())
    done = swap(model, eager=captures)
    for part in [model] if way == "whole" else model:
        part.compile(backend="fastattn", options={"inner": "eager"})
    model(tokens())
    counts = {name: (x.served, x.passed) for name, x in done.calls.items() if name}
    assert counts == {"0": (1, 0), "1": (1, 0)} and list(done.replaced) == ["0", "1"]
    assert way == "alone" or "captured by torch.compile" in done.replaced["0"]


def test_layers_compiled_one_by_one(swap):
    model = nn.Sequential(*(Timm(fused=False) for _ in range(3)))
    done = swap(model, eager=True)
    for layer in model:
        layer.compile(backend="eager")
    model(tokens())
    assert list(done.left) == ["0", "1", "2"] and not done.unseen
