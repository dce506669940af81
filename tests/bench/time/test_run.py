"""A full run: its budget, what is on disk when, and implementations that crash, hang or break it.

Processes are fakes that live in this one: the first poll runs them as far as they come.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastattn import reference
from fastattn.bench.cases.case import Case
from fastattn.bench.cases.implementation import Implementation
from fastattn.bench.results.report import Report
from fastattn.bench.time import full_run, jobs, numeric_tests, suite
from fastattn.bench.time.attention import run_case
from fastattn.bench.time.failures import LOST, DeviceLost
from fastattn.bench.time.jobs import Job, gpu_jobs, record
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.bench.time.suite import FINISHED, run_jobs
from fastattn.bench.time.supervise import Budget, ProcessGroup, supervise
from fastattn.training.step_timing import StepTiming

CHECKOUT = Path(__file__).resolve().parents[3]
BENCH = Bench(HostTimer())


class Clock:
    """Time that passes only when somebody says so."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Crash(BaseException):
    """The end of a process, by SIGSEGV."""


class Hang(BaseException):
    """A call that never returns."""


class Process:
    """A fake: `life` is all that it does, and returns its exit code, or raises Crash or Hang."""

    def __init__(self, life):
        self._life, self.code, self.heard = life, None, []

    def poll(self):
        if self._life is not None:
            life, self._life = self._life, None
            try:
                self.code = life()
            except Crash:
                self.code = -11
            except Hang:
                pass
        return self.code

    def interrupt(self):
        self.heard.append("interrupt")

    def kill(self):
        self.heard.append("kill")
        self.code = -9 if self.code is None else self.code


def job(name, run=None, *, clock=None, kinds=()):
    """A job that tells that ours runs, takes 6 seconds of a clock, and calls run(broken)."""

    def measure(bench, broken, announce):
        announce("ours", "runs")
        if clock is not None:
            clock.sleep(6)
        if run is not None:
            run(broken)
        return [record("family", name, "ours", figure=1)]

    return Job(name, measure, kinds)


def raising(error):
    def run(broken):
        raise error

    return run


def breaks(broken):
    if "ours" not in broken:
        raise DeviceLost("ours", "illegal access")


@pytest.fixture
def report(tmp_path):
    return Report.at(tmp_path / "results.json", "command")


def on_disk(report):
    return Report.load(report.path).data


def names(report):
    return [r["case"]["name"] for r in on_disk(report)["results"]]


def go_on(jobs, report):
    """Another process with the report that is on disk."""
    return run_jobs(jobs, Report.load(report.path), BENCH, lambda: 1)


def test_a_job_that_fails_is_recorded_and_a_second_process_goes_on(report):
    failing = [job("a"), job("b", raising(RuntimeError("no\n luck"))), job("c")]
    assert run_jobs(failing, report, BENCH, lambda: 1) == FINISHED
    assert on_disk(report)["jobs"]["b"] == {
        **on_disk(report)["jobs"]["b"],
        "status": "broken off",
        "reason": "RuntimeError: no luck",
    }
    assert go_on([*failing, job("d")], report) == FINISHED
    assert names(report) == ["a", "c", "d"]


def test_budget_is_kept_and_what_was_not_reached_is_named(report):
    clock = Clock()
    timed = [job(name, clock=clock) for name in "abcd"]
    run_jobs(timed, report, BENCH, Budget(10, clock).left, clock)
    assert names(report) == ["a", "b"]
    assert on_disk(report)["jobs"]["a"] == {"status": "done", "seconds": 6}
    assert on_disk(report)["jobs"]["d"] == {"status": "not reached", "reason": "the time was up"}


def test_every_job_is_on_disk_before_the_next_begins(report):
    seen = []
    look = job("b", lambda broken: seen.append((names(report), report.running())))
    run_jobs([job("a"), look], report, BENCH, lambda: 1)
    ((done, (running, state)),) = seen
    assert (done, running, state["at"]) == (["a"], "b", "ours")


@pytest.mark.parametrize(
    ("who", "broken", "left"),
    [
        ("ours", {"a": {"ours": "broke the device: illegal access (in a)"}}, ["a", "b"]),
        ("the reference", {"a": {}}, ["b"]),  # there is none to leave out
    ],
)
def test_a_lost_device_costs_one_implementation(report, who, broken, left):
    def run(known):
        if who not in known:
            raise DeviceLost(who, "illegal access")

    both = [job("a", run), job("b")]
    assert run_jobs(both, report, BENCH, lambda: 1) == LOST
    assert on_disk(report)["broken"] == broken
    assert go_on(both, report) == FINISHED
    assert names(report) == left


