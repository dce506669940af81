"""Known calls over caches: whatever part of a view or call differs alone, the outcome is its."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastattn import attention_paged, decode_attention
from fastattn.cache_view import CacheView, as_bytes
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches
from fastattn.testing.decoding import KINDS, fill
from fastattn.testing.inputs import draw, nan_filled_empty, to_device

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
OTHER_DTYPE = {
    torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.int32: torch.int64,
    torch.int64: torch.int32, torch.int8: torch.uint8, torch.float8_e4m3fn: torch.uint8,
    torch.bool: torch.uint8,
}  # fmt: skip


def others(x: Any) -> Iterator[Any]:
    """Values that differ from x in one way: of tensors the layout, of numbers the value."""
    if isinstance(x, Tensor):
        raw = as_bytes(x)
        yield torch.stack((raw, raw), 1)[:, 0].view(x.dtype)
        yield torch.cat((raw, raw[-1:])).view(x.dtype)
        memory = raw.new_zeros(raw.numel() + 1)
        yield memory[1:].view(raw.shape).copy_(raw).view(x.dtype)
        yield x.to(OTHER_DTYPE[x.dtype])
        if x.is_floating_point():
            yield x.clone().requires_grad_()
    elif isinstance(x, bool):
        yield not x
    elif isinstance(x, torch.dtype):
        yield OTHER_DTYPE[x]
    elif isinstance(x, int):
        yield from (x + 1, x - 1)


def changed_views(view: CacheView) -> Iterator[CacheView]:
    """Views that differ in one field, or in a field and the other of its pair."""
    for name, x in view._asdict().items():
        if name in FIXED:
            continue
        for y in [ADDED[name](view)] if x is None else others(x):
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


def outcome(call: Callable[..., Any], **arguments: Any) -> list[Any]:
    """o and lse and what was launched, tensors as layouts and numbers; or the error."""
    launched: list[Any] = []

    def launch(self: launches.Launch, inputs: Sequence[object], *tensors: Tensor | None) -> None:
        arguments = self._with(inputs) if self._bound else self._arguments
        launched.append((self._kernel.fn, self._grid, self._meta, *tensors, *arguments))

    with nan_filled_empty(), mock.patch.object(launches.Launch, "__call__", launch):
        try:
            results = call(**arguments)
        except Exception as error:
            return [type(error), str(error)]
    return list(parts([results, launched]))


def parts(x: Any) -> Iterator[Any]:
    """x without its lists and tuples, as what can be compared."""
    if isinstance(x, Tensor):
        yield x.shape, x.stride(), x.dtype, x.data_ptr() % 16, as_bytes(x).tolist().__repr__()
    elif isinstance(x, (list, tuple)):
        yield type(x)
        for part in x:
            yield from parts(part)
    else:
        yield x


def forget() -> None:
    call_memo.forget()
    launches.forget()


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
        assert actual == expected, changes(given, other)
        differ += actual != known
        assert outcome(call, **given) == known, changes(given, other)
    assert differ


def changes(given: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs, for the message."""
    one, two = ({**x, **x["cache"]._asdict()} for x in (given, other))
    return [name for name, x in two.items() if name != "cache" and x is not one.get(name)]
