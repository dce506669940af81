"""Known calls over caches: whatever part of a view or call differs alone, the outcome is its."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from outcomes import differing, forget, others, outcome, parts, succeeded

from fastattn import KVCache, attention_paged, decode_attention
from fastattn.cache_view import CacheView
from fastattn.testing.decoding import KINDS, fill
from fastattn.testing.inputs import draw, to_device

pytestmark = [
    pytest.mark.usefixtures("nothing_known"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage"),
]

B, H_Q, H_K, T, D = 2, 2, 1, 9, 16
# What a view may have besides, given to one that has none.
ADDED: dict[str, Callable[[CacheView], Any]] = {
    "starts": lambda view: torch.tensor([3, 1], dtype=torch.int32),
    "batch_index": lambda view: torch.tensor([1, 0], dtype=torch.int32),
    "block_table": lambda view: torch.tensor([[1], [0]], dtype=torch.int32),
    "rope": lambda view: draw(*view.k.shape[:3], 4).to(view.dtype),
    "keep_first": lambda view: 0,
    "window": lambda view: 4,
    "k_scale": lambda view: draw(*view.k.shape[:3]).abs(),
    "v_scale": lambda view: draw(*view.k.shape[:3]).abs(),
}
# Arguments beside the options, given to a call without them.
GIVEN: dict[Any, dict[str, Callable[[], Any]]] = {
    decode_attention: {
        "new_lengths": lambda: torch.tensor([1, 0]),
        "num_splits": lambda: 2,
        "return_lse": lambda: True,
    },
    attention_paged: {
        "max_seqlen_q": lambda: 1,
        "tree_mask": lambda: torch.zeros(B, 1, dtype=torch.bool),
        "out": lambda: torch.zeros(B, H_Q, D),
        "return_lse": lambda: True,
    },
}
# `page_size` is the shape of k; no reader asks for `counters`.
FIXED = {"page_size", "counters"}


def of_its_type(x: Any) -> Iterator[Any]:
    return (y for y in others(x) if type(y) is type(x))


def changed_views(view: CacheView) -> Iterator[CacheView]:
    """Views that differ in one field, or in a field and the other of its pair."""
    for name, x in view._asdict().items():
        if name in FIXED:
            continue
        # Caches make views, and their fields have the right types.
        for y in [ADDED[name](view)] if x is None else of_its_type(x):
            yield view._replace(**{name: y})
        if x is not None and name in ADDED:
            yield view._replace(**{name: None})
    # Its values are its keys, in one memory.
    yield view._replace(v=view.k, v_scale=view.k_scale)
    if view.window is None and view.block_table is None and view.starts is None:
        yield view._replace(window=4, keep_first=0)


def changed_calls(call: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments that differ in one, or in a part of the view."""
    for view in changed_views(arguments["cache"]):
        yield {**arguments, "cache": view}
    for name, make in GIVEN[call].items():
        x = make()
        for y in (x, *others(x)):
            yield {**arguments, name: y}
    for name, x in arguments.items():
        for y in others(x):
            yield {**arguments, name: y}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *((decode_attention, kind) for kind in KINDS),
        *((attention_paged, kind) for kind in KINDS if "ring" not in kind),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_no_part_of_a_view_is_forgotten(
    call: Any, kind: str, backend: str, device: str, one_thread: None
) -> None:
    """The same results by torch, and by triton the same launches, as if nothing were known."""
    k, v = draw(B, H_K, T, D), draw(B, H_K, T, D)
    filled = fill(kind, k, v, torch.tensor([T, T - 2], dtype=torch.int32))
    view = CacheView(**to_device(filled.view._asdict(), device))
    given: dict[str, Any] = {"q": draw(B, H_Q, 1, D).to(device), "cache": view}
    if call is attention_paged:
        given["q"] = given["q"][:, :, 0]
        given["cu_seqlens_q"] = torch.arange(B + 1, device=device)
    else:
        given["attn_bias"] = draw(1, T).to(device)  # as far as the bound on the lengths
    given["backend"] = backend
    known = outcome(call, **given)
    differ = 0
    for other in changed_calls(call, given):
        actual = outcome(call, **other)
        forget()
        expected = outcome(call, **other)
        assert actual == expected, differing(all_parts(given), all_parts(other))
        differ += actual != known
        assert outcome(call, **given) == known, differing(all_parts(given), all_parts(other))
    assert differ


