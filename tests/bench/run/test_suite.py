"""The measuring process and its supervisor: budget, saving, crashes, hangs."""

import json
import sys
import time

import pytest

from fastattn.bench.attention import Bench
from fastattn.bench.failures import LOST, DeviceLost
from fastattn.bench.measure import HostTimer
from fastattn.bench.results.report import Report
from fastattn.bench.run import jobs, suite
from fastattn.bench.run.jobs import Job, gpu_jobs, record
from fastattn.bench.run.suite import FINISHED, run_jobs
from fastattn.bench.run.supervise import Budget, ProcessGroup, supervise
from fastattn.training.step_timing import StepTiming

BENCH = Bench(HostTimer())


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def job(name, run=None, *, clock=None, seconds=0.0, kinds=()):
    def measure(bench, broken, announce):
        announce("ours", "runs")
        if clock is not None:
            clock.sleep(seconds)
        if run is not None:
            run(broken)
        return [record("family", name, "ours", figure=1)]

    return Job(name, measure, kinds)


def raising(error):
    def run(broken):
        raise error

    return run


@pytest.fixture
def report(tmp_path):
    return Report.create(tmp_path / "results.json", "command")


def on_disk(report):
    return Report.load(report.path).data


def names(report):
    return [r["case"]["name"] for r in on_disk(report)["results"]]


def test_a_job_that_fails_is_recorded_and_the_rest_goes_on(report):
    jobs = [job("a"), job("b", raising(RuntimeError("no\n luck"))), job("c")]
    assert run_jobs(jobs, report, BENCH, lambda: 1) == FINISHED
    assert names(report) == ["a", "c"]
    assert on_disk(report)["jobs"]["b"]["status"] == "broken off"
    assert on_disk(report)["jobs"]["b"]["reason"] == "RuntimeError: no luck"


def test_budget_is_kept_and_what_was_not_reached_is_named(report):
    clock = Clock()
    budget = Budget(10, clock)
    jobs = [job(name, clock=clock, seconds=6) for name in "abcd"]
    run_jobs(jobs, report, BENCH, budget.left, clock)
    assert names(report) == ["a", "b"]
    assert on_disk(report)["jobs"]["a"] == {"status": "done", "seconds": 6}
    assert on_disk(report)["jobs"]["d"] == {"status": "not reached", "reason": "the time was up"}


def test_every_job_is_on_disk_before_the_next_begins(report):
    seen = []
    jobs = [job("a"), job("b", lambda broken: seen.append((names(report), report.running())))]
    run_jobs(jobs, report, BENCH, lambda: 1)
    ((done, (running, state)),) = seen
    assert (done, running, state["at"]) == (["a"], "b", "ours")


def test_a_second_process_goes_on_where_the_first_ended(report):
    jobs = [job("a"), job("b"), job("c")]
    run_jobs(jobs[:2], report, BENCH, lambda: 1)
    run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1)
    assert names(report) == ["a", "b", "c"]


def test_a_lost_device_costs_one_implementation(report):
    def breaks(broken):
        if "ours" not in broken:
            raise DeviceLost("ours", "illegal access")

    jobs = [job("a", breaks), job("b")]
    assert run_jobs(jobs, report, BENCH, lambda: 1) == LOST
    assert on_disk(report)["broken"] == {"a": {"ours": "broke the device: illegal access (in a)"}}
    assert run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1) == FINISHED
    assert names(report) == ["a", "b"]


def test_a_device_lost_by_the_reference_ends_the_job(report):
    jobs = [job("a", raising(DeviceLost("the reference", "illegal access"))), job("b")]
    assert run_jobs(jobs, report, BENCH, lambda: 1) == LOST
    assert run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1) == FINISHED
    assert names(report) == ["b"]


def test_a_device_lost_in_a_turn_has_the_job_run_one_by_one(report):
    seen = []

    def measure(bench, broken, announce):
        seen.append((bench.alone, sorted(broken)))
        if not broken:
            raise DeviceLost("theirs" if bench.alone else "the timing", "illegal access")
        return []

    for code in (LOST, LOST, FINISHED):
        assert run_jobs([Job("a", measure)], Report.load(report.path), BENCH, lambda: 1) == code
    assert seen == [(False, []), (True, []), (False, ["theirs"])]


@pytest.mark.parametrize("error", [None, ValueError("no such shape")])
def test_a_job_that_leaves_a_broken_device_is_blamed_and_not_the_next(report, error):
    timer = HostTimer()

    def lost():
        raise RuntimeError("illegal access")

    def breaks(broken):
        timer.synchronize = lost
        if error is not None:
            raise error

    assert run_jobs([job("a", breaks), job("b")], report, Bench(timer), lambda: 1) == LOST
    assert "ours" in on_disk(report)["broken"]["a"]
    assert "b" not in on_disk(report)["jobs"]


def test_who_ended_the_process_sits_out_what_runs_the_same(report):
    def breaks(broken):
        if "ours" not in broken:
            raise DeviceLost("ours", "illegal access")

    seen = {}

    def look(name):
        return lambda broken: seen.setdefault(name, sorted(broken))

    jobs = [
        job("forward", look("forward"), kinds=("forward",)),
        job("breaks", breaks, kinds=("forward", "backward")),
        job("padded", look("padded"), kinds=("forward",)),
        job("longer", look("longer"), kinds=("forward", "backward")),
        job("decode", look("decode"), kinds=("decode",)),
    ]
    assert run_jobs(jobs, report, BENCH, lambda: 1) == LOST
    assert run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1) == FINISHED
    assert seen == {"forward": [], "padded": [], "longer": ["ours"], "decode": []}


