"""Timing of functions against each other: one process, samples in alternation, cold cache.

On a GPU a sample is the time between two events around the call. The L2 cache is overwritten before
each sample, so that every call finds it cold; the writes also keep the GPU busy while the host
issues the call, so that host time is not measured. The functions take turns, in order and in
reverse, so that clock drift and heat affect all alike. Clocks and power limits are read, never set.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch

from .failures import raise_if_lost

Function = Callable[[], object]
# Progress callback: the implementation at work, and its phase. PREPARES is host work, such as
# compilation and drawing inputs; RUNS is work on the device.
Announce = Callable[[str, str], None]
PREPARES, RUNS = "prepares", "runs"
# Named as the implementation at work while functions take turns.
TIMING = "the timing"
_MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile, least, and how many samples."""

    median: float
    p20: float
    p80: float
    least: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summary of samples in milliseconds, at least one."""
        ordered = sorted(samples)
        return cls(
            statistics.median(ordered),
            _percentile(ordered, 0.2),
            _percentile(ordered, 0.8),
            ordered[0],
            len(ordered),
        )

    def to_dict(self) -> dict[str, float]:
        """The fields as JSON values, rounded to a tenth of a microsecond."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest samples."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


# Issues one call; returns a function that gives its milliseconds once the timer has synchronized.
Start = Callable[[], Callable[[], float]]


class Timer(Protocol):
    """Times single calls."""

    def prepare(self, function: Function) -> Start:
        """Calibrate on a function that is warmed up; return what issues its samples."""
        ...

    def synchronize(self) -> None:
        """Wait until every issued call has finished."""
        ...


class HostTimer:
    """Wall time of a call that ends when it returns, for the CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def prepare(self, function: Function) -> Start:
        def start() -> Callable[[], float]:
            begin = self._clock()
            function()
            elapsed = 1e3 * (self._clock() - begin)
            return lambda: elapsed

        return start

    def synchronize(self) -> None:
        return


_timing_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)


class DeviceTimer:
    """Time between CUDA events around a call, with a cold L2 cache.

    Args:
        flush: overwrites the cache, asynchronously.
        event: makes an event with record(), and elapsed_time(end) in milliseconds.
        synchronize: waits for the device.
        clock: the host's, in seconds.
    """

    def __init__(
        self,
        flush: Function,
        event: Callable[[], Any] = _timing_event,
        synchronize: Callable[[], None] = torch.cuda.synchronize,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flush, self._event, self._clock = flush, event, clock
        self.synchronize = synchronize
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

    def flush(self) -> None:
        """Overwrite the cache and wait."""
        self._flush()
        self.synchronize()

    def _flushes_to_hide(self, function: Function) -> int:
        """Flushes that take twice as long as the host's work for one call."""
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


_MOST_FLUSHES = 50


def device_timer() -> DeviceTimer:
    """A timer for the current CUDA device, with a buffer of four times its L2 cache."""
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(max(256 * _MIB, 4 * cache_bytes), dtype=torch.int8, device="cuda")
    return DeviceTimer(flush=buffer.zero_)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        warm_up: calls before the first sample.
        target_ms: total time of the samples of one function.
        least, most: bounds on the samples of a function.
        pause: seconds to cool down before a comparison.
    """

    warm_up: int = 3
    target_ms: float = 60.0
    least: int = 5
    most: int = 40
    pause: float = 0.2

    def samples(self, ms: float) -> int:
        """How many samples to take of a call that takes `ms` milliseconds."""
        return max(self.least, min(self.most, math.ceil(self.target_ms / max(ms, 1e-6))))


def compare(
    functions: Mapping[str, Function],
    timer: Timer,
    effort: Effort | None = None,
    *,
    while_busy: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    announce: Announce = lambda name, doing: None,
    alone: bool = False,
) -> dict[str, Timing | Exception]:
    """Time functions in alternation.

    Args:
        functions: by name; each is called many times.
        timer: times a single call.
        effort: how long to measure.
        while_busy: called while issued work is still running, to read the clock.
        sleep: waits that many seconds.
        announce: progress callback: a name, TIMING for all at once, and PREPARES or RUNS.
        alone: time one after the other, so that a lost device has a culprit.

    Returns:
        A timing for each name, or the error of its function; the rest are still timed.

    Raises:
        DeviceLost: a function broke the CUDA context; named TIMING if they took turns.
    """
    found: dict[str, Timing | Exception] = {}
    for names in [[name] for name in functions] if alone else [list(functions)]:
        taken = samples_of(
            {name: functions[name] for name in names},
            timer,
            effort,
            while_busy=while_busy,
            sleep=sleep,
            announce=announce,
        )
        for name, samples in taken.items():
            found[name] = samples if isinstance(samples, Exception) else Timing.of(samples)
    return found


def samples_of(
    functions: Mapping[str, Function],
    timer: Timer,
    effort: Effort | None = None,
    *,
    while_busy: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    announce: Announce = lambda name, doing: None,
) -> dict[str, list[float] | Exception]:
    """The milliseconds of every call of functions that take turns, as `compare` times them."""
    return _Comparison(timer, effort or Effort(), while_busy, sleep, announce).of(functions)


@dataclass(frozen=True)
class _Comparison:
    timer: Timer
    effort: Effort
    while_busy: Callable[[], None]
    sleep: Callable[[float], None]
    announce: Announce

    def of(self, functions: Mapping[str, Function]) -> dict[str, list[float] | Exception]:
        found: dict[str, list[float] | Exception] = {}
        starts: dict[str, Start] = {}
        wanted: dict[str, int] = {}
        for name, function in functions.items():
            try:
                starts[name] = self._warm_up(name, function)
                first = starts[name]()
                self.timer.synchronize()
                wanted[name] = self.effort.samples(first())
            except Exception as error:
                found[name] = error
                raise_if_lost(error, name, self.timer.synchronize)
        self.sleep(self.effort.pause)
        who = next(iter(functions)) if len(functions) == 1 else TIMING
        self.announce(who, RUNS)
        samples: dict[str, list[float]] = {name: [] for name in wanted}
        for turn in range(max(wanted.values(), default=0)):
            names = [n for n in wanted if turn < wanted[n] and n not in found]
            for name, ms in self._turn(turn, names, starts, found, who):
                samples[name].append(ms)
        found.update((n, times) for n, times in samples.items() if n not in found)
        return {name: found[name] for name in functions}

    def _warm_up(self, name: str, function: Function) -> Start:
        self.announce(name, PREPARES)
        for _ in range(self.effort.warm_up):
            function()
            self.announce(name, RUNS)
        self.timer.synchronize()
        return self.timer.prepare(function)

    def _turn(
        self,
        turn: int,
        names: list[str],
        starts: Mapping[str, Start],
        found: dict[str, list[float] | Exception],
        who: str,
    ) -> list[tuple[str, float]]:
        """Milliseconds of one call of each function; errors go to `found`."""
        pending: list[tuple[str, Callable[[], float]]] = []
        for name in names if turn % 2 == 0 else reversed(names):
            try:
                pending.append((name, starts[name]()))
            except Exception as error:
                found[name] = error
                # The fault may be an earlier function's: calls of a turn run after they are issued.
                raise_if_lost(error, who, self.timer.synchronize)
        if turn % 4 == 3:
            self.while_busy()
        try:
            self.timer.synchronize()
        except Exception as error:
            raise_if_lost(error, who, self.timer.synchronize)
            raise
        return [(name, read()) for name, read in pending]