def test_a_device_lost_in_a_turn_has_the_job_run_one_by_one(report):
    seen = []

    def measure(bench, broken, announce):
        seen.append((bench.alone, sorted(broken)))
        if not broken:
            raise DeviceLost("theirs" if bench.alone else "the timing", "illegal access")
        return []

    assert [go_on([Job("a", measure)], report) for _ in range(3)] == [LOST, LOST, FINISHED]
    assert seen == [(False, []), (True, []), (False, ["theirs"])]


@pytest.mark.parametrize("error", [None, ValueError("no such shape")])
def test_a_job_that_leaves_a_broken_device_is_blamed_and_not_the_next(report, error):
    timer = HostTimer()

    def lost():
        raise RuntimeError("illegal access")

    def run(broken):
        timer.synchronize = lost
        if error is not None:
            raise error

    assert run_jobs([job("a", run), job("b")], report, Bench(timer), lambda: 1) == LOST
    assert "ours" in on_disk(report)["broken"]["a"]
    assert "b" not in on_disk(report)["jobs"]


def test_who_ended_the_process_sits_out_what_runs_the_same(report):
    seen = {}

    def look(name, *kinds):
        return job(name, lambda broken: seen.setdefault(name, sorted(broken)), kinds=kinds)

    plan = [
        look("forward", "forward"),
        job("breaks", breaks, kinds=("forward", "backward")),
        look("padded", "forward"),
        look("longer", "forward", "backward"),
        look("decode", "decode"),
    ]
    assert [go_on(plan, report) for _ in range(2)] == [LOST, FINISHED]
    assert seen == {"forward": [], "padded": [], "longer": ["ours"], "decode": []}


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


def supervised(report, *lives, seconds=600, clock=None):
    """How it ended, and the processes that were started, one for each life."""
    clock, made = clock or Clock(), []

    def start(left):
        made.append(Process(lives[len(made)]))
        return made[-1]

    left = Budget(seconds, clock).left
    return supervise(start, report.path, left, sleep=clock.sleep, clock=clock), made


@pytest.mark.parametrize(("doing", "limit"), [("prepares", 90), ("runs", 25)])
def test_a_hang_is_ended_and_blamed(report, doing, limit):
    clock = Clock()

    def hang():
        state = {"at": "flex", "doing": doing, "blamed": "forward", "alone": False}
        report.data["jobs"]["a"] = {"status": "running", **state}
        report.save()
        raise Hang

    outcome, (first, _) = supervised(report, hang, lambda: 0, clock=clock)
    assert (outcome, first.heard[0]) == ("finished", "kill")
    why = f"made no progress for {limit} s (in a)"
    assert on_disk(report)["broken"] == {"forward": {"flex": why}}
    assert limit < clock.now < limit + 5


def hanging():
    raise Hang


def test_the_time_is_kept_whatever_the_process_does(report):
    clock = Clock()
    report.data["jobs"]["a"] = {"status": "running", "at": "ours"}
    report.save()
    outcome, (process,) = supervised(report, hanging, seconds=50, clock=clock)
    assert (outcome, process.heard[0]) == ("the time was up", "kill")
    assert clock.now < 51
    assert on_disk(report)["jobs"]["a"] == {"status": "not reached", "reason": "the time was up"}
    assert on_disk(report)["broken"] == {}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (1, "the measuring process ended the process with exit code 1, with nothing running"),
        (suite.NO_GPU, "no GPU"),
    ],
)
def test_a_process_that_dies_at_once_is_not_started_for_ever(report, code, outcome):
    ended, processes = supervised(report, lambda: code)
    assert (ended, len(processes)) == (outcome, 1)


FORWARD = Case("forward", "forward", 1, 2, 1, 8, 8, 8, dtype="float32", device="cpu")
CASES = [
    FORWARD,
    replace(FORWARD, causal=True),
    replace(FORWARD, family="backward", direction="backward"),
    replace(FORWARD, window=(2, 0)),
    replace(FORWARD, family="decode", T_q=1, causal=True),
]


