"""`fastattn.swap`: attention is served where it stands, and what changes after the swap counts."""

import copy
import functools
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_blocks import BLOCKS, LENGTHS, Attend, C, Diffusers, Mixer, Timm
from naive_layers import Block
from nightly import gate_cases
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.compat.swap.eager import backend
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = [
    pytest.mark.usefixtures("one_thread", "served", "no_graphs_before"),
    # torch.compile asks whatever a graph takes for its .grad.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

torch_attention = F.scaled_dot_product_attention


@pytest.fixture
def no_graphs_before() -> Any:
    torch._dynamo.reset()
    yield
    assert F.scaled_dot_product_attention is torch_attention, "a swap was not undone"


def tokens(name: str = "", T: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LENGTHS.get(name, T), C, generator=generator)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter that has one."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    wanted = [x, *model.parameters()]
    grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def assert_equal(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """A swapped model gives what its twin gives that was not swapped."""
    ref = results(copy.deepcopy(plain).double(), x.double())
    naive = worst_naive(ref, lambda: results(plain, x))
    for i, triple in enumerate(zip(results(model, x), ref, naive, strict=True)):
        assert_within_budget(f"result {i}", *triple)


def total(done: Any) -> int:
    return sum(calls.served for calls in done.calls.values())


# The property test has the others.
ALONE = ("timm", "books", "sam", "swin-v2", "x-transformers", "x-transformers-flash")


@pytest.mark.parametrize("name", gate_cases(ALONE, [x for x in BLOCKS if x not in ALONE]))
def test_blocks_as_libraries_write_them(swap, name):
    model = nn.Sequential(BLOCKS[name](), BLOCKS[name]())
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens(name))
    assert total(done) == 2, str(done)
    assert len(done.replaced) == 2 and not done.left, str(done)
    assert "(1 calls served, 0 not)" in str(done)
    before = total(done)
    done.undo()
    assert torch.equal(model(tokens(name)), plain(tokens(name)))
    assert total(done) == before
    assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]
    assert all(not x._forward_hooks and not x._forward_pre_hooks for x in model.modules())


def scale(block: nn.Module) -> None:
    block.scale *= 3


def mask(block: nn.Module) -> None:
    block.bias[..., :3] = 1 - block.bias[..., :3]


def mask_replaced(block: nn.Module) -> None:
    block.bias = torch.ones(64, 64).tril().flip(0, 1).view(1, 1, 64, 64).contiguous()


def heads_pruned(block: nn.Module, projections: list[str]) -> None:
    """Half of the heads are gone, as pruning leaves them: narrower layers, a smaller number."""
    block.heads //= 2
    for name in projections:
        setattr(block, name, nn.Linear(C, getattr(block, name).out_features // 2, bias=False))
    block.to_out[0] = nn.Linear(C // 2, C)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "scale": ("timm-eager", scale),
    "scale-config": ("litgpt", lambda block: setattr(block.config, "scale", 0.9)),
    "causal": ("x-transformers-flash", lambda block: setattr(block.attend, "causal", False)),
    "window": ("mixer", lambda block: setattr(block, "window", 2)),
    "prefix": ("mixer", lambda block: setattr(block, "prefix", 2)),
    "heads-pruned": ("vit-pytorch", lambda block: heads_pruned(block, ["to_qkv"])),
    "heads-pruned-fused": (
        "diffusers",
        lambda block: heads_pruned(block, ["to_q", "to_k", "to_v"]),
    ),
    "mask": ("mingpt", mask),
    "mask-replaced": ("mingpt", mask_replaced),
    "learned-scale": ("swin-v2", lambda block: block.logit_scale.data.neg_()),
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


# By night what torch.compile guards on as it does on others.
NIGHTLY = ("prefix", "mask-replaced", "heads-pruned", "learned-scale")


@pytest.mark.parametrize(
    "name", gate_cases([name for name in CHANGES if name not in NIGHTLY], NIGHTLY)
)
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


@dataclass(slots=True)
class Slots:
    window: int = 4


class WindowOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.register_buffer("buffer", torch.tensor(4))


def deep() -> Any:
    return SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(window=4))))


def in_closure(width: int) -> Callable[[], int]:
    return lambda: width


