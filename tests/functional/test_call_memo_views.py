"""Known calls over caches: whatever part of a view or call differs alone, the outcome is its."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from outcomes import differing, forget, others, outcome

from fastattn import attention_paged, decode_attention
from fastattn.cache_view import CacheView
from fastattn.testing.decoding import KINDS, fill
from fastattn.testing.inputs import draw, to_device

pytestmark = pytest.mark.usefixtures("nothing_known")

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
