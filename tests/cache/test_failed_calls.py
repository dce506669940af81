"""A call of a cache that raises changes nothing; its integers are ints, by one rule everywhere."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastattn import KVCache, PagedKVCache, QuantizedKVCache

H, D, MAX = 2, 4, 8
# What counts as an integer in arithmetic, or is close to one, and is none.
NO_INTEGERS = (
    1.0, 2.5, True, np.float64(1.0), np.True_, torch.tensor(1.5), torch.tensor(True),
    torch.ones(1, 1).int(), "1", None,
)  # fmt: skip
# Either error.
REFUSED = ((TypeError, ValueError), "must|starts")
INTEGERS = (1, np.int64(1), torch.tensor(1), torch.tensor(1, dtype=torch.int32))


def state(x: Any) -> Any:
    """All that a cache holds, in a form that equals itself: tensors as bytes, NaN and all."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.contiguous().view(torch.uint8).tolist()
    if isinstance(x, dict):
        return {key: state(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [state(value) for value in x]
    return state(vars(x)) if hasattr(x, "__dict__") else copy.deepcopy(x)


def tokens(B: int, T: int = 1, **how: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, T, D, **how), torch.randn(B, H, T, D, **how)


def dense(kind: str = "plain", device: str = "cpu") -> KVCache:
    options: dict[str, Any] = {"ring": {"window": 3, "keep_first": 1}}.get(kind, {})
    make = QuantizedKVCache if kind == "int8" else KVCache
    cache = make(3, H, MAX, D, device=device, **options)
    cache.append(*tokens(3, 4, device=device), torch.tensor([4, 2, 3], device=device))
    if kind == "left padded":
        cache.set_starts(torch.tensor([1, 0, 2]))
    return cache


def paged(kind: str = "plain") -> PagedKVCache:
    quantize: Any = "fp8" if kind == "fp8" else None
    cache = PagedKVCache(
        6, 2, H, D, num_layers=2, max_rows=4, max_pages_per_row=4, quantize=quantize
    )
    rows = [cache.allocate(), cache.allocate()]
    for layer in range(2):
        cache.append(rows, *tokens(2, 3), [3, 2], layer=layer)
    cache.fork(rows[0])
    return cache


def wrong_appends(B: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Keyword arguments of an append that are wrong whatever the cache, and what they raise."""
    k, v = tokens(B)
    short = (torch.ones(1, 2), torch.ones(1, 2))
    yield {"k": k[:1]}, ValueError
    yield {"k": None}, TypeError
    yield {"v": v.double()}, ValueError
    yield {"v": torch.cat((v, v), 2)}, ValueError
    yield {"k": k.clone().requires_grad_()}, RuntimeError
    yield {"v": v.clone().requires_grad_()}, RuntimeError
    yield {"rotary": short}, ValueError
    yield {"rotary": (torch.ones(9, 2).double(),) * 2}, TypeError
    yield {"q": k}, ValueError
    yield {"rotary_style": "neox"}, ValueError
    yield {"backend": "cuda"}, ValueError


def calls_of_dense() -> Iterator[tuple[str, dict[str, Any], Any]]:
    k, v = tokens(3)
    index = torch.tensor([0, 3, 1])
    for wrong, error in wrong_appends(3):
        yield "append", {"k": k, "v": v, **wrong}, error
    yield "append", {"k": k, "v": v, "new_lengths": torch.ones(3)}, TypeError
    yield "append", {"k": k, "v": v, "new_lengths": torch.tensor([1, 2])}, ValueError
    yield "append", {"k": k, "v": v, "batch_index": index}, ValueError
    yield "append", {"k": k, "v": v, "batch_index": -index}, ValueError
    yield "append", {"k": k, "v": v, "batch_index": 0 * index}, ValueError
    yield "append", {"k": k, "v": v, "batch_index": index.tolist()}, TypeError
    yield "append", {"k": k, "v": v, "batch_index": index.float()}, TypeError
    yield "view", {"batch_index": index}, ValueError
    yield "view", {"batch_index": index.float()}, TypeError
    yield "reorder", {"index": index}, ValueError
    yield "reorder", {"index": index.bool()}, TypeError
    yield "reorder", {"index": index[:2]}, ValueError
    yield "set_starts", {"starts": torch.ones(3)}, REFUSED  # a ring takes none
    yield "set_starts", {"starts": torch.ones(2).int()}, ValueError
    yield "truncate", {"lengths": -1}, ValueError
    yield "truncate", {"lengths": torch.ones(3)}, TypeError
    for x in NO_INTEGERS:
        yield "truncate", {"lengths": x}, REFUSED if isinstance(x, Tensor) else TypeError


def calls_of_paged() -> Iterator[tuple[str, dict[str, Any], Any]]:
    k, v = tokens(2)
    given = {"rows": [0, 1], "k": k, "v": v}
    for wrong, error in wrong_appends(2):
        yield "append", {**given, **wrong}, error
    yield "append", {**given, "new_lengths": torch.tensor([1, 1])}, (TypeError, "got a tensor")
    yield "append", {**given, "new_lengths": [1]}, (ValueError, "must hold 2 numbers, got 1")
    yield "append", {**given, "k": tokens(2, 6)[0], "v": tokens(2, 6)[1]}, ValueError
    yield "append", {**given, "k": tokens(2, 3)[0], "v": tokens(2, 3)[1]}, RuntimeError
    yield "append", {**given, "layer": 2}, (ValueError, "layer must be from 0 to 1, got 2")
    yield "append", {**given, "layer": 1, "k": k[..., :1].expand(-1, -1, -1, D)}, ValueError
    for rows in ([0, 0], [0, 3]):
        yield "append", {**given, "rows": rows}, ValueError
        yield "reserve", {"rows": rows, "counts": 1}, ValueError
        yield "extend", {"rows": rows, "counts": 1}, ValueError
        yield "advance", {"rows": rows, "counts": 0}, ValueError
        yield "reorder", {"rows": rows, "index": [0, 1]}, ValueError
    yield "view", {"rows": [3]}, (ValueError, "row must be one in use, got 3")
    yield "reserve", {"rows": [0, 1], "counts": [1, -1]}, (ValueError, "got -1 for row 1")
    yield "reserve", {"rows": [0, 1], "counts": [1]}, (ValueError, "one number or 2, got 1")
    yield "reserve", {"rows": [0, 1], "counts": [2, 5]}, RuntimeError
    yield "extend", {"rows": [0, 1], "counts": [1, -1]}, (ValueError, "got -1 for row 1")
    yield "extend", {"rows": [0, 1], "counts": [2, 5]}, RuntimeError
    yield "advance", {"rows": [0, 1], "counts": [1, 1]}, ValueError
    yield "advance", {"rows": [0, 1], "counts": [0, -1]}, ValueError
    yield "reorder", {"rows": [0, 1], "index": [0, 2]}, (ValueError, "2 numbers from 0 to 1")
    yield "truncate", {"row": 0, "length": -1}, (ValueError, "length must be >= 0, got -1")
    yield "compact", {"row": 3, "first": 0, "kept": []}, ValueError
    for name in ("free", "fork", "length", "pages", "truncate"):
        length = {"length": 1} if name == "truncate" else {}
        yield name, {"row": 3, **length}, ValueError
        for x in NO_INTEGERS:
            yield name, {"row": x, **length}, TypeError
    for x in NO_INTEGERS:
        yield "truncate", {"row": 0, "length": x}, TypeError
        yield "compact", {"row": 0, "first": x, "kept": []}, TypeError
        yield "compact", {"row": 0, "first": 0, "kept": [x]}, TypeError
        yield "append", {**given, "rows": [0, x]}, TypeError
        yield "append", {**given, "new_lengths": [1, x]}, TypeError
        yield "append", {**given, "layer": x}, TypeError
        yield "view", {"rows": [x]}, TypeError
        yield "view", {"rows": [0], "layer": x}, TypeError
        yield "reserve", {"rows": [0, x], "counts": 1}, TypeError
        yield "reserve", {"rows": [0, 1], "counts": [1, x]}, TypeError
        yield "advance", {"rows": [0, x], "counts": 0}, TypeError
        yield "advance", {"rows": [0, 1], "counts": [0, x]}, TypeError
        yield "reorder", {"rows": [0, x], "index": [0, 1]}, TypeError
        yield "reorder", {"rows": [0, 1], "index": [0, x]}, TypeError
    for name in ("reserve", "advance"):
        for x in (2.5, True, None):
            yield name, {"rows": [0, 1], "counts": x}, TypeError
    for name in ("view", "append", "reserve", "advance", "reorder"):
        others = {**given, "counts": 1, "index": [0]}
        taken = inspect.signature(getattr(PagedKVCache, name)).parameters
        yield name, {**{key: x for key, x in others.items() if key in taken}, "rows": 0}, TypeError


CACHES: list[tuple[Callable[[str], Any], str, Callable[[], Iterator]]] = [
    *((dense, kind, calls_of_dense) for kind in ("plain", "left padded", "ring", "int8")),
    *((paged, kind, calls_of_paged) for kind in ("plain", "fp8")),
]


@pytest.mark.parametrize(("make", "kind", "calls"), CACHES, ids=lambda x: getattr(x, "__name__", x))
def test_a_call_that_raises_changes_nothing(make, kind, calls):
    cache = make(kind)
    before = state(cache)
    for name, arguments, wrong in calls():
        error, *match = wrong if isinstance(wrong, tuple) else (wrong,)
        with pytest.raises(error, match=match[0] if match else None):
            getattr(cache, name)(**arguments)
        assert state(cache) == before, (name, arguments)


@pytest.mark.parametrize(("make", "calls"), [(dense, calls_of_dense), (paged, calls_of_paged)])
def test_every_public_method_that_takes_something_is_among_them(make, calls):
    takes = {
        name
        for name, method in inspect.getmembers(type(make()), inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    }
    assert takes == {name for name, _, _ in calls()}


# What turns one token of `dense()`, whose longest row has 4.
ones = torch.ones


def test_layers_after_the_first_write_beside_it_or_not_at_all():
    """They have no tokens of their own to count: elsewhere they would write over others'."""
    cache = PagedKVCache(6, 2, H, D, num_layers=2, max_rows=4)
    row, other = cache.allocate(), cache.allocate()
    cache.append([other], *tokens(1, 2))
    message = r"append to layer 0 first: it got 0 tokens of row 0 last, and another layer gets 3"
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        cache.append([row], *tokens(1, 3), layer=1)
    assert state(cache) == before
    cache.append([row], *tokens(1, 3))
    with pytest.raises(ValueError, match=r"it got 3 tokens of row 0 last, and another .* gets 2"):
        cache.append([row], *tokens(1, 3), [2], layer=1)
    cache.append([row], *tokens(1, 3), layer=1)
    cache.truncate(row, 2)
    with pytest.raises(ValueError, match=r"it got 0 tokens of row 0 last"):
        cache.append([row], *tokens(1, 3), layer=1)


@pytest.mark.parametrize("one", INTEGERS, ids=lambda x: type(x).__name__)
def test_integers_of_every_kind_are_taken(one):
    cache = PagedKVCache(one * 6, one * 2, H, D, num_layers=one * 2, max_rows=one * 3)
    rows = [cache.allocate(), cache.allocate()]
    for layer in (one - one, one):
        cache.append([0, one], *tokens(2, 2), [one, one * 2], layer=layer)
    assert cache.length(one) == 2 and cache.fork(one) == 2
    cache.reserve([0, one], one)
    cache.advance([one], [one])
    cache.truncate(one, one)
    cache.reorder([0, one], [one, one])
    cache.free(one)
    assert cache.rows == [0, 2] and rows == [0, 1]
    assert [type(cache.length(row)) for row in cache.rows] == [int, int]
    contiguous = KVCache(one * 2, H, one * 4, D, window=one * 2, keep_first=one)
    contiguous.append(*tokens(2, 2))
    contiguous.truncate(one)
    assert contiguous.uniform_length == contiguous.length_bound == 1
    assert type(contiguous.length_bound) is type(contiguous.max_length) is int


@pytest.mark.parametrize("name", ["max_length", "head_dim", "window", "keep_first"])
def test_sizes_are_ints(name):
    sizes: dict[str, Any] = {"max_length": 8, "head_dim": 4, "window": 3, "keep_first": 1}
    for x in (2.0, True, "2"):
        with pytest.raises(TypeError, match=rf"{name} must be an int, got"):
            KVCache(1, 1, **{**sizes, name: x})
    with pytest.raises(TypeError, match=r"page_size must be an int, got"):
        PagedKVCache(4, 2.0, 1, 4)


def test_lengths_are_not_read_while_a_graph_is_captured(monkeypatch, device):
    """A full row takes no more, the others what there is room for."""
    cache = dense(device=device)
    cache.append(*tokens(3, 4, device=device))
    assert cache.length_bound == 8 and cache.lengths.tolist() == [8, 6, 7]
    monkeypatch.setattr("fastattn.tracing.may_keep", lambda device: False)
    k, v = tokens(3, 2, device=device)
    before = cache.k.clone()

    def refused(*_: object) -> None:
        raise AssertionError("a length was read")

    with monkeypatch.context() as patch:
        for name in ("__int__", "item", "tolist", "__bool__"):
            patch.setattr(Tensor, name, refused)
        cache.append(k, v, backend="triton")
    assert (cache.lengths.tolist(), cache.length_bound) == ([10, 8, 9], MAX)
    before[1, :, 6:], before[2, :, 7] = k[1], k[2, :, 0]
    assert torch.equal(cache.k, before)
