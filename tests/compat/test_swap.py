"""`fastattn.swap`: attention is served where it stands; other calls run as they are."""

import copy
import inspect
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import attention_blocks
import pytest
import torch
import torch.nn.functional as F
from attention_blocks import (
    BLOCKS,
    FORMS,
    Attend,
    C,
    Diffusers,
    Formed,
    Mixer,
    SelfMade,
    Timm,
    mixed,
)
from naive_layers import Block
from nightly import gate_cases
from oracles import assert_by_oracle, with_gradients
from swapped_blocks import assert_equal, tokens, total
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fastattn import dispatch

pytestmark = pytest.mark.usefixtures("one_thread", "served", "no_graphs_before")

STATS = torch._dynamo.utils.counters["stats"]
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
    assert "[1 call so far]" in str(done)
    before = total(done)
    done.undo()
    assert torch.equal(model(tokens(name)), plain(tokens(name)))
    assert total(done) == before
    assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]
    assert all(not x._forward_hooks and not x._forward_pre_hooks for x in model.modules())


class Mixing:
    mixed = staticmethod(mixed)

    def __call__(self, *tensors: Tensor) -> Tensor:
        return mixed(*tensors)


NAMED, CALLED, normalized = {"mixed": mixed}, Mixing(), F.softmax
PLACES: dict[str, Callable[..., Tensor]] = {
    "dict": lambda q, k, v, s, m: NAMED["mixed"](s, v),
    "static": lambda q, k, v, s, m: Mixing.mixed(s, v),
    "object": lambda q, k, v, s, m: CALLED(s, v),
    "file": lambda q, k, v, s, m: attention_blocks.mixed(s, v),
    "decorated": torch.autocast("cpu", enabled=False)(lambda q, k, v, s, m: mixed(s, v)),
    "partial": partial(lambda by, q, k, v, s, m: by(s, v), mixed),
    "other name": lambda q, k, v, s, m: normalized(s, -1) @ v,
}


class Generating(nn.Linear):
    def generate(self, x: Tensor) -> Tensor:
        return self(x).softmax(-1)


@pytest.mark.parametrize("place", PLACES)
def test_attention_in_code_that_a_forward_reaches(swap, place):
    model = nn.Sequential(Formed(PLACES[place]), Generating(C, C))
    done = swap(model, eager=True)
    assert list(done.unseen) == ["0"]
    model(tokens())
    assert total(done) == 1, str(done)


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


@pytest.mark.parametrize(
    ("values", "backend"),
    [
        ((LOWEST, LOWEST), "auto"),
        ((-torch.inf, LOWEST), "auto"),
        ((LOWEST, -torch.inf), "auto"),
        ((LOWEST, -torch.inf), "torch"),
    ],
)
def test_rows_that_numbers_hide(swap, monkeypatch, values, backend):
    """Also where gradients are computed from the lse, which such numbers fill."""
    monkeypatch.setenv(dispatch.ENVIRONMENT, backend)
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
        actual, expected = model(tokens()), Bare()(tokens())
    assert actual.dtype == expected.dtype == torch.bfloat16 and total(done) == 1


def test_products_in_and_out_of_autocast_are_not_joined(swap):
    """Though they were where autocast was off all along."""
    model, x = Formed(FORMS["out-of-autocast"]), tokens()
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), plain(x))
    assert (done.calls[""].served, done.calls[""].passed) == (1, 1), str(done)


class Gate(nn.Module):
    """It names softmax, and its attention calls torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attend(flash=True)

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1) * self.attn(x[:, None], x, x)[:, 0]


class Routed(Formed):
    """Its own attention, beside a part whose softmax is of no attention."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v, s, m: s.softmax(-1) @ v)
        self.router = SelfMade("gate")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.router(x)


def test_parts_are_captured_before_the_whole(swap, served):
    idle, before = Timm(fused=False), STATS["unique_graphs"]
    idle.spare = Timm()  # a part that does not run
    model = nn.Sequential(Gate(), Routed(), Timm(), idle)
    done = swap(model, eager=True)
    for _ in range(3):
        model(tokens())
    assert {name: (x.served, x.passed) for name, x in done.calls.items()} == {
        **{"0": (0, 3), "0.attn": (3, 0), "1": (2, 1), "1.router": (0, 2), "2": (3, 0)},
        **{"3": (2, 1), "3.spare": (0, 0)},
    }
    assert "only its parts do" in str(done) and len(served) == 10
    # Two of torch's function, the whole with its part, and the one whose part does not run.
    assert STATS["unique_graphs"] - before == 4


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no")  # of torch 2.12
@pytest.mark.parametrize("how", ["config", "environment", "stance", "jit", "fx"])
def test_calls_that_torch_compile_leaves_are_not_served(swap, how, monkeypatch):
    model, x = BLOCKS["mingpt"](), tokens()
    plain, context, call = model(x), nullcontext(), model
    done = swap(model, eager=True)
    if how == "config":
        context = torch._dynamo.config.patch(disable=True)
    elif how == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    elif how == "stance":
        context = torch.compiler.set_stance("force_eager")
    elif how == "jit":
        warnings.simplefilter("ignore")
        call = lambda x: torch.jit.trace(model, x, check_trace=False)(x)  # noqa: E731
    else:
        call = lambda x: torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x)  # noqa: E731
    with context:
        assert torch.equal(call(x), plain)
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


