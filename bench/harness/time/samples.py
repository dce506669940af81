"""The timing loop: functions in alternation, with a cold cache.

On a GPU a sample is the time between two events around the call. Before each sample the L2 cache is
overwritten, so that it is cold; the writes also keep the GPU busy while the host issues the call,
so that host time is not measured. The functions take turns, in order and in reverse, so that clock
drift and heat affect all alike. Clocks and power limits are never changed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ...testing.supervision import PREPARES, RUNS
from ..cases.case import Case
from ..cases.correctness import Expected, expect
from ..cases.inputs import Inputs
from . import environment
from .failures import Failure, failure

Function = Callable[[], object]
Summary = dict[str, float]
_MOST_FLUSHES = 50


def summary(samples: Sequence[float]) -> Summary:
    """Median, p20, p80 (percentiles), least and number of samples, rounded to 1e-4."""
    several = samples if len(samples) > 1 else [*samples, *samples]
    p20, _, _, p80 = statistics.quantiles(several, n=5, method="inclusive")
    numbers = {"median": statistics.median(samples), "p20": p20, "p80": p80, "least": min(samples)}
    return {**{name: round(ms, 4) for name, ms in numbers.items()}, "samples": len(samples)}


# Issues one call; returns a function for its milliseconds, valid after synchronization.
Start = Callable[[], Callable[[], float]]


class HostTimer:
    """Wall time of a synchronous call, for the CPU; the interface of a timer."""

    def prepare(self, function: Function) -> Start:
        """Calibrate on a warm function; return the issuer of its samples."""

        def start() -> Callable[[], float]:
            begin = time.perf_counter()
            function()
            elapsed = 1e3 * (time.perf_counter() - begin)
            return lambda: elapsed

        return start

    def synchronize(self) -> None:
        """Wait for all issued calls."""


class DeviceTimer(HostTimer):
    """Time between CUDA events around a call, after `flush` has overwritten the L2 cache."""

    def __init__(self, flush: Function) -> None:
        self._flush = flush
        self._flush_ms: float | None = None

    def prepare(self, function: Function) -> Start:
        host_ms = super().prepare(function)()()
        self.synchronize()
        if self._flush_ms is None:
            read = self._time(1, self._flush, 4)
            self.synchronize()
            self._flush_ms = max(1e-3, read() / 4)
        # They take twice as long as the host's work for a call.
        flushes = max(1, min(_MOST_FLUSHES, math.ceil(2 * host_ms / self._flush_ms)))
        return lambda: self._time(flushes, function)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _time(self, flushes: int, function: Function, calls: int = 1) -> Callable[[], float]:
        for _ in range(flushes):
            self._flush()
        event: Any = torch.cuda.Event
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        return lambda: float(begin.elapsed_time(end))


def device_timer() -> DeviceTimer:
    """A timer for the current CUDA device; its buffer is four times the L2 cache."""
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(max(2**28, 4 * cache_bytes), dtype=torch.int8, device="cuda")
    return DeviceTimer(flush=buffer.zero_)


@dataclass(frozen=True)
class Effort:
    """Duration of measurements.

    warm_up: calls before the first sample. target_ms: total time of the samples of a function.
    least, most: bounds on their number. pause: seconds to cool down before a comparison.
    """

    warm_up: int = 3
    target_ms: float = 60.0
    least: int = 5
    most: int = 40
    pause: float = 0.2

    def samples(self, ms: float) -> int:
        """Number of samples for a call of `ms` milliseconds."""
        return max(self.least, min(self.most, math.ceil(self.target_ms / max(ms, 1e-6))))


@dataclass
class Bench:
    """The instruments of a measurement in `pytest bench`, full runs and `tune`.

    clocks: reads clocks, while the device works. expected: computes the oracle's results. broken:
    implementations that broke an earlier process, with reasons. announce: progress callback with an
    implementation and its phase. readings, taken: clocks and samples of the last measurement.
    """

    timer: HostTimer
    effort: Effort = field(default_factory=Effort)
    clocks: Callable[[], dict[str, float]] = dict
    expected: Callable[[Case, Inputs], Expected] = expect
    broken: Mapping[str, str] = field(default_factory=dict)
    announce: Callable[[str, str], None] = lambda who, doing: None
    readings: dict[str, float] = field(init=False, default_factory=dict)
    taken: dict[str, list[float]] = field(init=False, default_factory=dict)

    def compare(self, functions: Mapping[str, Function]) -> dict[str, Summary | Failure]:
        """Summaries of `samples` of functions that are ready."""
        ready = {name: partial(lambda own: own, function) for name, function in functions.items()}
        results = self.samples(ready)
        return {n: x if isinstance(x, Failure) else summary(x) for n, x in results.items()}

    def samples(
        self,
        prepares: Mapping[str, Callable[[], Function]],
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, list[float] | Failure]:
        """Make functions and time them in turns; return milliseconds of calls, or a failure.

        called: names under which functions are announced, and blamed for a broken process, if they
        are not their own.

        Raises an error if a function, the last one announced, broke the CUDA context.
        """
        failures: dict[str, Failure] = {}
        starts: dict[str, tuple[Start, int]] = {}
        who = {name: called.get(name, name) for name in prepares}
        for name, prepare in prepares.items():
            self.announce(who[name], PREPARES)
            try:
                starts[name] = self._warm_up(who[name], prepare())
            except Exception as error:
                failures[name] = failure(error, who[name], self.timer.synchronize)
        time.sleep(self.effort.pause)
        self.readings, self.taken = {}, {name: [] for name in starts}
        for turn in range(max((count for _, count in starts.values()), default=0)):
            for name in starts if turn % 2 == 0 else reversed(starts):
                start, count = starts[name]
                if turn >= count or name in failures:
                    continue
                # Each call ends before the next: who hangs or loses the device is known.
                self.announce(who[name], RUNS)
                try:
                    read = start()
                    if turn == 3 and not self.readings:
                        self.readings = self.clocks()
                    self.timer.synchronize()
                    self.taken[name].append(read())
                except Exception as error:
                    failures[name] = failure(error, who[name], self.timer.synchronize)
        return {n: failures.get(n) or self.taken[n] for n in prepares}

    def _warm_up(self, who: str, function: Function) -> tuple[Start, int]:
        """Issuer of a function's samples, and their number."""
        for _ in range(self.effort.warm_up):
            function()
            self.announce(who, RUNS)
        self.timer.synchronize()
        start = self.timer.prepare(function)
        first = start()
        self.timer.synchronize()
        return start, self.effort.samples(first())


def gpu_bench(which: str) -> Bench:
    """Timer, effort and clocks of a run on the current CUDA device."""
    effort = Effort() if which == "short" else Effort(target_ms=150, least=10, pause=0.5)
    return Bench(device_timer(), effort, partial(environment.smi, environment.CLOCKS))
