"""The measuring process and the one that watches it: budget, saving, crashes, hangs."""

import json
import subprocess
import sys
import time

import pytest

from fastattn.bench import full_run, suite
from fastattn.bench.attention import Bench, DeviceLost
from fastattn.bench.jobs import Job, gpu_jobs, record
from fastattn.bench.measure import HostTimer
from fastattn.bench.report import Report
from fastattn.bench.suite import FINISHED, LOST, run_jobs
from fastattn.bench.supervise import Budget, ProcessGroup, run_tests, supervise

BENCH = Bench(HostTimer())


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def job(name, run=None, *, clock=None, seconds=0.0):
    def measure(bench, broken, announce):
        announce("ours")
        if clock is not None:
            clock.sleep(seconds)
        if run is not None:
            run(broken)
        return [record("family", name, "ours", figure=1)]

    return Job(name, measure)


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
    assert seen == [(["a"], ("b", "ours"))]


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
    assert on_disk(report)["broken"] == {"a": {"ours": "broke the device: illegal access"}}
    assert run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1) == FINISHED
    assert names(report) == ["a", "b"]


def test_a_device_lost_by_nobody_in_particular_ends_the_job(report):
    jobs = [job("a", raising(DeviceLost("the timing", "illegal access"))), job("b")]
    assert run_jobs(jobs, report, BENCH, lambda: 1) == LOST
    assert run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1) == FINISHED
    assert names(report) == ["b"]


WORKER = """
import os, signal, sys, time
from pathlib import Path
from fastattn.bench.attention import Bench
from fastattn.bench.jobs import Job, record
from fastattn.bench.measure import HostTimer
from fastattn.bench.report import Report
from fastattn.bench.suite import run_jobs

def measure(name):
    def run(bench, broken, announce):
        records = []
        for implementation in ("ours", "theirs"):
            if implementation in broken:
                continue
            announce(implementation)
            if (name, implementation) == ("crash", "theirs"):
                os.kill(os.getpid(), signal.SIGSEGV)
            if (name, implementation) == ("hang", "theirs"):
                time.sleep(600)
            if name == "forever":
                time.sleep(600)
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


def test_a_crash_costs_one_implementation(report, tmp_path):
    start = worker(report, tmp_path, "first", "crash", "last")
    assert supervise(start, report.path, lambda: 600) == "finished"
    found = [(r["case"]["name"], r["implementation"]) for r in on_disk(report)["results"]]
    both = [("first", "ours"), ("first", "theirs")]
    assert found == [*both, ("crash", "ours"), ("last", "ours"), ("last", "theirs")]
    assert "exit code -11" in on_disk(report)["broken"]["crash"]["theirs"]


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


def test_a_hang_is_ended_and_blamed(report):
    clock = Clock()

    def begin():
        report.data["jobs"]["a"] = {"status": "running", "at": "flex"}
        report.save()

    processes = [Scripted([begin, *[None] * 1000], 0), Scripted([], 0)]
    started = iter(processes)
    outcome = supervise(
        lambda left: next(started),
        report.path,
        Budget(600, clock).left,
        stall=90,
        sleep=clock.sleep,
        clock=clock,
    )
    assert outcome == "finished"
    assert processes[0].killed
    assert on_disk(report)["broken"] == {"a": {"flex": "made no progress for 90 s"}}
    assert 90 < clock.now < 95


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
    deadline = time.monotonic() + 120
    while on_disk(report)["jobs"].get("forever", {}).get("status") != "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    assert len(json.loads(report.path.read_text())["results"]) == 4
    assert Report.load(report.path).running() == ("forever", "ours")
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
    assert {"host cost of a call", "training-T1024", "first call", "import"} <= set(found[:20])


TESTS = """
import time, pytest
def test_good(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x == 1
def test_slow(): time.sleep(SECONDS)
"""


@pytest.mark.parametrize(("seconds", "limit"), [(0, 100), (100, 8)])
def test_tests_are_counted_and_end_in_time(tmp_path, seconds, limit):
    (tmp_path / "test_it.py").write_text(TESTS.replace("SECONDS", str(seconds)))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tmp_path)]
    begin = time.monotonic()
    found = run_tests(command, tmp_path / "log", limit)
    assert time.monotonic() - begin < 60
    assert found["status"] == ("finished" if limit == 100 else "the time was up")
    assert (found["passed"], found["failed"]) == ((3, 1) if limit == 100 else (2, 1))
    assert [name.partition("::")[2] for name in found["failures"]] == ["test_bad[2]"]


def test_outcomes_of_parallel_tests_are_read(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "[gw0] [ 50%] PASSED tests/test_a.py::test_x[1 - y] \n"
        "[gw1] [100%] FAILED tests/test_a.py::test_z \n"
        "FAILED tests/test_a.py::test_z - assert 0\n"
    )
    found = run_tests([], log, 9, start=lambda command, log: Scripted([], 1))
    assert (found["passed"], found["failed"]) == (1, 1)
    assert found["failures"] == ["tests/test_a.py::test_z"]


def test_a_run_leaves_a_report_whatever_was_left_out(tmp_path):
    report = full_run.run_all(
        tmp_path / "out", tmp_path, "quick", 60, "command", skip=("tests", "suite", "tuning")
    )
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"results.json", "results.md"}
    assert "suite: not run" in full_run.summary(report.data)


def test_numeric_tests_are_found():
    from pathlib import Path

    command = full_run.test_command(Path(__file__).resolve().parents[1])
    files = {Path(word).name for word in command if word.endswith(".py")}
    expected = {"test_attention.py", "test_ops.py", "test_one_pass.py", "test_descriptors.py"}
    assert expected <= files


def test_shares_leave_most_of_the_time_to_the_measurements():
    for seconds in (300, 540, 3600):
        share = full_run.shares(seconds)
        assert share["tests"] + share["tuning"] <= 0.5 * seconds


@pytest.mark.parametrize("script", ["run_all.py", "tune.py"])
def test_scripts_say_that_there_is_no_gpu(tmp_path, script):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    from pathlib import Path

    path = Path(__file__).resolve().parents[1] / "bench" / script
    done = subprocess.run(
        [sys.executable, str(path), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not (tmp_path / "out").exists()