# What holds a window of 4, and how it becomes one of 2.
WINDOWS: dict[str, tuple[Callable[[], Any], Callable[[Any], int], Callable[[Any], Any]]] = {
    "product": (
        lambda: SimpleNamespace(block=2, blocks=2),
        lambda w: w.block * w.blocks,
        lambda w: setattr(w, "blocks", 1),
    ),
    "power": (
        lambda: SimpleNamespace(log2=2),
        lambda w: 2**w.log2,
        lambda w: setattr(w, "log2", 1),
    ),
    "float": (
        lambda: SimpleNamespace(share=0.5),
        lambda w: int(8 * w.share),
        lambda w: setattr(w, "share", 0.25),
    ),
    "string": (lambda: {"window": "4"}, lambda w: int(w["window"]), lambda w: w.update(window="2")),
    "list": (lambda: [4], lambda w: w[0], lambda w: w.__setitem__(0, 2)),
    "buffer": (WindowOf, lambda w: w.buffer, lambda w: w.buffer.fill_(2)),
    "module": (WindowOf, lambda w: w.width, lambda w: setattr(w, "width", 2)),
    "slots": (Slots, lambda w: w.window, lambda w: setattr(w, "window", 2)),
    "config": (deep, lambda w: w.a.b.c.window, lambda w: setattr(w.a.b.c, "window", 2)),
    "partial": (
        lambda: SimpleNamespace(of=functools.partial(min, 4)),
        lambda w: w.of(100),
        lambda w: setattr(w, "of", functools.partial(min, 2)),
    ),
    "closure": (
        lambda: SimpleNamespace(of=in_closure(4)),
        lambda w: w.of(),
        lambda w: setattr(w, "of", in_closure(2)),
    ),
}


class Windowed(Block):
    """A window that a holder holds, in whatever way."""

    def scores(self, scores: Tensor) -> Tensor:
        steps = torch.arange(scores.shape[-1])
        width = WINDOWS[self.kind][1](self.holder)
        return scores.masked_fill((steps[:, None] - steps).abs() >= width, float("-inf"))


# torch.compile guards on all of them; by day those that it guards on in ways of their own.
BY_DAY = ("product", "buffer", "partial")


@pytest.mark.parametrize("kind", gate_cases(BY_DAY, [x for x in WINDOWS if x not in BY_DAY]))
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


class SelfMade(nn.Module):
    """Attention of no known pattern: another function's softmax, returned weights, odd masks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (-0.3 if self.kind == "negative" else 0.3)
        if self.kind == "softcap":
            scores = 2 * torch.tanh(scores / 2)
        if self.kind == "fill":
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e4)
        if self.kind == "keywords":
            scores = torch.matmul(input=q, other=k.mT)
        if self.kind == "whole":
            scores = (9 * scores).to(torch.int32).to(q.dtype)
        if self.kind == "other-dim":
            scores = scores.softmax(-2)
        if self.kind == "in-place":
            bias = torch.arange(float(x.shape[1]))
            scores = scores + bias[:, None]
            bias[1:].add_(1)
        with torch.set_grad_enabled(self.kind != "no-grad"):
            weights = scores.softmax(-1) if self.kind != "other-dim" else scores
        if self.kind == "gate":
            weights = weights * 0.5
        out = (weights @ v).transpose(1, 2).flatten(2)
        return out + weights.sum() if self.kind == "returned" else out


@pytest.mark.parametrize(
    ("kind", "why"),
    {
        "softcap": "scores are changed by <built-in method tanh",
        "fill": "scores are filled with -10000.0, and not with -inf",
        "other-dim": "a softmax is not of the last of 3 or 4 dims",
        "no-grad": "stands between the products",
        "negative": "scores are multiplied by -0.3",
        "gate": "attention weights are changed by <built-in function mul>",
        "in-place": "add_ stands between the products",
        "whole": "rounded to something else than 16, 32 or 64 bits",
        "keywords": "scores are changed by <built-in method matmul",
        "returned": "attention weights have other uses than their product with values",
    }.items(),
)
def test_what_is_no_attention_runs_as_it_is(swap, kind, why):
    model = SelfMade(kind)
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert all(map(torch.equal, results(model, tokens()), results(plain, tokens())))
    assert done.replaced == {}
    assert why in str(done)
    assert (done.calls[""].served, done.calls[""].passed) == (0, 1)


def test_masks_below_what_fp32_holds(swap):
    model = BLOCKS["x-transformers"]().double()
    expected = model(tokens().double())
    swap(model, eager=True)
    torch.testing.assert_close(model(tokens().double()), expected)


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


class Environment(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * float(os.environ.get("FACTOR", "1"))


def test_code_that_reads_the_environment_runs_as_it_is(swap, monkeypatch):
    model = Environment()
    done = swap(model, eager=True)
    model(tokens())
    monkeypatch.setenv("FACTOR", "3")
    assert torch.equal(model(tokens()), Environment.forward(model, tokens()))
    assert done.calls[""].served == 0 and "it reads the environment" in str(done)


class Filled(Block):
    """Masks by numbers and -inf, one after the other; rows of nothing else are left."""

    def scores(self, scores: Tensor) -> Tensor:
        keys = torch.arange(scores.shape[-1])
        padding, ahead = keys < 3, keys[:, None] < keys
        for mask, value in zip((padding, ahead), self.values, strict=True):
            scores = scores.masked_fill(mask, value)
        return scores


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("values", [(LOWEST, LOWEST), (-torch.inf, LOWEST), (LOWEST, -torch.inf)])
def test_rows_that_numbers_hide(swap, values):
    model = Filled(values=values)
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    assert total(done) == 1, str(done)


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[None] @ x[None].mT).softmax(-1) @ x[None]


def test_autocast_decides_the_dtype(swap):
    model = Bare()
    done = swap(model, eager=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(tokens()), Bare()(tokens())
    assert found.dtype == expected.dtype == torch.bfloat16 and total(done) == 1


class Gate(nn.Module):
    """It names softmax, and its attention calls torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attend(flash=True)

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1) * self.attn(x[:, None], x, x)[:, 0]


