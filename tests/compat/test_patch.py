"""`fastattn.patch_sdpa`: torch's function is replaced while a patch is in force, and back after."""

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

import fastattn
from fastattn.compat import patch

torch_attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    fastattn.unpatch_sdpa()
    assert F.scaled_dot_product_attention is torch_attention


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the kernels: what is served by a patch is seen in the result."""

    own = torch_attention  # no global, which a patch would replace

    def doubled(*args: Tensor, **kwargs: object) -> Tensor:
        return 2 * own(*args, **kwargs)

    monkeypatch.setattr(patch, "scaled_dot_product_attention", doubled)


def factor() -> float:
    """1 for torch's function and 2 for `doubled`, whatever is in torch's module."""
    x = torch.ones(1, 1, 1, 1)
    return float(F.scaled_dot_product_attention(x, x, x))


def test_patches_nest_and_end_once_each(doubling):
    fastattn.patch_sdpa()
    fastattn.patch_sdpa()
    assert factor() == 2
    fastattn.unpatch_sdpa()
    assert factor() == 1
    fastattn.unpatch_sdpa()
    first, second = fastattn.patch_sdpa(), fastattn.patch_sdpa()
    first.undo()
    first.undo()
    assert factor() == 2
    second.undo()
    assert factor() == 1
    with pytest.raises(KeyError), fastattn.patch_sdpa():
        with fastattn.patch_sdpa() as inner, inner:
            assert factor() == 2
        assert factor() == 2
        raise KeyError
    assert factor() == 1
    with inner:
        with inner:
            assert factor() == 2
        assert factor() == 2
    with fastattn.patch_sdpa():
        fastattn.unpatch_sdpa()
        assert factor() == 1
    assert factor() == 1


def test_modules_that_import_torchs_function_by_name(doubling, monkeypatch):
    module = ModuleType("imports_by_name")
    exec("from torch.nn.functional import scaled_dot_product_attention as sdpa", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x = torch.ones(1, 1, 1, 1)
    with fastattn.patch_sdpa():
        assert module.sdpa(x, x, x) == 2
        with fastattn.patch_sdpa():
            assert module.sdpa(x, x, x) == 2
    assert module.sdpa is torch_attention


def test_overlapping_threads_hold_one_patch(doubling):
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with fastattn.patch_sdpa():
            inside.set()
            leave.wait()
            seen.append(factor())

    with fastattn.patch_sdpa():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
    # This thread's patch has ended; the other's is in force, for all threads.
    assert factor() == 2
    leave.set()
    thread.join()
    assert seen == [2]
    assert factor() == 1


def test_a_patch_over_ours_stays_and_gets_torchs(doubling, monkeypatch):
    fastattn.patch_sdpa()
    ours = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x: 3 * ours(*x))
    assert factor() == 6
    fastattn.unpatch_sdpa()
    assert factor() == 3
    with fastattn.patch_sdpa():
        assert factor() == 2
    assert factor() == 3
    monkeypatch.undo()


def test_compiled_code_follows_the_patch(doubling):
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.ones(1, 1, 1, 1)
    for _ in range(2):
        assert attend(x) == 1
        with fastattn.patch_sdpa():
            assert attend(x) == 2
    # Both graphs are kept: going back and forth compiles nothing more.
    assert counter.frame_count == 2


def attends(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_scripts_have_torchs_function(monkeypatch):
    monkeypatch.setattr(torch.jit._builtins, "_builtin_table", None)  # as before the first script
    with fastattn.patch_sdpa():
        script = torch.jit.script(attends)
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(script(x), torch_attention(x, x, x))


def test_the_library_itself_keeps_torchs_function(doubling):
    q = k = v = torch.randn(1, 1, 3, 4)
    plain = fastattn.attention(q, k, v, backend="torch")
    with fastattn.patch_sdpa():
        assert torch.equal(fastattn.attention(q, k, v, backend="torch"), plain)


@pytest.mark.parametrize("variant", CausalVariant)
def test_causal_biases_where_torch_serves(on_torch, variant):
    for sizes in ((3, 5), (5, 5), (4, 6)):
        q, k = torch.randn(1, 2, sizes[0], 8), torch.randn(1, 2, sizes[1], 8)
        # torch takes no notice of the lengths of an upper-left bias.
        bias = CausalBias(variant, *((7, 7) if variant == CausalVariant.UPPER_LEFT else sizes))
        expected = F.scaled_dot_product_attention(q, k, k, bias, scale=0.3)
        with fastattn.patch_sdpa():
            actual = F.scaled_dot_product_attention(q, k, k, bias, scale=0.3)
            assert torch.equal(actual, expected)
            with pytest.raises(ValueError, match="should not be used with causal=True"):
                F.scaled_dot_product_attention(q, k, k, bias, is_causal=True)


def overriding(name: str, func: object) -> bool:
    """Whether func is torch's function, by the name that it has now or had at import."""
    return func is (F.scaled_dot_product_attention if name == "now" else torch_attention)


def override(kind: str, name: str, x: Tensor) -> tuple[Any, Tensor]:
    """Make F.scaled_dot_product_attention return 7 times its query: a context, and the query."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return 7 * args[0] if overriding(name, func) else func(*args, **(kwargs or {}))

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if overriding(name, func):
                return 7 * args[0].as_subclass(Tensor)
            return super().__torch_function__(func, types, args, kwargs or {})

    return (Mode(), x) if kind == "mode" else (nullcontext(), x.as_subclass(Subclass))


@pytest.mark.parametrize("name", ["now", "at import"])
@pytest.mark.parametrize("kind", ["mode", "subclass"])
@pytest.mark.parametrize("active", [True, False])
def test_overrides_know_torchs_function(served, kind, name, active):
    x = torch.ones(1, 1, 2, 4)
    context, query = override(kind, name, x)
    fastattn.patch_sdpa()
    ours = F.scaled_dot_product_attention
    if not active:
        fastattn.unpatch_sdpa()
    with context:
        assert torch.equal(ours(query, x, x), 7 * x)
    assert (F.scaled_dot_product_attention is ours) == active
    # A mode that was there when the region was compiled, and one that comes later.
    if kind == "mode" and active:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager")
        for scope, factor in ((context, 7), (nullcontext(), 1), (context, 7)):
            with scope:
                assert torch.equal(compiled(x), factor * x)
    assert len(served) == (kind == "mode" and active)


def test_a_patch_that_begins_and_ends_within_an_override(on_torch):
    class Ending(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch_attention:
                fastattn.patch_sdpa()
                assert F.scaled_dot_product_attention is torch_attention
                fastattn.unpatch_sdpa()
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 1, 1, 1)
    fastattn.patch_sdpa()
    with pytest.raises(KeyError), Ending():
        F.scaled_dot_product_attention(x, x, x)
        raise KeyError
    assert F.scaled_dot_product_attention is torch_attention
