"""A full run: its budget, what is on disk when, and implementations that end its processes."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest
from fake_child import Clock, Crash, FakeChild, Hang

from fastattn import dispatch
from fastattn.bench.results.report import empty, newest
from fastattn.bench.time import environment, jobs, measure, supervise
from fastattn.bench.time.failures import LOST, DeviceLost
from fastattn.bench.time.jobs import Job, gpu_jobs, record
from fastattn.bench.time.measure import serve
from fastattn.bench.time.samples import Bench, HostTimer
from fastattn.training.step_timing import StepTiming
from fastattn.tuned.environment import Environment

CHECKOUT = Path(__file__).resolve().parents[3]
BENCH = Bench(HostTimer())
HERE = Environment("imaginary", 4, "1.0", "2.0", "3.0", "0123456789abcdef")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(supervise, "time", clock := Clock())
    return clock


@pytest.fixture
def script(clock, monkeypatch):
    """bench/run_all.py, whose time is that of the clock."""
    spec = importlib.util.spec_from_file_location("run_all", CHECKOUT / "bench" / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "environment", lambda device: HERE)
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    return module


def run_of(name, act=lambda bench: None):
    """A job that tells that ours runs, and calls act(bench)."""

    def run(bench):
        bench.announce("ours", "runs")
        act(bench)
        return [record("family", name, "ours", figure=1)]

    return run


def raising(error):
    def act(bench=None):
        raise error

    return act


def names(data):
    return [r["case"]["name"] for r in data["results"]]


def measured(data, runs, work=None, save=lambda: None):
    """How it ended; `work` is the life of a process, if it is not `serve`."""
    work = work or (lambda tell, requests: serve(runs, BENCH, tell, requests))
    kinds = {name: (name,) for name in runs}
    return measure.measure(kinds, data, save, lambda names: FakeChild(work), lambda: 600)


def test_jobs_are_saved_one_by_one_and_a_second_run_goes_on(clock):
    saved, data = [], empty("command")
    failing = run_of("b", raising(RuntimeError("no\n luck")))
    runs = {"a": run_of("a"), "b": failing, "c": run_of("c")}
    assert measured(data, runs, save=lambda: saved.append(names(data))) == "finished"
    assert saved[:3] == [["a"], ["a"], ["a", "c"]]
    failed = {"status": "broken off", "reason": "RuntimeError: no luck"}
    assert data["jobs"]["b"] == failed
    assert measured(data, runs | {"d": run_of("d")}) == "finished"
    assert names(data) == ["a", "c", "d"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_leaves_a_broken_device_is_blamed_and_not_the_next(fails):
    def act(bench):
        bench.timer.synchronize = raising(RuntimeError("illegal access"))
        assert not fails, "no such shape"

    told, bench = [], Bench(HostTimer())
    requests = [{"job": name, "broken": {}} for name in "ab"]
    runs = {"a": run_of("a", act), "b": run_of("b")}
    assert serve(runs, bench, lambda **x: told.append(x), iter(requests)) == LOST
    assert [message["at"] for message in told] == ["the compiler", "ours", "ours"]


def test_culprits_are_named_and_everything_else_is_measured(script, tmp_path, capsys, monkeypatch):
    """One crashes, one hangs, one loses the device, each in its own job; none is the oracle."""
    commands = []

    def turns(bench):
        bench.announce("loses", "runs")
        if "loses" not in bench.broken:
            raise DeviceLost("loses", "illegal access")
        return [record("family", "turns", "others", figure=1)]

    def ending(name, end):
        def act(bench):
            if "ours" not in bench.broken:
                raise end

        return run_of(name, act)

    every = {
        "crash": Job(ending("crash", Crash), ("forward", "backward")),
        "turns": Job(turns, ("turns",)),
        "hang": Job(ending("hang", Hang), ("forward",)),
        "layer": Job(run_of("layer", raising(ValueError("no such layer"))), ("layer",)),
        "inputs": Job(raising(DeviceLost("the reference", "illegal access")), ("inputs",)),
        "after": Job(ending("after", Crash), ("forward", "other")),
    }
    runs = {name: job.run for name, job in every.items()}

    def start(command, environment, log):
        commands.append((command, log.name, environment["PYTHONSAFEPATH"]))
        return FakeChild(lambda tell, requests: serve(runs, BENCH, tell, requests))

    monkeypatch.setattr(script, "gpu_jobs", lambda which: every)
    monkeypatch.setattr(script, "ChildProcess", start)
    options = (tmp_path / "out", "quick", 1000, "x", ("tests",))
    data = script.run_all(*options)
    assert data["suite"] == "finished"
    assert len(commands) == 5  # one behind each end
    command, *log_and_safe = commands[0]
    assert jobs.__name__ in command[2] and (command[3], log_and_safe) == ("quick", ["log.txt", "1"])
    assert json.loads(command[4]) == list(every)
    assert json.loads(commands[-2][0][4]) == ["hang", "layer", "inputs", "after"]
    assert data["broken"] == {
        "backward": {"ours": "ended by SIGSEGV: its last line (in crash)"},
        "turns": {"loses": "broke the device: illegal access (in turns)"},
        "forward": {"ours": "made no progress for 25 s (in hang)"},
        "inputs": {},
    }
    statuses = {name: job["status"] for name, job in data["jobs"].items()}
    assert statuses.pop("layer") == statuses.pop("inputs") == "broken off"
    # Who hung in a forward runs in no job that has one.
    assert len(statuses) == 4 and set(statuses.values()) == {"done"}
    assert names(data) == ["crash", "turns", "hang", "after"]
    assert "ValueError: no such layer" in capsys.readouterr().err
    assert script.summary(data) == "suite: finished; 4 of 6 jobs done"
    # The same command has nothing left to do.
    assert script.run_all(*options) == data and len(commands) == 5


def test_a_run_verifies_and_tunes_for_what_is_left(script, clock, tmp_path, monkeypatch):
    """The findings are beside the report, and a file of them is taken in."""
    out, asked = tmp_path / "out", []
    verdicts = iter(("right", "crash"))

    def verify(scope, device, *, store, again, left):
        asked.append((scope.quick, again, left()))
        about = {"backend": "triton", "family": f"f{len(asked)}", "dtype": "bfloat16"}
        store.put("verification", {**about, "head_dim": 64, "verdict": next(verdicts)})
        yield
        clock.now += left()

    def tune(*, seconds, folder, show):
        assert folder == out / "findings"
        asked.append(seconds)
        show(None)
        assert '"crash"' in (out / "tuned.json").read_text()
        raise ChildProcessError("no such device")

    monkeypatch.setattr(script.verification, "run", verify)
    monkeypatch.setattr(script, "tune", tune)
    data = script.run_all(out, "quick", 100, "x", ("suite", "tuning"))
    assert asked == [(True, False, 80.0)] and clock.now == 80.0
    counts = {"status": "the time was up", "passed": 1, "failed": 0, "failures": []}
    assert data["tests"] == counts
    monkeypatch.setattr(script, "gpu_jobs", lambda which: {})
    data = script.run_all(out, "full", 100, "x")
    # A quarter for verification; the suite, which is empty, leaves the rest.
    assert asked[1:] == [(False, False, 25.0), 50.0]
    assert data["tests"]["failures"] == ["triton f2 bfloat16 64 crash"]
    files = {"results.json", "results.md", "findings", "tuned.json"}
    assert {path.name for path in out.iterdir()} == files
    assert script.summary(data).splitlines() == [
        "kernels: the time was up; 1 passed, 1 failed",
        "  triton f2 bfloat16 64 crash",
        "suite: finished; 0 of 0 jobs done",
    ]


def test_what_was_not_timed_since_kernels_changed_comes_first(script, tmp_path, monkeypatch):
    plans = []

    def data(name, **kernels):
        case = {"family": "decode", "name": name}
        timed = {"case": case, "implementation": "fastattn-triton", "status": "timed"}
        about = {"commit": "0123456789", "kernels": environment.fingerprints() | kernels}
        return {"started": "2026", "environment": about, "results": [timed]}

    def start(command, environment, log):
        plans.append(json.loads(command[4]))
        return FakeChild(lambda tell, requests: 1)

    monkeypatch.setattr(script, "ChildProcess", start)
    monkeypatch.setattr(script, "gpu_jobs", lambda which: dict.fromkeys("abc", Job(None, ("x",))))
    earlier = [data("a"), data("b", decode="of older sources"), data("c", backward="older ones")]
    earlier.append(data("a", decode="of older sources") | {"started": "2025"})
    script.run_all(tmp_path, "quick", 100, "x", ("tests",), earlier)
    assert plans == [["b", "a", "c"]]
    assert {x["commit"] for x in newest(earlier)} == {"0123456"}
    assert [x["stale"] for x in newest(earlier)] == [False, True, False]


def test_the_process_tells_of_the_gpu_and_measures_what_is_asked_for(clock, monkeypatch):
    """On a GPU that is made up."""
    collected = {"environment": {"gpu": None}, "ceilings": {"x": 1.0}}
    monkeypatch.setattr(jobs.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(jobs.tiles, "current_arch", lambda: "an imaginary one")
    monkeypatch.setattr(jobs, "gpu_bench", lambda which: BENCH)
    runs = {"environment": lambda bench: [collected], "a": run_of("a"), "b": run_of("b")}
    every = {name: Job(run, (name,)) for name, run in runs.items()}
    monkeypatch.setattr(jobs, "gpu_jobs", lambda which: every)
    del runs["a"]
    data = empty("command")
    assert measured(data, runs, lambda *talk: jobs.run("full", ["b"], *talk)) == "finished"
    assert names(data) == ["b"] and data.items() >= collected.items()


@pytest.mark.parametrize("which", ["quick", "full"])
def test_jobs_begin_with_the_aims(which):
    """Plain calls, decoding, options, and then host costs and training."""
    names = list(gpu_jobs(which))
    assert names[:2] == ["environment", "forward-B4-H16-T4096-D128-causal"]
    others = ["host cost of a call", "training-T1024", "first call", "import"]
    kinds = ("forward-B1-H64:8", "backward-B1-H64:8", "decode-fwd-B32", "decode-fwd-B1", "masks")
    places = [next(n for n, x in enumerate(names) if x.startswith(kind)) for kind in kinds]
    places += [names.index(name) for name in others]
    assert places == sorted(places) and places[-1] < 36


def test_training_tells_who_trains_and_leaves_out_who_is_broken(monkeypatch):
    def steps(config, *, backend, issued, **_):
        issued()
        if backend == "torch":
            raise ValueError("no such backend")
        return StepTiming(backend, 1.0, 2.0, 3.0, None, None)

    monkeypatch.setattr(jobs, "time_training_steps", steps)
    announced = []
    broken = {"fastattn-triton": "hung"}
    bench = Bench(HostTimer(), broken=broken, announce=lambda *told: announced.append(told))
    records = gpu_jobs("quick")["training-T1024"].run(bench)
    assert announced == [*product(("fastattn", "fastattn-torch"), ("prepares", "runs"))]
    assert [(r["implementation"], r["status"], r.get("reason")) for r in records] == [
        ("fastattn", "timed", None),
        ("fastattn-triton", "failed", "hung"),
        ("fastattn-torch", "failed", "ValueError: no such backend"),
    ]