class Worker:
    """The measuring process, with a device and implementations that are made up."""

    def __init__(self, path):
        self.path, self.lost, self.calls = path, False, {}

    def __call__(self):
        timer = HostTimer()
        timer.synchronize = self.synchronize
        bench = Bench(timer, Effort(warm_up=1, target_ms=0, least=4, most=4, pause=0))
        plan = [self.job(case) for case in CASES]
        plan += [job("layer", raising(ValueError("no such layer"))), job("import")]
        return run_jobs(plan, Report.load(self.path), bench, lambda: 1)

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def job(self, case):
        misbehaving = {"crashes": self.crash, "hangs": self.hang, "loses": self.lose}
        every = [
            self.implementation(name, misbehaving.get(name), 1.01 if name == "wrong" else 1.0)
            for name in ("right", "wrong", "crashes", "hangs", "loses", "also right")
        ]

        def run(bench, broken, announce):
            return run_case(case, every, bench, broken=broken, announce=announce)

        return Job(case.name, run, jobs.kinds(case))

    def implementation(self, name, misbehave, factor):
        def prepare(case, inputs):
            def call(q, k, v):
                key = (case.name, name)
                self.calls[key] = self.calls.get(key, 0) + 1
                if misbehave is not None:
                    misbehave(case, self.calls[key])
                o = reference.attention(q, k, v, causal=case.causal, window=case.window)
                return factor * o

            return call

        return Implementation(name, lambda case: None, prepare)

    def crash(self, case, calls):
        if case.direction == "backward":
            raise Crash

    def hang(self, case, calls):
        # Late: on the device, after all that is compiled.
        if case.causal and case.family == "forward" and calls == 3:
            raise Hang

    def lose(self, case, calls):
        # Later still: nobody waits for the call alone.
        self.lost = self.lost or (case.window is not None and calls > 4)


def test_culprits_are_named_and_everything_else_is_measured(tmp_path, capsys):
    """One crashes, one hangs, one loses the device behind its calls, one is wrong."""
    out, clock = tmp_path / "out", Clock()
    commands = []

    def start(command, log, environment):
        commands.append((command, log.name, environment["PYTHONSAFEPATH"]))
        return Process(Worker(out / "results.json"))

    report = full_run.run_all(
        out,
        CHECKOUT,
        "quick",
        1000,
        "x",
        skip=("tests",),
        start=start,
        sleep=clock.sleep,
        clock=clock,
    )
    assert report.data["suite"] == "finished"
    # Two for who crashes and who hangs; who loses the device is found in a second run of its job.
    assert len(commands) == 5
    command, log, safe = commands[0]
    assert command[1:3] == ["-m", suite.__name__] and "--set quick" in " ".join(command)
    assert (log, safe) == ("log.txt", "1")
    broken = report.data["broken"]
    assert "exit code -11" in broken["backward"]["crashes"]
    assert "no progress for 25 s (in forward-B1-H2:1-T8-D8-causal" in broken["forward"]["hangs"]
    assert "illegal memory access" in broken["forward"]["loses"]
    assert {kind: set(found) for kind, found in broken.items()} == {
        "backward": {"crashes"},
        "forward": {"hangs", "loses"},
    }
    statuses = {name: job["status"] for name, job in report.data["jobs"].items()}
    assert statuses.pop("layer") == "broken off"
    assert len(statuses) == 6 and set(statuses.values()) == {"done"}
    results = report.data["results"]
    failed = {
        (r["case"]["name"], r["implementation"], r["status"])
        for r in results
        if r["implementation"] != "wrong" and r["status"] != "timed"
    }
    _, causal, backward, window, _ = (case.name for case in CASES)
    assert failed == {
        (causal, "hangs", "failed"),
        *((backward, name, "failed") for name in ("crashes", "hangs")),
        *((window, name, "failed") for name in ("hangs", "loses")),
    }
    assert [r["status"] for r in results if r["implementation"] == "wrong"] == ["wrong"] * 5
    assert len(results) == 5 * 6 + 1
    said = capsys.readouterr().err
    assert "ValueError: no such layer" in said and "exceeds the budget" in said


def test_a_run_tunes_for_what_is_left_and_ends_what_hangs(tmp_path):
    """The findings are beside the report, and a file of them is taken in."""
    out, clock, started = tmp_path / "out", Clock(), []

    def start(command, log, environment):
        process = Process(hanging)
        started.append((command, environment["FASTATTN_CACHE_DIR"], process))
        return process

    skip = ("tests", "suite")
    report = full_run.run_all(
        out, CHECKOUT, "full", 100, "x", skip=skip, start=start, sleep=clock.sleep, clock=clock
    )
    ((command, folder, process),) = started
    assert command[1:4] == ["-m", "fastattn", "tune"]
    assert command[4:] == ["--export", str(out / "tuned.json"), "--seconds", "75"]
    assert folder == str(out / "findings")
    assert process.heard == ["kill"] and clock.now == pytest.approx(80, abs=1)
    assert {p.name for p in out.iterdir()} == {"results.json", "results.md"}
    assert full_run.summary(report.data) == "suite: not run; 0 of 0 jobs done"


def test_shares_leave_most_of_the_time_to_the_measurements():
    for seconds in (300, 540, 3600):
        assert sum(full_run.shares(seconds).values()) <= 0.5 * seconds


