"""`patch_sdpa`: replace torch.nn.functional.scaled_dot_product_attention, and undo it."""

import threading
from types import TracebackType

from torch import Tensor

from . import torch_sdpa
from .calls import running
from .sdpa import Arguments, by_torch, scaled_dot_product_attention, served_attention

_lock = threading.RLock()
# Patches in force, each with how many `with` blocks are inside it.
_open: dict["SdpaPatch", int] = {}
# Swaps in force, each of which has calls served while a module of its model runs.
_swaps: set[object] = set()
# What compiled code guards on: a graph that was traced with or without the patch is not mistaken.
_active = _swapped = False


def _patched_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    calls = running.innermost() if _swapped else None
    if calls is None and _active:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        return scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
    call = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if calls is not None:
        served = served_attention(call)
        if not isinstance(served, str):
            calls.count_served()
            return served
        calls.count_passed(served)
    # Not active where someone took hold of this function and kept it after the patch was undone.
    return by_torch(call)


class SdpaPatch:
    """A patch in force, as `patch_sdpa` returns it; ends with its `with` block or `undo`."""

    def __enter__(self) -> "SdpaPatch":
        with _lock:
            _open[self] = _open.get(self, 0) + 1
            _apply()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            depth = _open.get(self, 0)
            if depth > 1:
                _open[self] = depth - 1
            else:
                self.undo()

    def undo(self) -> None:
        """End this patch. torch's function is back once no other patch is in force."""
        with _lock:
            _open.pop(self, None)
            _apply()


def patch_sdpa() -> SdpaPatch:
    """Make `torch.nn.functional.scaled_dot_product_attention` the one of `fastattn.compat.sdpa`.

    From the call on, until `unpatch_sdpa`, or as a context manager until its block ends:

        fastattn.patch_sdpa()           with fastattn.patch_sdpa():
        model(x)                            model(x)
        fastattn.unpatch_sdpa()

    It holds for all threads: activation checkpointing recomputes a layer in a thread of autograd's
    own, where it has to find the same function. Patches may nest and overlap, also between threads;
    the function is torch's again when the last one ends. Code that took torch's function by name
    before (`from torch.nn.functional import scaled_dot_product_attention`) keeps torch's.
    torch.jit.script finds torch's own operator in either function: it cannot compile ours.
    Compiled code is traced again when the patch comes or goes; inside a region that torch.compile
    traces, neither can be done.

    Returns:
        The patch, a context manager with a method `undo`.
    """
    patch = SdpaPatch()
    with _lock:
        _open[patch] = 0
        _apply()
    return patch


def unpatch_sdpa() -> None:
    """End every patch that `patch_sdpa` put in force, those of open `with` blocks included."""
    with _lock:
        _open.clear()
        _apply()


def serve_running(swap: object) -> None:
    """Serve calls of torch's function while modules run that tell `calls.running` so."""
    with _lock:
        _swaps.add(swap)
        _apply()


def stop_serving(swap: object) -> None:
    """End what `serve_running` began for a swap."""
    with _lock:
        _swaps.discard(swap)
        _apply()


def _apply() -> None:
    """Make torch's module say what _open and _swaps say."""
    global _active, _swapped
    _active, _swapped = bool(_open), bool(_swaps)
    if _active or _swapped:
        torch_sdpa.put(_patched_attention)
    else:
        torch_sdpa.take_away()
