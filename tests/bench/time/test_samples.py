"""The loop that times, with fake clocks, events and functions."""

from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from fastattn.bench.time import samples
from fastattn.bench.time.failures import Failure
from fastattn.bench.time.samples import Bench, DeviceTimer, Effort, HostTimer, summary


class Device:
    """A GPU with a queue: work takes time when it is issued, and the host's clock stands apart."""

    def __init__(self):
        self.now = 0.0  # milliseconds of the device
        self.host = 0.0  # seconds of the host
        self.log, self.pauses = [], []

    def work(self, name, ms, host_ms=0.0):
        def run():
            self.log.append(name)
            self.now += ms
            self.host += host_ms / 1e3

        return run

    def timer(self, flush_ms=1.0):
        return DeviceTimer(self.work("flush", flush_ms))


@pytest.fixture
def device(monkeypatch):
    device = Device()
    time = SimpleNamespace(perf_counter=lambda: device.host, sleep=device.pauses.append)
    monkeypatch.setattr(samples, "time", time)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return device


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def elapsed_time(self, end):
        return end.at - self.at


def once(number=4, warm_up=0, pause=0):
    return Effort(warm_up=warm_up, target_ms=0, least=number, most=number, pause=pause)


def of(ms, number):
    return dict.fromkeys(("median", "p20", "p80", "least"), ms) | {"samples": number}


def test_a_sample_is_the_call_alone_with_the_cache_overwritten(device):
    works = {"a": device.work("a", 3.0), "b": device.work("b", 1.0)}
    results = Bench(device.timer(flush_ms=50.0), once()).compare(works)
    assert results == {"a": of(3.0, 4), "b": of(1.0, 4)}
    # Learning how long a call occupies the host is no sample: it comes first.
    timed = device.log[device.log.index("a") + 1 :]
    last = timed.index("b") + 1
    for previous, name in zip(timed[last:], timed[last + 1 :], strict=False):
        assert name not in works or previous == "flush"


def test_flushes_outlast_the_host(device):
    start = device.timer(flush_ms=2.0).prepare(device.work("a", 1.0, host_ms=7.0))
    del device.log[:]
    start()
    assert device.log == ["flush"] * 7 + ["a"]


def test_number_of_samples_follows_the_time_of_a_call(device):
    effort = Effort(target_ms=60, least=5, most=40)
    assert [effort.samples(ms) for ms in (0.001, 2.0, 6.0, 1000.0)] == [40, 30, 10, 5]
    works = {"long": device.work("long", 30.0), "short": device.work("short", 1.0)}
    effort = Effort(warm_up=0, target_ms=10, least=2, most=40, pause=0)
    results = Bench(device.timer(), effort).compare(works)
    assert (results["long"]["samples"], results["short"]["samples"]) == (2, 10)
    expected = {"median": 3.0, "p20": 1.8, "p80": 4.2, "least": 1.0, "samples": 5}
    assert summary([5.0, 1.00001, 2.0, 4.0, 3.0]) == expected and summary([7.0]) == of(7.0, 1)


def test_a_function_that_raises_does_not_stop_the_others(device, capsys):
    calls = count(1)

    def fails_late():
        if next(calls) > 4:
            raise RuntimeError("worn out")

    def fails():
        raise ValueError("no")

    works = {"bad": fails, "late": fails_late, "good": device.work("good", 2.0)}
    results = Bench(device.timer(), once(6)).compare(works)
    assert list(results.items()) == [
        ("bad", Failure("failed", "ValueError: no")),
        ("late", Failure("failed", "RuntimeError: worn out")),
        ("good", of(2.0, 6)),
    ]
    assert "\nlate:\nTraceback" in capsys.readouterr().err


def test_rest_warm_up_and_clocks(device):
    readings = []

    def clocks():
        readings.append(len(device.log))
        return {"power_w": 600.0}

    bench = Bench(HostTimer(), once(8, warm_up=3, pause=0.5), clocks)
    results = bench.compare({"a": device.work("a", 0.0, host_ms=2.5)})
    assert results["a"] == of(2.5, 8) and len(bench.taken["a"]) == 8
    # In the fourth turn, while the device works.
    assert (device.pauses, len(device.log), readings) == ([0.5], 3 + 1 + 8, [8])
    assert bench.readings == {"power_w": 600.0}


class Fragile(HostTimer):
    """A device whose context a call loses; every later synchronisation raises."""

    lost = False

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def breaking(self, at):
        calls = count(1)

        def run():
            self.lost = next(calls) == at or self.lost

        return run


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_who_loses_the_device_is_named(at):
    """In the warm-up, the first sample or a turn, in which others follow."""
    timer, announced = Fragile(), []
    works = {"good": lambda: None, "bad": timer.breaking(at), "meets": timer.synchronize}
    bench = Bench(timer, once(warm_up=1), announce=lambda who, doing: announced.append(who))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.compare(works)
    assert announced[-1] == "bad"


def test_functions_are_made_and_warm_one_by_one_and_take_turns_forwards_and_backwards():
    log = []

    def made(name):
        log.append(f"made {name}")
        return partial(log.append, name)

    bench = Bench(HostTimer(), once(3), announce=lambda *told: log.append(told))
    bench.samples({name: partial(made, name) for name in "ab"})
    a, b = (("a", "runs"), ("b", "runs"))
    assert log == [
        ("a", "prepares"), "made a", "a", ("b", "prepares"), "made b", "b",
        a, "a", b, "b", b, "b", a, "a", a, "a", b, "b",
    ]  # fmt: skip
