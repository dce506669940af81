"""Timing in alternation, with fake clocks, events and functions."""

import pytest

from fastattn.bench.failures import DeviceLost
from fastattn.bench.measure import DeviceTimer, Effort, HostTimer, Timing, compare


class Device:
    """A GPU with a queue: work takes time when it is issued, and the host's clock stands apart."""

    def __init__(self):
        self.now = 0.0  # milliseconds of the device
        self.host = 0.0  # seconds of the host
        self.log = []

    def work(self, name, ms, host_ms=0.0):
        def run():
            self.log.append(name)
            self.now += ms
            self.host += host_ms / 1e3

        return run

    def event(self):
        return Event(self)

    def timer(self, flush_ms=1.0):
        return DeviceTimer(
            self.work("flush", flush_ms), self.event, lambda: None, lambda: self.host
        )


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def elapsed_time(self, end):
        return end.at - self.at


def once(least=4):
    return Effort(warm_up=0, target_ms=0, least=least, most=least, pause=0)


def test_summary_of_samples():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing == Timing(median=3.0, p20=1.8, p80=4.2, least=1.0, samples=5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 7.0, 1)


def test_device_times_hold_the_call_and_not_the_flush():
    device = Device()
    found = compare({"a": device.work("a", 3.0)}, device.timer(flush_ms=50.0), once())
    assert found["a"] == Timing(3.0, 3.0, 3.0, 3.0, 4)


def test_every_sample_finds_the_cache_overwritten():
    device = Device()
    timer = device.timer()
    works = {"a": device.work("a", 1.0), "b": device.work("b", 1.0)}
    compare(works, timer, once())
    # Learning how long a call occupies the host is no sample: it comes first.
    samples = device.log[device.log.index("a") + 1 :]
    last = samples.index("b") + 1
    for previous, name in zip(samples[last:], samples[last + 1 :], strict=False):
        if name in works:
            assert previous == "flush"


def test_flushes_outlast_the_host():
    device = Device()
    slow = device.work("a", 1.0, host_ms=7.0)
    start = device.timer(flush_ms=2.0).prepare(slow)
    del device.log[:]
    start()
    assert device.log == ["flush"] * 7 + ["a"]


def test_functions_take_turns_forwards_and_backwards():
    device = Device()
    works = {name: device.work(name, 1.0) for name in "abc"}
    compare(works, HostTimer(lambda: device.host), once(least=4))
    # One call each to learn the time of a call, then four rounds.
    assert "".join(device.log) == "abc" + "abccba" * 2


def test_number_of_samples_follows_the_time_of_a_call():
    effort = Effort(target_ms=60, least=5, most=40)
    assert [effort.samples(ms) for ms in (0.001, 2.0, 6.0, 1000.0)] == [40, 30, 10, 5]


def test_short_functions_go_on_when_long_ones_have_enough():
    device = Device()
    works = {"long": device.work("long", 30.0), "short": device.work("short", 1.0)}
    effort = Effort(warm_up=0, target_ms=10, least=2, most=40, pause=0)
    found = compare(works, device.timer(), effort)
    assert (found["long"].samples, found["short"].samples) == (2, 10)


def test_a_function_that_raises_does_not_stop_the_others():
    device = Device()
    calls = []

    def fails_late():
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("worn out")

    def fails():
        raise ValueError("no")

    works = {"bad": fails, "late": fails_late, "good": device.work("good", 2.0)}
    found = compare(works, device.timer(), once(least=6))
    assert isinstance(found["bad"], ValueError)
    assert isinstance(found["late"], RuntimeError)
    assert found["good"] == Timing(2.0, 2.0, 2.0, 2.0, 6)
    assert list(found) == ["bad", "late", "good"]


def test_rest_warm_up_and_readings():
    device = Device()
    pauses, readings = [], []
    effort = Effort(warm_up=3, target_ms=0, least=8, most=8, pause=0.5)
    compare(
        {"a": device.work("a", 1.0)},
        HostTimer(lambda: device.host),
        effort,
        while_busy=lambda: readings.append(len(device.log)),
        sleep=pauses.append,
    )
    assert pauses == [0.5]
    assert len(device.log) == 3 + 1 + 8
    assert readings == [8, 12]


def test_host_timer():
    device = Device()
    timer = HostTimer(lambda: device.host)
    read = timer.prepare(device.work("a", 0.0, host_ms=2.5))()
    assert read() == pytest.approx(2.5)


class Fragile(HostTimer):
    """A device whose context a call loses; every later synchronisation raises."""

    lost = False

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


def breaking(timer, at):
    calls = []

    def run():
        calls.append(1)
        timer.lost = timer.lost or len(calls) == at

    return run


@pytest.mark.parametrize(("at", "who"), [(1, "bad"), (2, "bad"), (3, "the timing")])
def test_a_device_that_is_lost_in_a_turn_is_nobody_s_fault_yet(at, who):
    """The warm-up and the first sample have a name; in a turn it may have been any of them."""
    timer = Fragile()
    works = {"good": lambda: None, "bad": breaking(timer, at), "other": lambda: None}
    with pytest.raises(DeviceLost, match="illegal memory access") as lost:
        compare(works, timer, Effort(warm_up=1, least=4, most=4, pause=0))
    assert lost.value.implementation == who


def test_alone_it_has_a_name():
    timer = Fragile()
    works = {"good": lambda: None, "bad": breaking(timer, 4), "other": lambda: None}
    with pytest.raises(DeviceLost) as lost:
        compare(works, timer, Effort(warm_up=1, least=4, most=4, pause=0), alone=True)
    assert lost.value.implementation == "bad"


def test_an_error_that_another_meets_in_a_turn_is_not_put_down_to_it():
    timer = Fragile()

    def meets():
        if timer.lost:
            raise RuntimeError("an illegal memory access was encountered")

    works = {"bad": breaking(timer, 3), "meets": meets}
    with pytest.raises(DeviceLost) as lost:
        compare(works, timer, Effort(warm_up=1, least=4, most=4, pause=0))
    assert lost.value.implementation == "the timing"


def test_it_is_announced_who_is_at_work_and_at_what():
    announced = []
    works = {"a": lambda: None, "b": lambda: None}
    for alone, last in ((False, "the timing"), (True, "b")):
        del announced[:]
        effort = Effort(warm_up=1, least=1, most=1, pause=0)
        compare(works, HostTimer(), effort, announce=lambda *a: announced.append(a), alone=alone)
        assert announced[:2] == [("a", "prepares"), ("a", "runs")]
        assert announced[-1] == (last, "runs")