WORKER = """
import sys, threading
from pathlib import Path
from fastattn.bench.attention import Bench
from fastattn.bench.run.jobs import Job, record
from fastattn.bench.measure import HostTimer
from fastattn.bench.results.report import Report
from fastattn.bench.run.suite import run_jobs

def measure(name):
    def run(bench, broken, announce):
        records = []
        for implementation in ("ours", "theirs"):
            if implementation in broken:
                continue
            announce(implementation, "runs")
            if name == "forever":
                threading.Event().wait()
            records.append(record("family", name, implementation))
        return records
    return Job(name, run)

report = Report.load(Path(sys.argv[1]))
sys.exit(run_jobs([measure(n) for n in sys.argv[2:]], report, Bench(HostTimer()), lambda: 1))
"""


def worker(report, tmp_path, *jobs):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(left):
        return ProcessGroup(
            [sys.executable, str(script), str(report.path), *jobs], tmp_path / "log"
        )

    return start


class Scripted:
    """A process whose life is a list of steps: what to do at each poll, then an exit code."""

    def __init__(self, steps, code):
        self.steps, self.code, self.killed = list(steps), code, False

    def poll(self):
        if self.killed:
            return -9
        if not self.steps:
            return self.code
        step = self.steps.pop(0)
        if step is not None:
            step()
        return None

    def kill(self):
        self.killed = True

    def interrupt(self):
        raise AssertionError("what measures is not interrupted")


@pytest.mark.parametrize(("doing", "limit"), [("prepares", 90), ("runs", 25)])
def test_a_hang_is_ended_and_blamed(report, doing, limit):
    clock = Clock()

    def begin():
        state = {"at": "flex", "doing": doing, "blamed": "forward", "alone": False}
        report.data["jobs"]["a"] = {"status": "running", **state}
        report.save()

    processes = [Scripted([begin, *[None] * 1000], 0), Scripted([], 0)]
    started = iter(processes)
    outcome = supervise(
        lambda left: next(started),
        report.path,
        Budget(600, clock).left,
        sleep=clock.sleep,
        clock=clock,
    )
    assert outcome == "finished"
    assert processes[0].killed
    why = f"made no progress for {limit} s (in a)"
    assert on_disk(report)["broken"] == {"forward": {"flex": why}}
    assert limit < clock.now < limit + 5


def test_the_time_is_kept_whatever_the_process_does(report):
    clock = Clock()
    report.data["jobs"]["a"] = {"status": "running", "at": "ours"}
    report.save()
    process = Scripted([None] * 10000, 0)
    outcome = supervise(
        lambda left: process, report.path, Budget(50, clock).left, sleep=clock.sleep, clock=clock
    )
    assert outcome == "the time was up"
    assert process.killed
    assert clock.now < 51
    assert on_disk(report)["jobs"]["a"] == {"status": "not reached", "reason": "the time was up"}
    assert on_disk(report)["broken"] == {}


def test_a_process_that_dies_at_once_is_not_started_for_ever(report):
    starts = []

    def start(left):
        starts.append(left)
        return Scripted([], 1)

    assert "exit code 1, with nothing running" in supervise(start, report.path, lambda: 600)
    assert len(starts) == 1


def test_no_gpu_is_told(report):
    assert supervise(lambda left: Scripted([], suite.NO_GPU), report.path, lambda: 9) == "no GPU"


def test_a_kill_in_the_middle_leaves_a_whole_file(report, tmp_path):
    process = worker(report, tmp_path, "first", "second", "forever")(0)
    while "forever" not in (Report.load(report.path).running() or ()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    assert len(json.loads(report.path.read_text())["results"]) == 4
    assert [p.name for p in tmp_path.glob(".writing*")] == []


def test_suite_without_a_gpu_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite.torch.cuda, "is_available", lambda: False)
    assert suite.main(["--report", str(tmp_path / "r.json")]) == suite.NO_GPU
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("which", ["quick", "full"])
def test_jobs_begin_with_the_aims(which):
    found = [job.name for job in gpu_jobs(which)]
    assert len(found) == len(set(found))
    assert found[0] == "forward-B4-H16-T4096-D128-causal"
    others = [found.index(name) for name in ("host cost of a call", "first call", "import")]
    before = found[: min(others)]
    for kind in ("decode-fwd-B32", "decode-fwd-B1", "forward-B1-H64:8", "backward-B1-H64:8"):
        assert any(name.startswith(kind) for name in before)
    assert any("window" in name for name in before)
    assert max(others) < 30


def test_training_tells_who_trains_and_leaves_out_who_is_broken(monkeypatch):
    def steps(config, *, backend, issued, **_):
        issued()
        return StepTiming(backend, 1.0, 2.0, 3.0, None, None)

    monkeypatch.setattr(jobs, "time_training_steps", steps)
    monkeypatch.setattr(jobs, "release", lambda device: None)
    training = next(job for job in gpu_jobs("quick") if job.name == "training-T1024")
    announced = []
    records = training.run(BENCH, {"fastattn-triton": "hung"}, lambda *told: announced.append(told))
    assert announced == [("fastattn-torch", "prepares"), ("fastattn-torch", "runs")]
    assert {r["implementation"]: r["status"] for r in records} == {
        "fastattn-triton": "cannot serve",
        "fastattn-torch": "timed",
    }


def test_who_does_the_same_for_long_gives_a_sign_of_life_and_not_at_each_step(report, monkeypatch):
    clock, saved = Clock(), []

    def measure(bench, broken, announce):
        monkeypatch.setattr(report, "save", lambda: saved.append(clock.now))
        for step in range(5):
            clock.now = 0.4 * step
            announce("ours", "runs")
        announce("theirs", "runs")
        monkeypatch.undo()
        return []

    run_jobs([Job("a", measure)], report, BENCH, lambda: 1, clock)
    assert saved == pytest.approx([0.0, 1.2, 1.6])
