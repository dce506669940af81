"""Outcomes of calls whose kernels do not run: results, launches and what these are given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastattn.cache_view import as_bytes
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches
from fastattn.testing.inputs import nan_filled_empty

OTHER_DTYPE = {
    torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.int32: torch.int64,
    torch.int64: torch.int32, torch.int8: torch.uint8, torch.float8_e4m3fn: torch.uint8,
    torch.bool: torch.uint8,
}  # fmt: skip


def others(x: Any) -> Iterator[Any]:
    """Values that differ from x in one way: of tensors in the layout or in the numbers."""
    if isinstance(x, Tensor):
        yield from _other_tensors(x)
    elif isinstance(x, bool):
        yield from (not x, int(x))
    elif isinstance(x, torch.dtype):
        yield OTHER_DTYPE[x]
    elif isinstance(x, int):
        yield from (x + 1, x - 1, float(x), bool(x))
    elif isinstance(x, float):
        yield from (x / 2, [x])
    elif isinstance(x, tuple) and x:
        for n, part in enumerate(x):
            yield from ((*x[:n], y, *x[n + 1 :]) for y in others(part))
        yield from (list(x), x[:-1])


def _other_tensors(x: Tensor) -> Iterator[Tensor]:
    raw = as_bytes(x)
    for dim in range(x.dim()):
        yield raw.flip(dim).view(x.dtype)
    yield torch.stack((raw, raw), 1)[:, 0].view(x.dtype)
    yield torch.cat((raw, raw[-1:])).view(x.dtype)
    memory = raw.new_zeros(raw.numel() + 1)
    yield memory[1:].view(raw.shape).copy_(raw).view(x.dtype)
    yield x.to(OTHER_DTYPE[x.dtype])
    if x.is_floating_point():
        yield x.clone().requires_grad_()


def outcome(call: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Results and launches as layouts and numbers; or the error."""
    launched: list[Any] = []
    really = launches.Launch.__call__

    def launch(self: launches.Launch, inputs: Sequence[object], *tensors: Tensor | None) -> None:
        if self._tables is not None:  # which the arguments hold
            with mock.patch.object(launches.Launch, "__call__", really):
                inputs = (*inputs, *self._tables(inputs))
        arguments = self._with(inputs) if self._bound else self._arguments
        given = parts((self._kernel.fn, self._grid, self._meta, *tensors, *arguments))
        launched.extend(given)

    with (
        nan_filled_empty(),
        _zero_filled_integers(),
        mock.patch.object(launches.Launch, "__call__", launch),
    ):
        try:
            results = call(**arguments)
        except Exception as error:
            return [type(error), str(error)]
    return [*parts(results), *launched]


def succeeded(outcome: list[Any]) -> bool:
    """Whether it is not that of an error."""
    first = outcome[0]
    return not (isinstance(first, type) and issubclass(first, Exception))


@contextmanager
def _zero_filled_integers() -> Iterator[None]:
    """Uninitialised integers, as of counters and lists that no kernel writes, are the same."""

    def zeroed(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        return x if x.is_floating_point() or x.is_meta else x.zero_()

    with (
        mock.patch.object(torch, "empty", partial(zeroed, torch.empty)),
        mock.patch.object(Tensor, "new_empty", partialmethod(partial(zeroed, Tensor.new_empty))),
    ):
        yield


def parts(x: Any) -> Iterator[Any]:
    """x without its lists and tuples, as what can be compared."""
    if isinstance(x, Tensor):
        numbers = as_bytes(x.detach()).cpu().clone(memory_format=torch.contiguous_format)
        memory = numbers.resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.is_neg(), memory
    elif isinstance(x, (list, tuple)):
        yield type(x)
        for part in x:
            yield from parts(part)
    else:
        yield x


def differing(given: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the other call that differ, for the message."""
    return {name: x for name, x in other.items() if x is not given.get(name)}


def forget() -> None:
    """Forget all calls and launches."""
    call_memo.forget()
    launches.forget()