def test_what_is_counted_in_a_capture_that_fails_counts_once(swap, served):
    model = Gate()
    done = swap(model, eager=True)
    model(tokens())
    assert (done.calls["attn"].served, done.calls["attn"].passed) == (1, 0), str(done)
    assert done.calls[""].served == 0 and len(served) == 1


@pytest.mark.parametrize("how", ["config", "environment", "stance", "jit", "fx"])
def test_calls_that_torch_compile_leaves_are_not_served(swap, how, monkeypatch):
    model, x = BLOCKS["mingpt"](), tokens()
    plain = model(x)
    done = swap(model, eager=True)
    if how == "config":
        with torch._dynamo.config.patch(disable=True):
            found = model(x)
    elif how == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        found = model(x)
    elif how == "stance":
        with torch.compiler.set_stance("force_eager"):
            found = model(x)
    elif how == "jit":
        with warnings.catch_warnings(action="ignore"):
            found = torch.jit.trace(model, x, check_trace=False)(x)
    else:
        found = torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x)
    assert torch.equal(found, plain)
    assert (total(done), done.calls[""].passed) == (0, 1)
    where = "traces the call" if how in ("jit", "fx") else "torch.compile is switched off"
    assert where in str(done)


class Skipping(TorchFunctionMode):
    """Skips attention, as diffusers' skip-layer guidance does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return args[2]
        if getattr(func, "__name__", "") == "softmax":
            return torch.zeros_like(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["diffusers", "mingpt"])
def test_modes_see_the_calls_of_swapped_models(swap, kind):
    model, x = BLOCKS[kind](), tokens()
    plain = model(x)
    with Skipping():
        expected = model(x)
    done = swap(model, eager=True)
    for _ in range(2):
        model(x)
        with Skipping():
            assert torch.equal(model(x), expected)
    assert not torch.equal(expected, plain)
    assert total(done) == 2 - (kind == "mingpt"), str(done)


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


def test_other_models_and_calls_keep_torchs_function(swap, served):
    swapped, other = Timm(), Timm()
    done = swap(swapped)
    other(tokens())
    F.scaled_dot_product_attention(*(torch.randn(1, 1, 2, 4) for _ in range(3)))
    assert served == []
    swapped(tokens())
    with pytest.raises(RuntimeError):
        swapped(tokens(), attn_mask=torch.ones(3, 3))
    other(tokens())
    assert len(served) == 1 and total(done) == 1
    thread = threading.Thread(target=lambda: [swapped(tokens()), other(tokens())])
    thread.start()
    thread.join()
    assert len(served) == 2
    again = swap(other)
    done.undo()
    swapped(tokens())
    other(tokens())
    assert len(served) == 3 and total(again) == 1


def test_checkpoints_recompute_what_was_served(swap):
    model = nn.Sequential(Timm(), Diffusers())
    plain, x = copy.deepcopy(model), tokens().requires_grad_()
    done = swap(model)
    out = x
    for block in model:
        out = checkpoint(block, out, use_reentrant=False)
    ours = torch.autograd.grad(out.sum(), x)[0]
    theirs = torch.autograd.grad(plain(x).sum(), x)[0]
    exact = copy.deepcopy(plain).double()
    x_exact = x.detach().double().requires_grad_()
    ref = torch.autograd.grad(exact(x_exact).sum(), x_exact)[0]
    assert_within_budget("dx", ours, ref, theirs)
    assert total(done) == 4


def test_report_of_classes_whose_names_say_nothing(swap):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Mixer(), Attend(flash=True), nn.Linear(2, 2)

    done = swap(Model())
    assert "test_swap" not in str(done.replaced)
    assert list(done.replaced) == ["b"] and list(done.left) == ["a"]
    assert "replaced b: attention_blocks.Attend: its own forward; calls of torch's" in str(done)
    assert "left a: attention_blocks.Mixer: its code names softmax" in str(done)
    assert "eager=True" in str(done)
    nothing = swap(nn.Linear(2, 2))
    assert str(nothing) == "no attention was found in the code of the model's modules"


def test_nothing_is_replaced_where_no_call_is_served(swap):
    model = nn.Sequential(Timm()).double()
    done = swap(model)
    model(tokens().double())
    assert done.replaced == {}
    assert "None was: float64" in done.left["0"]


class Hidden(nn.Module):
    """Its code does not name torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.function = "scaled_dot_product" + "_attention"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, self.function)(x, x, x)


