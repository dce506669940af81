"""`fastattn.swap`: what changes after a swap counts, in the block and in what it holds."""

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_blocks import BLOCKS, C, Timm
from naive_layers import Block
from nightly import gate_cases
from swapped_blocks import assert_equal, tokens, total
from torch import Tensor, nn
from torch.nn.utils import prune

pytestmark = [
    pytest.mark.usefixtures("one_thread", "served", "no_graphs_before"),
    # torch.compile asks whatever a graph takes for its .grad.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def scale(block: nn.Module) -> None:
    block.scale *= 3


def mask(block: nn.Module) -> None:
    block.bias[..., :3] = 1 - block.bias[..., :3]


def heads_pruned(block: nn.Module) -> None:
    """Half of the heads are gone, as pruning leaves them: narrower layers, a smaller number."""
    block.heads //= 2
    for name in ("to_q", "to_k", "to_v"):
        setattr(block, name, nn.Linear(C, getattr(block, name).out_features // 2, bias=False))
    block.to_out[0] = nn.Linear(C // 2, C)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "scale": ("timm-eager", scale),
    "causal": ("x-transformers-flash", lambda block: setattr(block.attend, "causal", False)),
    "window": ("mixer", lambda block: setattr(block, "window", 2)),
    "heads-pruned": ("diffusers", heads_pruned),
    "mask": ("mingpt", mask),
    "fused": ("timm", lambda block: setattr(block, "fused_attn", False)),
    "function": (
        "torchtune",
        lambda block: setattr(
            block,
            "attention_call",
            lambda q, k, v, mask, p: F.scaled_dot_product_attention(q, k, v),
        ),
    ),
    "processor": (
        "diffusers",
        lambda block: setattr(block, "processor", lambda attn, x: attn.to_out[0](attn.to_q(x))),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_the_swap_counts(swap, name):
    kind, change = CHANGES[name]
    model = nn.Sequential(BLOCKS[kind]())
    plain = copy.deepcopy(model)
    swap(model, eager=True)
    assert_equal(model, plain, tokens(kind))
    for block in (model[0], plain[0]):
        torch.manual_seed(0)
        change(block)
    assert_equal(model, plain, tokens(kind))
    assert not torch.equal(plain(tokens(kind)), BLOCKS[kind]()(tokens(kind)))


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


def reading(seen: list[Tensor]) -> Callable[..., None]:
    return lambda module, args, output: seen.append(output.detach())


def editing(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
def test_hooks_of_parts(swap, when):
    model = nn.Sequential(BLOCKS["timm-eager"]())
    drop = next(x for x in model.modules() if isinstance(x, nn.Dropout))
    plain, x = copy.deepcopy(model), tokens()
    if when != "before":
        done = swap(model, eager=True)
    if when == "after a call":
        model(x)
    seen: list[Tensor] = []
    drop.register_forward_hook(reading(seen))
    if when == "before":
        done = swap(model, eager=True)
    assert torch.equal(model(x), plain(x))
    assert [weights.shape for weights in seen] == [(2, 4, 7, 7)]
    assert "a hook, or a forward of its own, is on a part of it" in str(done)
    drop.register_forward_hook(editing)
    assert not torch.equal(model(x), plain(x))
    drop._forward_hooks.clear()
    before = total(done)
    model(x)
    assert total(done) == before + 1


class WindowOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.tensor(4))


# What holds a window of 4, and how it becomes one of 2.
WINDOWS: dict[str, tuple[Callable[[], Any], Callable[[Any], int], Callable[[Any], Any]]] = {
    "product": (
        lambda: SimpleNamespace(block=2, blocks=2),
        lambda w: w.block * w.blocks,
        lambda w: setattr(w, "blocks", 1),
    ),
    "buffer": (WindowOf, lambda w: w.buffer, lambda w: w.buffer.fill_(2)),
    "partial": (
        lambda: SimpleNamespace(of=functools.partial(min, 4)),
        lambda w: w.of(100),
        lambda w: setattr(w, "of", functools.partial(min, 2)),
    ),
}


class Windowed(Block):
    """A window that a holder holds, in whatever way."""

    def scores(self, scores: Tensor) -> Tensor:
        steps = torch.arange(scores.shape[-1])
        width = WINDOWS[self.kind][1](self.holder)
        return scores.masked_fill((steps[:, None] - steps).abs() >= width, float("-inf"))


# torch.compile guards on each in a way of its own.
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_wherever_they_are_held(swap, kind):
    make, _, change = WINDOWS[kind]
    model = Windowed(holder=make(), kind=kind)
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens(T=12))
    for block in (model, plain):
        change(block.holder)
    assert_equal(model, plain, tokens(T=12))
    assert_equal(model, plain, tokens(T=20))
    assert total(done) == 3, str(done)


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


COPIES = [(kind, how) for kind in ("timm-eager", "diffusers", "timm")
          for how in ("copy", "pickle", "replica", "deepcopy")]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), gate_cases(COPIES[:7], COPIES[7:]))
def test_copies_have_their_own_parts(swap, kind, how):
    model = BLOCKS[kind]()
    done = swap(model, eager=True)
    model(tokens())
    if how == "replica":
        twin = model._replicate_for_data_parallel()
        twin._parameters = dict(model._parameters)
    else:
        twin = {"copy": copy.copy, "deepcopy": copy.deepcopy}.get(
            how, lambda x: pickle.loads(pickle.dumps(x))
        )(model)
        twin._modules = dict(twin._modules)
    part = "to_q" if kind == "diffusers" else "qkv"
    setattr(twin, part, nn.Linear(C, getattr(model, part).out_features))
    plain = copy.deepcopy(BLOCKS[kind]())
    plain.load_state_dict(twin.state_dict(), strict=False)
    if kind == "diffusers":
        plain.to_q = twin.to_q
    before = total(done)
    assert_equal(twin, plain, tokens())
    # Those that share their attributes share the counts.
    assert total(done) == before + (how in ("copy", "replica"))


def test_pruned_weights(swap):
    model = nn.Sequential(Timm())
    plain = copy.deepcopy(model)
    done = swap(model)
    for blocks in (model, plain):
        prune.l1_unstructured(blocks[0].qkv, "weight", amount=0.5)
    # What pruning leaves of a call with gradients cannot be copied.
    with torch.no_grad():
        plain(tokens())
    assert_equal(model, plain, tokens())
    assert total(done) == 1, str(done)
