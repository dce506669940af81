"""A full run: its budget, what is on disk when, and implementations that end its processes."""

import json
from pathlib import Path

import pytest
from fake_child import Crash, FakeChild, Hang

from fastattn.bench.results.report import Report, newest
from fastattn.bench.time import environment, full_run, jobs, numeric_tests, suite
from fastattn.bench.time.failures import LOST, DeviceLost
from fastattn.bench.time.jobs import Job, gpu_jobs, record
from fastattn.bench.time.measure import measure, serve
from fastattn.bench.time.samples import Bench, HostTimer
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


def job(name, run=None, kinds=()):
    """A job that tells that ours runs, and calls run(broken)."""

    def measure(bench, broken, announce):
        announce("ours", "runs")
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
    return Report.at(tmp_path / "results.json", "command")


def on_disk(report):
    return Report.load(report.path).data


def names(report):
    return [r["case"]["name"] for r in on_disk(report)["results"]]


def measured(report, jobs, bench=BENCH, works=()):
    """How it ended, and the processes; what they do, if not as `suite` does."""
    clock, made, works = Clock(), [], iter(works)

    def start(names):
        work = next(works, lambda tell, requests: serve(jobs, bench, tell, requests))
        made.append(FakeChild(work))
        return made[-1]

    how = {"sleep": clock.sleep, "clock": clock}
    ended = measure(jobs, report.data, report.save, start, lambda: 600 - clock(), **how)
    return ended, made


def test_a_job_that_fails_is_recorded_and_a_second_run_goes_on(report):
    failing = [job("a"), job("b", raising(RuntimeError("no\n luck"))), job("c")]
    assert measured(report, failing)[0] == "finished"
    assert on_disk(report)["jobs"]["b"] == {
        "status": "broken off",
        "reason": "RuntimeError: no luck",
    }
    again = Report.load(report.path)
    assert measured(again, [*failing, job("d")])[0] == "finished"
    assert names(report) == ["a", "c", "d"]


def test_every_job_is_on_disk_before_the_next_message(report, monkeypatch):
    saved, save = [], report.save
    monkeypatch.setattr(report, "save", lambda: (save(), saved.append(names(report))))
    measured(report, [job("a"), job("b")])
    assert saved[:2] == [["a"], ["a", "b"]]


def test_a_job_with_nobody_to_leave_out_is_given_up(report):
    lost = raising(DeviceLost("the reference", "illegal access"))
    ended, processes = measured(report, [job("a", lost), job("b")])
    assert (ended, [p.code for p in processes]) == ("finished", [LOST, None])
    assert on_disk(report)["broken"] == {"a": {}} and names(report) == ["b"]


@pytest.mark.parametrize("error", [None, ValueError("no such shape")])
def test_a_job_that_leaves_a_broken_device_is_blamed_and_not_the_next(report, error):
    timer = HostTimer()

    def lost():
        raise RuntimeError("illegal access")

    def run(broken):
        timer.synchronize = lost
        if error is not None:
            raise error

    told = []
    requests = [{"job": name, "broken": {}, "alone": False} for name in "ab"]
    code = serve(
        [job("a", run), job("b")], Bench(timer), lambda **x: told.append(x), iter(requests)
    )
    assert (code, told[-1]["at"]) == (LOST, "ours")
    assert [message["at"] for message in told] == ["the compiler", "ours", "ours"]


def full(out, which, seconds, start, clock, **more):
    return full_run.run_all(
        out, CHECKOUT, which, seconds, "x", start=start, sleep=clock.sleep, clock=clock, **more
    )


def test_culprits_are_named_and_everything_else_is_measured(tmp_path, capsys, monkeypatch):
    """One crashes, one hangs, one loses the device while all take turns: each in its own job."""
    clock, commands = Clock(), []

    def turns(bench, broken, announce):
        announce("the timing", "runs")
        if not bench.alone:
            raise DeviceLost("the timing", "illegal access")
        announce("loses", "runs")
        if "loses" not in broken:
            raise DeviceLost("loses", "illegal access")
        return [record("family", "turns", "others", figure=1)]

    def ending(end):
        def run(broken):
            if "ours" not in broken:
                raise end

        return run

    every = [
        job("crash", ending(Crash), ("forward", "backward")),
        Job("turns", turns),
        job("hang", ending(Hang), ("forward",)),
        job("layer", raising(ValueError("no such layer"))),
        job("after", ending(Crash), ("forward", "other")),
    ]

    def start(command, environment, log):
        commands.append((command, log.name, environment["PYTHONSAFEPATH"]))
        return FakeChild(lambda tell, requests: serve(every, BENCH, tell, requests))

    monkeypatch.setattr(full_run, "gpu_jobs", lambda which: every)
    report = full(tmp_path / "out", "quick", 1000, start, clock, skip=("tests",))
    assert report.data["suite"] == "finished"
    # One behind each end: who loses the device in a turn is found in a second run of its job.
    assert len(commands) == 5
    command, log, safe = commands[0]
    assert suite.__name__ in command[2] and command[3] == "quick"
    assert json.loads(command[4]) == [job.name for job in every]
    assert json.loads(commands[-1][0][4]) == ["hang", "layer", "after"]
    assert (log, safe) == ("log.txt", "1")
    assert report.data["broken"] == {
        "backward": {"ours": "ended by SIGSEGV: its last line (in crash)"},
        "turns": {"loses": "broke the device: illegal access (in turns)"},
        "forward": {"ours": "made no progress for 25 s (in hang)"},
    }
    statuses = {name: job["status"] for name, job in report.data["jobs"].items()}
    assert statuses.pop("layer") == "broken off"
    # Who hung in a forward runs in no job that has one.
    assert len(statuses) == 4 and set(statuses.values()) == {"done"}
    assert names(report) == ["crash", "turns", "hang", "after"]
    assert "ValueError: no such layer" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["tests", "tuning"])