def test_the_last_copy_that_is_gone_leaves_torchs_function(swap, served):
    own, model = F.scaled_dot_product_attention, Timm()
    swap(model)
    twins = [copy.deepcopy(model), pickle.dumps(model)]
    del model
    twins[0](tokens())
    twins.pop(0)
    assert F.scaled_dot_product_attention is own
    pickle.loads(twins[0])(tokens())
    assert len(served) == 2 and F.scaled_dot_product_attention is own


def test_checkpoints_recompute_what_was_served(swap):
    model = nn.Sequential(Timm(), Diffusers())
    plain, x = copy.deepcopy(model), tokens()
    done = swap(model)

    def recomputing(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    (actual,) = with_gradients(recomputing, [x], torch.float32)[1:]
    assert total(done) == 4
    done.undo()
    assert_by_oracle(
        [actual], lambda dtype: with_gradients(copy.deepcopy(plain).to(dtype), [x], dtype)[1:]
    )


def test_report_of_classes_whose_names_say_nothing(swap):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Mixer(), Attend(flash=True), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda x: x.softmax(1), x, use_reentrant=False)

    done = swap(Model())
    assert "test_swap" not in str(done.replaced)
    assert list(done.unseen) == ["b"] and list(done.left) == ["", "a"]
    assert "b (attention_blocks.Attend): calls to F.scaled_dot_product_attention use" in str(done)
    assert "a (attention_blocks.Mixer): unchanged: its code names softmax" in str(done)
    assert "eager=True" in str(done)
    nothing = swap(nn.Linear(2, 2))
    assert str(nothing) == "no attention was found in the code of the model's modules"


class Hidden(nn.Module):
    """Its code does not name torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, "scaled_dot_product" + "_attention")(x, x, x)


@pytest.mark.parametrize("eager", [False, True])
def test_reports_follow_what_was_served(swap, eager):
    model = nn.Sequential(Timm(), Hidden())
    done = swap(model, eager=eager)
    model[0].double()(tokens().double())
    assert done.replaced == {} and "no call used fastattn: float64" in done.left["0"]
    model[1](tokens())
    assert list(done.replaced) == ["1"] and total(done) == 1


def test_scripts_of_swapped_models_are_refused_by_name(swap):
    script, graph = torch.jit.script(nn.Identity()), torch.fx.symbolic_trace(Hidden())
    model = nn.Sequential(Timm(), script, graph)
    done = swap(model)
    assert done.left.pop("1") == "torch.jit has compiled it" and "torch.fx" in done.left["2"]
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
    model = nn.Sequential(Own(), Own(), Timm(), nn.MultiheadAttention(C, 4), Own())
    model[4].forward = torch.neg
    x = tokens()
    seen: list[int] = []
    hook = model[0].register_forward_hook(lambda *_: seen.append(1))
    done = swap(model, adapters={Own: doubling, nn.MultiheadAttention: lambda module, q, k, v: v})
    assert model[3](x, x, x) is x and "was set on the object" in done.left["4"]
    assert torch.equal(model[0](x), 2 * x) and seen == [1]
    assert [*inspect.signature(model[0].forward).parameters] == ["x", "flag"]
    hook.remove()
    model[0].factor = 3.0
    for twin in (model[0], copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert torch.equal(twin(x), 3 * x) and type(twin).__name__ == "Own"
    assert torch.equal(torch.compile(model[0], backend="eager", fullgraph=True)(x), 3 * x)
    model[1](x, flag=True)
    assert done.calls["1"].reason == "the adapter returned NotImplemented"
    assert "its adapter computes its calls" in done.replaced["0"]
    assert done.left["1"].endswith("no call used fastattn: the adapter returned NotImplemented")
    done.undo()
    assert type(model[0]) is Own and "fastattn_calls" not in vars(model[0])


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


def test_without_transformers_its_models_are_left(swap, monkeypatch):
    import transformers
    from transformers_models import GQA, build

    model = build(transformers.AutoModel, transformers.LlamaConfig(**GQA), "cpu")
    monkeypatch.setitem(sys.modules, "fastattn.compat.transformers.hf_attention", None)
    done = swap(model)
    assert done.replaced == {}
    assert "cannot be registered with transformers" in done.left[""]