def all_parts(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments, with the fields of the view in place of it."""
    return {**given, **given["cache"]._asdict(), "cache": None}


def filled(lengths: list[int], *, D: int = D, H: int = H_K, **options: Any) -> KVCache:
    """A cache of rows of these lengths, whose other slots are NaN."""
    cache = KVCache(len(lengths), H, 90, D, **options)
    for x in cache.stored_tensors:
        x.fill_(torch.nan if x.is_floating_point() else 0)
    longest = max(lengths)
    k = draw(len(lengths), H, longest, D).to(cache.dtype)
    v = draw(len(lengths), H, longest, cache.v.shape[3], seed=1).to(cache.dtype)
    alike = min(lengths) == longest
    cache.append(k, v, None if alike else torch.tensor(lengths), backend="torch")
    return cache


def padded(lengths: list[int], starts: list[int]) -> KVCache:
    cache = filled(lengths)
    cache.set_starts(torch.tensor(starts))
    return cache


CACHES: dict[str, Callable[[], Any]] = {
    "alike": lambda: filled([70, 70]),
    "longer": lambda: filled([71, 71]),
    "short": lambda: filled([3, 3]),
    "empty": lambda: filled([0, 0]),
    "ragged": lambda: filled([70, 66]),
    "a row is empty": lambda: filled([7, 0]),
    "padded on the left": lambda: padded([70, 70], [0, 5]),
    "padding alone": lambda: padded([7, 7], [9, 0]),
    "another head dim": lambda: filled([70, 70], D=8),
    "another value dim": lambda: filled([70, 70], value_dim=8),
    "more heads": lambda: filled([70, 70], H=2),
    "heads that do not divide": lambda: filled([70, 70], H=3),
    "other rows": lambda: filled([70] * 3),
    "another dtype": lambda: filled([70, 70], dtype=torch.bfloat16),
    "codes": lambda: filled([70, 70], quantize="int8"),
    "a ring": lambda: filled([70, 70], window=20),
    "a view": lambda: filled([70, 70]).view(),
    "no cache": lambda: 3,
}
STEPS: list[dict[str, Any]] = [
    {},
    {"window": 4},
    {"window": (4, None)},
    {"window": (True, None)},
    {"window": (3, -2)},
    {"window": -1},
    {"causal": False},
    {"causal": 0},
    {"scale": 0.5},
    {"scale": 1},
    {"scale": True},
    {"softcap": 2.0},
    {"batch_invariant": True},
    {"stride": 2},
    {"return_lse": True},
    {"num_splits": 2},
    {"new_lengths": torch.tensor([1, 0])},
    {"new_lengths": torch.tensor([1, 0, 1])},
    {"backend": "none"},
    {"dropout": 0.5},
]
STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


def queries() -> list[Any]:
    q = draw(B, H_Q, 1, D)
    leaf = q.clone().requires_grad_()
    nested = torch.nested.nested_tensor([q[0], q[1]])
    return [q, *others(q), leaf, draw(B, H_Q, 2, D), nested, q.to_sparse(), q.to("meta"), None]


@pytest.mark.parametrize("kind", ["alike", "ragged", "padded on the left"])
def test_no_part_of_a_step_is_forgotten(kind: str, one_thread: None) -> None:
    """A known step of a cache on a CPU has the outcome of one that is not."""
    q, cache = draw(B, H_Q, 1, D), CACHES[kind]()
    steps = [{"q": q, "cache": make(), **given} for make in CACHES.values() for given in STEPS]
    steps += [{"q": x, "cache": cache, **given} for x in queries() for given in ({}, *STEPS[:2])]
    steps = [{"backend": "torch", **step} for step in steps]
    known = [{"q": q, "cache": cache, "backend": "torch", **given} for given in STEPS]
    for state, make in STATES.items():
        expected = []
        with make():
            for step in steps:
                forget()
                expected.append(outcome(decode_attention, **step))
            forget()
            for step in known:
                outcome(decode_attention, **step)
            actual = [outcome(decode_attention, **step) for step in steps]
        for step, ours, other in zip(steps, actual, expected, strict=True):
            assert ours == other, (state, step)
        assert any(map(succeeded, actual))


def test_a_tangent_is_refused_by_known_steps() -> None:
    q, cache = draw(B, H_Q, 1, D), CACHES["alike"]()
    k = draw(B, H_K, 1, D)
    for _ in range(2):
        decode_attention(q, cache, backend="torch")
        cache.append(k, k, backend="torch")
    before = [x.clone() for x in (cache.k, cache.v, cache.lengths)]
    with torch.autograd.forward_ad.dual_level():
        q, moved = (torch.autograd.forward_ad.make_dual(x, x) for x in (q, k))
        with pytest.raises(NotImplementedError, match="q has a tangent"):
            decode_attention(q, cache, backend="torch")
        for pair in ((moved, k), (k, moved)):
            with pytest.raises(NotImplementedError, match="has a tangent"):
                cache.append(*pair, backend="torch")
    torch.testing.assert_close(
        [cache.k, cache.v, cache.lengths], before, equal_nan=True, rtol=0, atol=0
    )


def appends() -> Iterator[dict[str, Any]]:
    """Arguments of an append of two rows, each other than the first in one way."""
    k, v = draw(B, H_K, 1, D), draw(B, H_K, 1, D)
    yield {"k": k, "v": v}
    strange = [None, torch.nested.nested_tensor([k[0], k[1]]), k.to_sparse(), k.to("meta"), k[0, 0]]
    strange += [k[:1], k[:, :0], k[:, :, :0], torch.cat((k, k), 2), torch.nn.Parameter(k)]
    for x in (*others(k), *strange):
        yield {"k": x, "v": v}
        yield {"k": k, "v": x}
        yield {"k": x, "v": x}
    yield {"k": k, "v": v, "new_lengths": torch.tensor([1, 0])}
    yield {"k": k[:1], "v": v[:1], "batch_index": torch.tensor([1])}
    tables = torch.ones(90, 4), torch.zeros(90, 4)
    yield {"k": k, "v": v, "q": draw(B, H_Q, 1, D), "rotary": tables}
    yield {"k": k, "v": v, "rotary": tables}
    yield {"k": k, "v": v, "backend": "none"}
    yield {"k": k, "v": v, "rotary_style": "none"}


def after(cache: Any, given: dict[str, Any]) -> list[Any]:
    """Outcome of an append, and what the cache then holds and reads."""
    step = outcome(cache.append, **given)
    q = draw(B, H_Q, 1, D).to(cache.dtype)
    read = outcome(decode_attention, q=q, cache=cache, backend="torch")
    known = cache.length_bound, cache.uniform_length
    return [*step, *read, *parts((*cache.stored_tensors, cache.lengths)), *known]


@pytest.mark.parametrize("kind", ["alike", "ragged", "padded on the left", "codes"])
def test_no_part_of_an_append_is_forgotten(kind: str, one_thread: None) -> None:
    """An append after one of the same tensors, or of others, does what it does to a new cache."""
    k, v = draw(B, H_K, 1, D), draw(B, H_K, 1, D)
    earlier: list[dict[str, Any]] = [{"k": k, "v": v}, {"k": k[:1], "v": v[:1]}]
    earlier[1]["batch_index"] = torch.tensor([1])
    for before, (state, make) in itertools.product(earlier, STATES.items()):
        served = 0
        for given in appends():
            cache, twin = CACHES[kind](), CACHES[kind]()
            cache.append(**before)
            twin.append(**before)
            twin._copied = lambda *_: False
            with make():
                actual, expected = after(cache, given), after(twin, given)
            assert actual == expected, (state, before, given)
            served += succeeded(actual)
        assert served


def test_an_append_fits_up_to_the_last_slot() -> None:
    cache = filled([88, 88])
    x = draw(B, H_K, 1, D)
    for _ in range(2):
        cache.append(x, x, backend="torch")
    with pytest.raises(ValueError, match="needs 91 slots"):
        cache.append(x, x, backend="torch")
    assert cache.lengths.tolist() == [90, 90]