def test_a_run_ends_what_hangs_and_tunes_for_what_is_left(tmp_path, part):
    """The findings are beside the report, and a file of them is taken in."""
    out, clock, started = tmp_path / "out", Clock(), []

    def start(command, environment, log, listen):
        process = FakeChild()
        started.append((command, environment, process))
        return process

    report = full(out, "full", 100, start, clock, skip=set(full_run.PARTS) - {part})
    ((command, variables, process),) = started
    assert process.killed and clock.now == pytest.approx(80, abs=1)
    if part == "tests":
        assert command == numeric_tests.command(CHECKOUT)
        assert variables[numeric_tests.OUTCOMES] == str(out / "tests.jsonl")
        assert report.data["tests"]["status"] == "the time was up"
        return
    assert command[1:4] == ["-m", "fastattn", "tune"]
    assert command[4:] == ["--export", str(out / "tuned.json"), "--seconds", "75"]
    assert variables["FASTATTN_CACHE_DIR"] == str(out / "findings")
    assert {p.name for p in out.iterdir()} == {"results.json", "results.md"}
    assert full_run.summary(report.data) == "suite: not run; 0 of 0 jobs done"


def test_what_was_not_timed_since_kernels_changed_comes_first(tmp_path, monkeypatch):
    clock, plans = Clock(), []

    def data(name, **kernels):
        case = {"family": "decode", "name": name}
        timed = {"case": case, "implementation": "fastattn-triton", "status": "timed"}
        about = {"commit": "0123456789", "kernels": environment.fingerprints() | kernels}
        return {"started": "2026", "environment": about, "results": [timed]}

    def start(command, environment, log):
        plans.append(json.loads(command[4]))
        return FakeChild(lambda tell, requests: 1)

    monkeypatch.setattr(full_run, "gpu_jobs", lambda which: [job(name) for name in "abc"])
    earlier = [data("a"), data("b", decode="of older sources"), data("c", backward="older ones")]
    full(tmp_path, "quick", 100, start, clock, skip=("tests",), earlier=earlier)
    assert plans == [["b", "a", "c"]]
    assert [(x["commit"], x["stale"]) for x in newest(earlier)] == [
        ("0123456", False),
        ("0123456", True),
        ("0123456", False),
    ]


def test_the_suite_tells_of_the_gpu_and_measures_what_is_asked_for(report, monkeypatch):
    """On a GPU that is made up."""
    collected = {"environment": {"gpu": None}, "ceilings": {"x": 1.0}}
    monkeypatch.setattr(suite.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(suite.tiles, "current_arch", lambda: "an imaginary one")
    monkeypatch.setattr(suite, "gpu_bench", lambda which: BENCH)
    about = Job("environment", lambda *_: [collected])
    monkeypatch.setattr(suite, "gpu_jobs", lambda which: [about, job("a"), job("b")])
    works = [lambda tell, requests: suite.run("full", ["b"], tell, requests)]
    assert measured(report, [about, job("b")], works=works)[0] == "finished"
    assert on_disk(report).items() >= collected.items()
    assert names(report) == ["b"]


@pytest.mark.parametrize("which", ["quick", "full"])
def test_jobs_begin_with_the_aims(which):
    """Plain calls, decoding, options, and then host costs and training."""
    names = [job.name for job in gpu_jobs(which)]
    assert len(names) == len(set(names))
    assert names[:2] == ["environment", "forward-B4-H16-T4096-D128-causal"]
    others = ["host cost of a call", "training-T1024", "first call", "import"]
    kinds = ("forward-B1-H64:8", "backward-B1-H64:8", "decode-fwd-B32", "decode-fwd-B1", "masks")
    places = [next(n for n, x in enumerate(names) if x.startswith(kind)) for kind in kinds]
    places += [names.index(name) for name in others]
    assert places == sorted(places) and places[-1] < 36


def test_training_tells_who_trains_and_leaves_out_who_is_broken(monkeypatch):
    def steps(config, *, backend, issued, **_):
        issued()
        return StepTiming(backend, 1.0, 2.0, 3.0, None, None)

    monkeypatch.setattr(jobs, "time_training_steps", steps)
    monkeypatch.setattr(jobs, "release", lambda device: None)
    training = next(job for job in gpu_jobs("quick") if job.name == "training-T1024")
    announced = []
    records = training.run(BENCH, {"fastattn-triton": "hung"}, lambda *told: announced.append(told))
    assert announced == [
        (name, doing) for name in ("fastattn", "fastattn-torch") for doing in ("prepares", "runs")
    ]
    assert {r["implementation"]: r["status"] for r in records} == {
        "fastattn": "timed",
        "fastattn-triton": "cannot serve",
        "fastattn-torch": "timed",
    }