def test_a_group_of_processes_is_killed_together(tmp_path):
    log = tmp_path / "log"
    process = ProcessGroup(["sh", "-c", "sleep 1000 & echo $!; wait"], log)
    while not (child := log.read_text()).endswith("\n"):
        assert process.poll() is None
    process.kill()
    assert process.poll() == -9
    # A child that is dead, or that nobody has waited for yet.
    state = subprocess.run(["ps", "-o", "stat=", "-p", child.strip()], capture_output=True)
    assert state.stdout.strip()[:1] in (b"", b"Z")


def test_suite_without_a_gpu_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite.torch.cuda, "is_available", lambda: False)
    assert suite.main(["--report", str(tmp_path / "r.json")]) == suite.NO_GPU
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_the_suite_measures_what_the_report_lacks(report, monkeypatch):
    """On a GPU that is made up: its environment and ceilings once, jobs until the time is up."""
    asked = []
    monkeypatch.setattr(suite.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite.tiles, "current_arch", lambda: "an imaginary one")
    monkeypatch.setattr(suite, "gpu_bench", lambda which: BENCH)
    monkeypatch.setattr(suite, "gpu_jobs", lambda which: [job(which), job("b")])
    monkeypatch.setattr(suite, "ceilings", lambda bench: asked.append("ceilings") or {"x": 1.0})
    told = {"gpu": None}
    monkeypatch.setattr(suite.environment, "collect", lambda: asked.append("environment") or told)
    for _ in range(2):
        assert suite.main(["--report", str(report.path), "--set", "minute"]) == FINISHED
    assert asked == ["environment", "ceilings"]
    assert names(report) == ["minute", "b"]


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


TESTS = """
import pytest, torch
def test_good(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x == 1
@pytest.mark.skip
def test_absent(): pass
def test_last():
    LAST
def test_innocent(): pass
"""


class Pytest(Process):
    """Pytest in this process, whose exit ends its session."""

    def __init__(self, command, monkeypatch):
        super().__init__(lambda: int(pytest.main([*command, "-p", "no:cacheprovider", "-q"])))
        # Both would be for good.
        monkeypatch.setattr(numeric_tests.signal, "signal", lambda *handler: None)
        monkeypatch.setattr(numeric_tests.os, "_exit", lambda code: pytest.exit("lost", code))


def test_a_second_call_goes_on_with_the_tests_that_have_no_outcome(tmp_path, monkeypatch, capsys):
    """The first is interrupted in a test; then a test loses the device, which ends its process."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    file, found = tmp_path / "test_it.py", tmp_path / "tests.jsonl"

    def run(last):
        # A module of another name, or the first one would be run again.
        here = file.rename(tmp_path / "test_it.py")
        here.write_text(TESTS.replace("LAST", last))
        sys.modules.pop("test_it", None)
        return numeric_tests.run(
            ["-c", str(tmp_path / "pytest.ini"), "--import-mode=importlib", str(here)],
            found,
            100,
            start=lambda command: Pytest(command, monkeypatch),
            clock=Clock(),
        )

    file.touch()
    said = run("raise KeyboardInterrupt")
    assert said["status"] == "pytest ended with code 2"
    assert (said["passed"], said["failed"], said["skipped"]) == (2, 1, 1)
    assert "assert 2 == 1" in capsys.readouterr().out

    def lost():
        raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    said = run("raise RuntimeError('illegal access')")
    assert said["status"] == f"pytest ended with code {LOST}"
    assert [name.partition("::")[2] for name in said["failures"]] == ["test_bad[2]", "test_last"]
    said = run("pass")
    assert (said["status"], said["passed"], said["failed"]) == ("finished", 3, 2)
    out = capsys.readouterr().out
    assert "test_good" not in out and "1 passed" in out
    assert run("pass")["status"] == "finished"  # no test is left


def test_tests_that_do_not_heed_an_interrupt_are_killed(tmp_path):
    clock, process = Clock(), Process(hanging)
    found = numeric_tests.run(
        [], tmp_path / "tests.jsonl", 100, start=lambda c: process, sleep=clock.sleep, clock=clock
    )
    assert process.heard[:2] == ["interrupt", "kill"]
    assert found["status"] == "the time was up" and found["seconds"] == pytest.approx(100, abs=0.3)


def test_a_line_that_a_kill_has_cut_is_no_outcome(tmp_path):
    path = tmp_path / "tests.jsonl"
    lines = [{"test": "a", "outcome": "failed"}, {"test": "a", "outcome": "passed"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "b", "outc')
    assert numeric_tests.read(path) == {"a": "failed"}


def test_the_tests_that_are_run_exist_and_compile_for_no_other_gpu():
    files = [Path(word) for word in numeric_tests.command(CHECKOUT) if word.endswith(".py")]
    assert files == [CHECKOUT / "tests" / name for name in numeric_tests.FILES]
    for file in files:
        assert not re.search(r"compile_pool\b[,:)]", file.read_text(encoding="utf-8"))
