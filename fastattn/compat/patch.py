"""`patch_sdpa`: replace torch.nn.functional.scaled_dot_product_attention, and undo it."""

import threading
from typing import Any

import torch
from torch import Tensor

from . import torch_sdpa
from .calls import Calls, running
from .sdpa import (
    Arguments,
    by_torch,
    scaled_dot_product_attention,
    served_attention,
    torch_attention,
)

_lock = threading.RLock()
# Active patches, each with its number of open `with` blocks.
_open: dict["SdpaPatch", int] = {}
# Active swaps, which have calls served while a module of their model runs.
_swaps: set[object] = set()
# Compiled code guards on this, so that graphs traced with and without the patch are not mixed up.
_active = _swapped = False


def _patched_attention(*arguments: Any, **options: Any) -> Tensor:
    if running.capturing and torch.compiler.is_compiling():
        Calls.trace_innermost()
        return torch_attention(*arguments, **options)  # served where the graph has it
    calls = running.innermost() if _swapped else None
    if calls is None and _active:
        return scaled_dot_product_attention(*arguments, **options)
    call = Arguments.of_call(*arguments, **options)
    if calls is not None:
        served = served_attention(call)
        if not isinstance(served, str):
            calls.count_served()
            return served
        calls.count_passed(served)
    # Inactive if a caller kept this function after the patch was undone.
    return by_torch(call)


class SdpaPatch:
    """An active patch, from `patch_sdpa`; ends with its `with` block or `undo`."""

    def __enter__(self) -> "SdpaPatch":
        with _lock:
            _open[self] = _open.get(self, 0) + 1
            _apply()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            depth = _open.get(self, 0)
            if depth > 1:
                _open[self] = depth - 1
            else:
                self.undo()

    def undo(self) -> None:
        """End this patch. The last patch to end restores torch's function."""
        with _lock:
            _open.pop(self, None)
            _apply()


def patch_sdpa() -> SdpaPatch:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by `fastattn.compat.sdpa`'s.

    Until `unpatch_sdpa`, or as a context manager until its block ends:

        fastattn.patch_sdpa()           with fastattn.patch_sdpa():
        model(x)                            model(x)
        fastattn.unpatch_sdpa()

    It applies to all threads, as activation checkpointing recomputes layers in autograd's threads.
    Patches may nest and overlap, also between threads; the last one to end restores torch's
    function. Modules that hold torch's function as a global, by whatever name, hold ours meanwhile;
    attributes, closures and default arguments keep torch's. torch.jit.script compiles torch's own
    operator in either case. Compiled code is retraced when the patch starts or ends, which code
    under torch.compile cannot do.

    Returns:
        The patch, a context manager with a method `undo`.
    """
    patch = SdpaPatch()
    with _lock:
        _open[patch] = 0
        _apply()
    return patch


def unpatch_sdpa() -> None:
    """End all patches, including those of open `with` blocks."""
    with _lock:
        _open.clear()
        _apply()


def count_registered() -> None:
    """Count a call of the function registered with transformers, for the module that runs."""
    if _swapped and (calls := running.innermost()) is not None:
        calls.count_served()


def serve_running(swap: object) -> None:
    """Serve calls of torch's function while modules registered with `calls.running` run."""
    with _lock:
        _swaps.add(swap)
        _apply()


def stop_serving(swap: object) -> None:
    """End what `serve_running` began for a swap."""
    with _lock:
        _swaps.discard(swap)
        _apply()


def _apply() -> None:
    """Patch or restore torch's module, by _open and _swaps."""
    global _active, _swapped
    _active, _swapped = bool(_open), bool(_swaps)
    if _active or _swapped:
        torch_sdpa.put(_patched_attention)
    else:
        torch_sdpa.take_away()
