"""Counters of finished programs, for kernels whose last program does further work.

A launch finds its counters at 0 and leaves them at 0. Launches of one stream run in order and share
counters. Launches in CUDA graphs, which may run concurrently, each take their own from a reserve
that an earlier call allocated, as memory allocated in a graph ends with it. A kernel that aborts
leaves other numbers, but also ends the process's CUDA context.
"""

from threading import Lock

import torch
import triton
from torch import Tensor

# Counters that a stream begins with, and all those of a device for launches in graphs: 1 MiB.
_FEWEST, _RESERVED = 1 << 12, 1 << 18
# A launch has whole cache lines of 128 bytes.
_LINE = 32
# By device and stream.
_of_streams: dict[tuple[torch.device, int], Tensor] = {}
# By device, and how many are taken.
_reserves: dict[torch.device, Tensor] = {}
_taken: dict[torch.device, int] = {}
_lock = Lock()


def arrival_counters(device: torch.device, count: int) -> Tensor | None:
    """At least `count` int32 counters, all 0, for one launch on the current stream.

    None while a CUDA graph is captured, if the reserve is used up or was not made before.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    count = -(-count // _LINE) * _LINE
    if torch.cuda.is_current_stream_capturing():
        return _reserved(device, count)
    key = (device, triton.runtime.driver.active.get_current_stream(device.index))
    counters = _of_streams.get(key)
    if counters is None or counters.numel() < count:
        _make_reserve(device)
        size = max(_FEWEST, 1 << (count - 1).bit_length())
        # Work on the former counters, if any, comes before whatever takes their memory next.
        counters = _of_streams[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return counters


def _make_reserve(device: torch.device) -> None:
    with _lock:
        if device not in _reserves:
            _reserves[device] = torch.zeros(_RESERVED, dtype=torch.int32, device=device)
            # Graphs run on any stream.
            torch.cuda.current_stream(device).synchronize()


def _reserved(device: torch.device, count: int) -> Tensor | None:
    """The next `count` counters of the reserve, never taken again, or None."""
    with _lock:
        first = _taken.get(device, 0)
        if device not in _reserves or first + count > _RESERVED:
            return None
        _taken[device] = first + count
    return _reserves[device][first : first + count]