def test_calls_that_no_name_tells_of_are_served_and_reported(swap):
    model = nn.Sequential(Hidden())
    done = swap(model)
    assert done.replaced == {}
    model(tokens())
    assert list(done.replaced) == ["0"] and total(done) == 1


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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_of_swapped_models_are_refused_by_name(swap):
    done = swap(nn.Sequential(Timm()))
    model = nn.Sequential(Timm())
    done = swap(model)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script .* fastattn\.swap: end the swap"):
        torch.jit.script(model)
    done.undo()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(C, C), 2.0

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return self.inner(x) * self.factor


def doubling(module: Own, x: Tensor, flag: bool = False) -> Any:
    return NotImplemented if flag else x * module.factor


def test_adapters(swap):
    model = nn.Sequential(Own(), Own(), Timm())
    seen: list[int] = []
    hook = model[0].register_forward_hook(lambda *_: seen.append(1))
    x = tokens()
    done = swap(model, adapters={Own: doubling})
    assert torch.equal(model[0](x), 2 * x) and seen == [1]
    hook.remove()
    model[0].factor = 3.0
    for twin in (model[0], copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert torch.equal(twin(x), 3 * x) and type(twin).__name__ == "Own"
    assert torch.equal(torch.compile(model[0], backend="eager", fullgraph=True)(x), 3 * x)
    model[1](x, flag=True)
    assert done.calls["1"].reason == "the adapter leaves the call"
    assert "an adapter computes its calls" in done.replaced["0"]
    assert done.left["1"].endswith("None was: the adapter leaves the call")
    done.undo()
    assert type(model[0]) is Own and "fastattn_calls" not in vars(model[0])


@pytest.mark.parametrize("adapters", [[Own], {"Own": doubling}, {Own: 3}, {Tensor: doubling}])
def test_adapters_are_checked(adapters):
    with pytest.raises(TypeError, match=r"adapters must map classes of torch\.nn\.Module to func"):
        fastattn.swap(nn.Linear(2, 2), adapters=adapters)


def test_calls_are_counted_where_they_are_traced(swap, monkeypatch):
    monkeypatch.undo()  # the list of calls served would have each call traced
    model = nn.ModuleList([Timm(), nn.MultiheadAttention(C, 4)])
    done = swap(model)

    def call(x: Tensor) -> Tensor:
        return model[0](x) + model[1](x, x, x)[0]

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(tokens())
    assert {name: calls.served for name, calls in done.calls.items()} == {"0": 1, "1": 1}
    call(tokens())
    assert {name: calls.served for name, calls in done.calls.items()} == {"0": 2, "1": 2}


@pytest.mark.parametrize("kind", gate_cases(["timm", "mingpt"], ["sam", "x-transformers"]))
def test_backend_of_torch_compile(kind, served):
    model, x = BLOCKS[kind](), tokens(kind)
    compiled = torch.compile(model, backend=backend, options={"inner": "eager"})
    assert_equal(compiled, model, x)
    # The model in fp64 and fp32, and the compiled one.
    assert len(served) == 1


def test_without_transformers_its_models_are_left(swap, monkeypatch):
    import transformers
    from transformers_models import GQA, build

    model = build(transformers.AutoModel, transformers.LlamaConfig(**GQA), "cpu")
    monkeypatch.setitem(sys.modules, "fastattn.compat.transformers.attend", None)
    done = swap(model)
    assert done.replaced == {}
    assert "cannot be registered with transformers" in done.left[""]


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        fastattn.swap({})
