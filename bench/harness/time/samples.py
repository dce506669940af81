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
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from ..cases.case import Case
from ..cases.correctness import Expected, expect
from ..cases.inputs import Inputs
from . import environment
from .failures import raise_if_lost
from .supervise import PREPARES, RUNS

Function = Callable[[], object]
# Progress callback: the running implementation, and its phase.
Announce = Callable[[str, str], None]
_MOST_FLUSHES = 50
# Announced while functions take turns.
TIMING = "the timing"


def silent(who: str, doing: str) -> None:
    """Announce nothing."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: median, 20th and 80th percentile, least, number of samples."""

    median: float
    p20: float
    p80: float
    least: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summary of samples in milliseconds, at least one."""
        several = samples if len(samples) > 1 else [*samples, *samples]
        p20, _, _, p80 = statistics.quantiles(several, n=5, method="inclusive")
        return cls(statistics.median(samples), p20, p80, min(samples), len(samples))

    def to_dict(self) -> dict[str, float]:
        """The fields as JSON values, rounded to a tenth of a microsecond."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


# Issues one call; returns a function for its milliseconds, valid after synchronization.
Start = Callable[[], Callable[[], float]]


class HostTimer:
    """Wall time of a synchronous call, for the CPU; the interface of a timer."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def prepare(self, function: Function) -> Start:
        """Calibrate on a warm function; return the issuer of its samples."""

        def start() -> Callable[[], float]:
            begin = self._clock()
            function()
            elapsed = 1e3 * (self._clock() - begin)
            return lambda: elapsed

        return start

    def synchronize(self) -> None:
        """Wait for all issued calls."""


_timing_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)


class DeviceTimer(HostTimer):
    """Time between CUDA events around a call, with a cold L2 cache.

    flush: overwrites the cache asynchronously. event: makes an event with record() and
    elapsed_time(end) in milliseconds. synchronize: waits for the device. clock: in seconds.
    """

    def __init__(
        self,
        flush: Function,
        event: Callable[[], Any] = _timing_event,
        synchronize: Callable[[], None] = torch.cuda.synchronize,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock)
        self._flush, self._event = flush, event
        self._synchronize = synchronize
        self._flush_ms: float | None = None

    def prepare(self, function: Function) -> Start:
        flushes = self._flushes_to_hide(function)

        def start() -> Callable[[], float]:
            for _ in range(flushes):
                self._flush()
            begin, end = self._event(), self._event()
            begin.record()
            function()
            end.record()
            return lambda: float(begin.elapsed_time(end))

        return start

    def synchronize(self) -> None:
        self._synchronize()

    def _flushes_to_hide(self, function: Function) -> int:
        """Number of flushes that take twice as long as the host's work for a call."""
        self.synchronize()
        begin = self._clock()
        function()
        host_ms = 1e3 * (self._clock() - begin)
        self.synchronize()
        return max(1, min(_MOST_FLUSHES, math.ceil(2 * host_ms / self._time_of_flush())))

    def _time_of_flush(self) -> float:
        if self._flush_ms is None:
            self._flush()
            begin, end = self._event(), self._event()
            begin.record()
            for _ in range(4):
                self._flush()
            end.record()
            self.synchronize()
            self._flush_ms = max(1e-3, float(begin.elapsed_time(end)) / 4)
        return self._flush_ms


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
    """The instruments of `pytest bench`, full runs and `tune`.

    Args:
        timer: times single calls.
        effort: duration of each measurement.
        while_busy: reads clocks while the device works.
        readings: clock readings since the last call, for the records.
        sleep: waits for some seconds.
        expected: computes the oracle's results.
        alone: time functions one after the other, to find one that breaks the device.
    """

    timer: HostTimer
    effort: Effort = field(default_factory=Effort)
    while_busy: Callable[[], None] = lambda: None
    readings: Callable[[], dict[str, float]] = dict
    sleep: Callable[[float], None] = time.sleep
    expected: Callable[[Case, Inputs], Expected] = expect
    alone: bool = False

    def compare(
        self, functions: Mapping[str, Function], announce: Announce = silent
    ) -> dict[str, Timing | Exception]:
        """Summaries of `samples`."""
        results = self.samples(functions, announce)
        return {n: x if isinstance(x, Exception) else Timing.of(x) for n, x in results.items()}

    def samples(
        self, functions: Mapping[str, Function], announce: Announce = silent
    ) -> dict[str, list[float] | Exception]:
        """Time functions in turns.

        Args:
            functions: by name.
            announce: progress callback with a name, or TIMING for all, and PREPARES or RUNS.

        Returns:
            The milliseconds of each function's calls, or its error.

        Raises:
            DeviceLost: a function broke the CUDA context; named TIMING if they took turns.
        """
        if self.alone and len(functions) > 1:
            each = (self.samples({n: function}, announce) for n, function in functions.items())
            return {name: x for timed in each for name, x in timed.items()}
        errors: dict[str, list[float] | Exception] = {}
        starts: dict[str, tuple[Start, int]] = {}
        for name, function in functions.items():
            try:
                starts[name] = self._warm_up(name, function, announce)
            except Exception as error:
                errors[name] = error
                raise_if_lost(error, name, self.timer.synchronize)
        self.sleep(self.effort.pause)
        who = next(iter(functions)) if len(functions) == 1 else TIMING
        announce(who, RUNS)
        samples: dict[str, list[float]] = {name: [] for name in starts}
        for turn in range(max((count for _, count in starts.values()), default=0)):
            due = {n: s for n, (s, count) in starts.items() if turn < count and n not in errors}
            for name, ms in self._turn(turn, due, errors, who):
                samples[name].append(ms)
        return {n: errors[n] if n in errors else samples[n] for n in functions}

    def _warm_up(self, name: str, function: Function, announce: Announce) -> tuple[Start, int]:
        """Issuer of a function's samples, and their number."""
        announce(name, PREPARES)
        for _ in range(self.effort.warm_up):
            function()
            announce(name, RUNS)
        self.timer.synchronize()
        start = self.timer.prepare(function)
        first = start()
        self.timer.synchronize()
        return start, self.effort.samples(first())

    def _turn(
        self, turn: int, starts: dict[str, Start], errors: dict[str, Any], who: str
    ) -> list[tuple[str, float]]:
        """Milliseconds of one call of each function; errors go to `found`."""
        pending: list[tuple[str, Callable[[], float]]] = []
        for name in starts if turn % 2 == 0 else reversed(starts):
            try:
                pending.append((name, starts[name]()))
            except Exception as error:
                errors[name] = error
                # An earlier function may be at fault: calls of a turn run asynchronously.
                raise_if_lost(error, who, self.timer.synchronize)
        if turn % 4 == 3:
            self.while_busy()
        try:
            self.timer.synchronize()
        except Exception as error:
            raise_if_lost(error, who, self.timer.synchronize)
            raise
        return [(name, read()) for name, read in pending]


def gpu_bench(which: str) -> Bench:
    """Timer, effort and clock readings of a run on the current CUDA device."""
    reader = environment.ClockReader()
    effort = Effort() if which == "quick" else Effort(target_ms=150, least=10, pause=0.5)
    return Bench(device_timer(), effort, while_busy=reader, readings=reader.take)
