"""A full run: its budget, what is on disk when, and implementations that end its processes."""

import importlib.util
import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_child import Clock, Crash, FakeChild, Hang

from fastattn import dispatch
from fastattn.bench.cases.case import masked, sweep
from fastattn.bench.results.report import empty
from fastattn.bench.time import jobs, measure
from fastattn.bench.time.jobs import Job, gpu_jobs, record
from fastattn.bench.time.measure import serve
from fastattn.bench.time.samples import Bench, HostTimer
from fastattn.testing import supervision
from fastattn.training.step_timing import StepTiming
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

CHECKOUT = Path(__file__).resolve().parents[3]
BENCH = Bench(HostTimer())
HERE = Environment("imaginary", 4, "1.0", "2.0", "3.0", "0123456789abcdef")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(supervision, "time", clock := Clock())
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
    with pytest.raises(RuntimeError, match="illegal access"):
        serve(runs, bench, lambda **x: told.append(x), iter(requests))
    assert [message["at"] for message in told] == ["the compiler", "ours"]


def test_culprits_are_named_and_everything_else_is_measured(script, tmp_path, capsys, monkeypatch):
    """One crashes, one hangs, one loses the device, each in its own job; none is the oracle."""
    commands = []

    def lost(bench):
        bench.timer = SimpleNamespace(synchronize=raising(RuntimeError("illegal access")))
        bench.timer.synchronize()

    def inputs(bench):
        bench.announce("the reference", "prepares")
        lost(bench)

    def turns(bench):
        bench.announce("loses", "runs")
        if "loses" not in bench.broken:
            lost(bench)
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
        "inputs": Job(inputs, ("inputs",)),
        "after": Job(ending("after", Crash), ("forward", "other")),
    }
    runs = {name: job.run for name, job in every.items()}

    def start(command, environment, log):
        commands.append((command, log.name, environment["FASTATTN_CACHE_DIR"]))
        return FakeChild(lambda tell, requests: serve(runs, BENCH, tell, requests))

    monkeypatch.setattr(script, "gpu_jobs", lambda session: every)
    monkeypatch.setattr(script, "ChildProcess", start)
    options = (tmp_path / "out", "short", 1000, "x")
    data = script.run_all(*options)
    assert data["suite"] == "finished"
    assert len(commands) == 5  # one behind each end
    command, *log_and_folder = commands[0]
    findings = str(tmp_path / "out" / "findings")
    assert jobs.__name__ in command[2] and log_and_folder == ["log.txt", findings]
    settings = [json.loads(command[3]) for command, *_ in commands]
    assert settings[0]["names"] == list(every) and settings[0]["folder"] == findings
    assert settings[-2]["names"] == ["hang", "layer", "inputs", "after"]
    assert data["broken"] == {
        "backward": {"ours": "ended by SIGSEGV: its last line (in crash)"},
        "turns": {"loses": "ended with exit code 1: its last line (in turns)"},
        "forward": {"ours": "made no progress for 8 s (in hang)"},
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


def test_a_hang_costs_one_class_of_kernels(script, tmp_path, monkeypatch, capsys):
    """Hopper's forward of head dim 256 hangs, whoever launches it; the file is whole all along."""
    file, seen, names = tmp_path / "results.json", [], ("fastattn", "fastattn-hopper", "sdpa-cudnn")

    def measured(case, bench):
        seen.append(json.loads(file.read_text())["results"])
        for name in names:
            who = "fastattn-hopper" if name == "fastattn" else name
            if (why := bench.broken.get(who)) is None:
                bench.announce(who, "runs")
                if case.D == 256 and "hopper" in who and not case.option:
                    raise Hang
            failed = {} if why is None else {"status": "failed", "reason": why}
            yield record("f", case.name, name) | failed

    ways = product((256, 128), (True, False), ("forward", "backward"))
    cases = [sweep(way, D, 4096, causal) for D, causal, way in ways]
    cases += [masked("forward", D, "sinks") for D in (256, 128)]
    runs = {case.name: lambda bench, case=case: [*measured(case, bench)] for case in cases}
    every = {case.name: Job(runs[case.name], case.kernels) for case in cases}
    life = partial(serve, runs, BENCH)
    monkeypatch.setattr(script, "gpu_jobs", lambda session: every)
    monkeypatch.setattr(script, "ChildProcess", lambda *_: FakeChild(life))
    data = script.run_all(tmp_path, "short", 510, "x")
    assert data["suite"] == "finished" and {*data["broken"]} == {"forward D 256 bfloat16"}
    lost = [r["case"]["name"] for r in data["results"] if r["status"] == "failed"]
    plain_256 = [case.name for case in cases if case.D == 256 and not case.option]
    assert sorted(lost) == sorted(2 * plain_256)
    assert len(data["results"]) == 3 * len(cases)
    # One process was lost, for eight seconds; each row is in the file and on the screen at its end.
    assert 8 <= script.time.now < 16
    assert [len(x) for x in seen] == [0, *range(0, 3 * len(cases), 3)]
    lines = (line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines())
    shown = [line.split("  ")[0] for line in lines if line]
    assert shown[::3] == [case.name for case in cases]


def test_verification_and_tuning_take_their_shares(tmp_path, monkeypatch):
    """Each verdict is reported at once; what was tuned is not measured by later jobs."""
    store, told, adopted = Store(HERE, tmp_path), [], []
    clock = Clock()

    def verify(scope, device, *, store, again, left):
        assert (scope.quick, again, left()) == (True, False, 100.0)
        for family, verdict in (("f1", "right"), ("f2", "hang")):
            about = {"backend": "hopper", "family": family, "dtype": "bfloat16", "head_dim": 64}
            store.put("verification", {**about, "verdict": verdict})
            yield f"{family} is {verdict}"
        clock.now += 100

    def tune(*, seconds, head_dims, only, folder, show):
        assert (seconds, head_dims, folder) == (120.0, (64, 128), tmp_path)
        assert only == jobs.OPEN
        store.put("tiles", {"kernel": "k", "calls": "", "element_size": 2, "BLOCK_D": 64})
        show(SimpleNamespace(step="a tile", text="stays", done=True))

    monkeypatch.setattr(jobs.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(jobs, "environment_of", lambda device: HERE)
    monkeypatch.setattr(
        jobs.verification, "scope_of", lambda device, quick: SimpleNamespace(quick=quick)
    )
    monkeypatch.setattr(jobs.verification, "run", verify)
    monkeypatch.setattr(jobs, "tune", tune)
    monkeypatch.setattr(jobs.choices, "adopt", lambda device, rows: adopted.append(rows))
    session = jobs.Session(
        "short", tmp_path, 400.0, lambda: 400.0 - clock.now, lambda **x: told.append(x)
    )
    every = gpu_jobs(session)
    (verified,) = every["verification"].run(BENCH)
    counts = {"status": "the time was up", "passed": 1, "failed": 1}
    assert verified == {"tests": {**counts, "failures": ["hopper f2 bfloat16 64 hang"]}}
    assert [x["note"] for x in told] == ["f1 is right", "f2 is hang"]
    assert [x["tests"]["passed"] for x in told] == [1, 1] and told[0]["tests"]["failed"] == 0
    assert every["tuning"].run(BENCH) == []
    assert told[-1] == {"note": "a tile: stays"}
    assert [x["family"] for x in adopted[0]["verification"]] == ["f1", "f2"] and len(
        adopted[0]
    ) == 1


def test_verdicts_and_lines_are_out_before_a_job_ends(script, tmp_path, monkeypatch, capsys):
    counts = {"status": "not finished", "passed": 3, "failed": 1, "failures": ["f2 hang"]}

    def work(tell, requests):
        for _ in requests:
            tell(at="verification", doing="waits")
            tell(note="f2: hang", tests=counts)
        raise RuntimeError

    every = {name: Job(None, (name,)) for name in "ab"}
    monkeypatch.setattr(script, "gpu_jobs", lambda session: every)
    monkeypatch.setattr(script, "ChildProcess", lambda *_: FakeChild(work))
    data = script.run_all(tmp_path, "short", 100, "x", skip=("b",))
    assert data["tests"] == counts and "b" not in data["jobs"]
    assert data["jobs"]["a"]["status"] == "broken off"
    assert "f2: hang" in capsys.readouterr().out
    assert {"results.json", "results.md", "tuned.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert script.summary(data).splitlines() == [
        "kernels: not finished; 3 passed, 1 failed",
        "  f2 hang",
        "suite: finished; 0 of 1 jobs done",
    ]


def test_the_process_tells_of_the_gpu_and_measures_what_is_asked_for(clock, monkeypatch):
    """On a GPU that is made up."""
    collected = {"environment": {"gpu": None}, "ceilings": {"x": 1.0}}
    monkeypatch.setattr(jobs.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(jobs.tiles, "current_arch", lambda: "an imaginary one")
    monkeypatch.setattr(jobs, "gpu_bench", lambda which: BENCH)
    runs = {"environment": lambda bench: [collected], "a": run_of("a"), "b": run_of("b")}
    every = {name: Job(run, (name,)) for name, run in runs.items()}
    monkeypatch.setattr(jobs, "gpu_jobs", lambda session: every)
    del runs["a"]
    settings = {"which": "full", "folder": "x", "seconds": 9.0, "left": 9.0, "names": ["b"]}
    data = empty("command")
    assert measured(data, runs, lambda *talk: jobs.run(settings, *talk)) == "finished"
    assert names(data) == ["b"] and data.items() >= collected.items()


@pytest.mark.parametrize("which", ["short", "full"])
def test_jobs_are_in_the_order_of_their_importance(which):
    session = jobs.Session(which, Path(), 500.0, lambda: 500.0, lambda **_: None)
    names = list(gpu_jobs(session))
    assert names[:3] == ["environment", "verification", "forward-B4-H16-T4096-D128-causal"]
    kinds = ("decode", "masks-fwd-B4-H16-T4096-D128-causal-lengths", "host cost", "training-T1024")
    kinds += ("forward-B4-H16-T4096-D128-causal, in 8 bits", "tuning")
    kinds += ("forward-B4-H16-T4096-D128-causal, portable",)
    places = [next(n for n, x in enumerate(names) if x.startswith(kind)) for kind in kinds]
    assert places == sorted(places) and len(names) > (250 if which == "full" else 100)


def test_training_tells_who_trains_and_leaves_out_who_is_broken(monkeypatch):
    def steps(config, *, backend, issued, **_):
        issued()
        if torch.backends.cuda.cudnn_sdp_enabled():
            assert not torch.backends.cuda.flash_sdp_enabled() or backend == "auto"
        elif backend == "torch":
            raise ValueError("no such backend")
        return StepTiming(backend, 1.0, 2.0, 3.0, None, None)

    monkeypatch.setattr(jobs, "time_training_steps", steps)
    monkeypatch.setattr(jobs, "make_inputs", lambda case, empty: None)
    chooses = replace(jobs.BY_NAME["fastattn"], chooses=lambda case, inputs: "fastattn-hopper")
    monkeypatch.setitem(jobs.BY_NAME, "fastattn", chooses)
    announced = []
    bench = Bench(HostTimer(), announce=lambda *told: announced.append(told))
    job = gpu_jobs(jobs.Session("short", Path(), 9.0, float, print))["training-T1024"]
    assert job.kinds[-1] == "training" and job.kinds[0] == "forward D 64 bfloat16"
    records = job.run(bench)
    who = ("fastattn-hopper", "sdpa-cudnn", "sdpa-flash")
    assert announced == [*product(who, ("prepares", "runs"))]
    assert [(r["implementation"], r["status"], r.get("reason")) for r in records] == [
        ("fastattn", "timed", None),
        ("sdpa-cudnn", "timed", None),
        ("sdpa-flash", "failed", "ValueError: no such backend"),
    ]
    first, *_ = job.run(replace(bench, broken={"fastattn-hopper": "hung"}))
    assert (first["status"], first["reason"]) == ("failed", "hung")
