"""A full run on a fake GPU: its tests, its measurements, and implementations that break."""

import ast
import json
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

from fastattn.bench.results.report import Report
from fastattn.bench.run import full_run, numeric_tests, outcomes

CHECKOUT = Path(__file__).resolve().parents[3]


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


TESTS = """
import time, pytest
def test_good(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x == 1
@pytest.mark.skip
def test_absent(): pass
def test_last(): time.sleep(SECONDS)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    return tmp_path


def run_tests(folder, text, *options, sleep=lambda: None, clock=None):
    """The outcome of running a file of tests; `sleep` is called while they run."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]

    def wait(seconds):
        time.sleep(0.02)
        sleep()

    return numeric_tests.run(
        [*command, str(folder / "test_it.py")],
        folder / "log",
        folder / "tests.jsonl",
        100,
        sleep=wait,
        clock=clock or Clock(),
    )


def names(found):
    return [name.partition("::")[2] for name in found["failures"]]


def test_tests_end_in_time_and_a_second_call_goes_on(folder):
    """The time is up when every other test has an outcome."""
    clock, log = Clock(), folder / "log"

    def pass_time():
        if len(outcomes.read(folder / "tests.jsonl")) == 4:
            clock.now = 86.0

    found = run_tests(folder, TESTS.replace("SECONDS", "3600"), sleep=pass_time, clock=clock)
    assert found["status"] == "the time was up"
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 1, 1)
    # The failure was told when it happened, and again in the summary, for which there was time.
    # (Where the variable CI is set, pytest's list of failures has the message once more.)
    assert log.read_text().count("\nE   assert 2 == 1") == 2
    found = run_tests(folder, TESTS.replace("SECONDS", "0"))
    assert found["status"] == "finished"
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 1, 1)
    assert names(found) == ["test_bad[2]"]
    assert log.read_text().count("test_good PASSED") == 1


class Deaf:
    """A process that no interrupt ends."""

    def __init__(self):
        self.heard = []

    def poll(self):
        return -9 if "kill" in self.heard else None

    def interrupt(self):
        self.heard.append("interrupt")

    def kill(self):
        self.heard.append("kill")


def test_tests_that_do_not_heed_an_interrupt_are_killed(tmp_path):
    clock, process = Clock(), Deaf()

    def sleep(seconds):
        clock.now += 1.0

    found = numeric_tests.run(
        [],
        tmp_path / "log",
        tmp_path / "tests.jsonl",
        100,
        start=lambda command, log: process,
        sleep=sleep,
        clock=clock,
    )
    assert process.heard[:2] == ["interrupt", "kill"]
    assert (found["status"], found["seconds"]) == ("the time was up", 101.0)


LOSING = """
import pytest, torch
lost = []
def test_breaks():
    def synchronize():
        raise RuntimeError("illegal access")
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = synchronize
    raise RuntimeError("illegal access")
@pytest.mark.parametrize("x", range(6))
def test_innocent(x): torch.cuda.is_initialized() and torch.cuda.synchronize()
"""


def test_a_lost_device_costs_one_test(folder):
    found = run_tests(folder, LOSING, "-n", "1")
    assert names(found) == ["test_breaks"]
    assert found["passed"] == 6


def test_a_line_that_a_kill_has_cut_is_no_outcome(tmp_path):
    path = tmp_path / "tests.jsonl"
    lines = [{"test": "a", "outcome": "failed"}, {"test": "a", "outcome": "passed"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "b", "outc')
    assert outcomes.read(path) == {"a": "failed"}


def test_the_tests_that_are_run_exist_and_compile_for_no_other_gpu():
    for name in numeric_tests.FILES:
        tree = ast.parse((CHECKOUT / "tests" / name).read_text(encoding="utf-8"))
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert "compile_pool" not in arguments
    command = numeric_tests.command(CHECKOUT)
    files = [Path(word) for word in command if word.endswith(".py")]
    assert files == [CHECKOUT / "tests" / name for name in numeric_tests.FILES]


def test_a_run_leaves_a_report_whatever_was_left_out(tmp_path):
    report = full_run.run_all(
        tmp_path / "out", tmp_path, "quick", 60, "command", skip=("tests", "suite", "tuning")
    )
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"results.json", "results.md"}
    assert "suite: not run" in full_run.summary(report.data)


# What measures, with a device and implementations that are made up. Those that hang do so for ever.
SUITE = """
import os, signal, sys, threading
from dataclasses import replace
from fastattn import reference
from fastattn.bench import environment
from fastattn.bench.run import jobs
from fastattn.bench.run import suite
from fastattn.bench.attention import Bench, run_case
from fastattn.bench.cases import Case
from fastattn.bench.measure import Effort, HostTimer
from fastattn.bench.implementations.implementation import Implementation

class Timer(HostTimer):
    def synchronize(self):
        if LOST:
            raise RuntimeError("an illegal memory access was encountered")

LOST, CALLS = [], {}
FORWARD = Case("forward", "forward", 1, 2, 1, 8, 8, 8, dtype="float32", device="cpu")
CASES = [
    FORWARD,
    replace(FORWARD, causal=True),
    replace(FORWARD, family="backward", direction="backward"),
    replace(FORWARD, window=(2, 0)),
    replace(FORWARD, family="decode", T_q=1, causal=True),
]

def implementation(name, misbehave=lambda case, calls: None, factor=1.0):
    def prepare(case, inputs):
        def call(q, k, v):
            key = (case.name, name)
            CALLS[key] = CALLS.get(key, 0) + 1
            misbehave(case, CALLS[key])
            return factor * reference.attention(
                q, k, v, causal=case.causal, window=case.window
            )
        return call
    return Implementation(name, lambda case: None, prepare)

def crash(case, calls):
    if case.direction == "backward":
        os.kill(os.getpid(), signal.SIGSEGV)

def hang(case, calls):
    # Late: on the device, after all that is compiled.
    if case.causal and case.family == "forward" and calls == 3:
        threading.Event().wait()

def lose(case, calls):
    # Later still: nobody waits for the call alone.
    if case.window and calls > 4:
        LOST.append(case)

ALL = [
    implementation("right"), implementation("wrong", factor=1.01), implementation("crashes", crash),
    implementation("hangs", hang), implementation("loses", lose), implementation("also right"),
]

def attention_job(case):
    def run(bench, broken, announce):
        return run_case(case, ALL, bench, broken=broken, announce=announce)
    return jobs.Job(case.name, run, jobs.kinds(case))

def raises(bench, broken, announce):
    raise ValueError("no such layer")

def import_time(bench, broken, announce):
    return [jobs.record("overhead", "import", "right", import_ms=1.0)]

def gpu_jobs(which):
    return [*map(attention_job, CASES), jobs.Job("layer", raises), jobs.Job("import", import_time)]

suite.torch.cuda.is_available = lambda: True
suite.tiles.current_arch = lambda: "an imaginary one"
suite.gpu_jobs = gpu_jobs
suite.gpu_bench = lambda which: Bench(
    Timer(), Effort(warm_up=1, target_ms=0, least=4, most=4, pause=0)
)
suite.ceilings = lambda bench: {"matmul_tflops": 1.0, "copy_gbps": 1.0}
suite.environment.collect = lambda: {"gpu": {"name": "Imaginary GPU"}, "versions": {}}
code = suite.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""


@pytest.fixture
def run(tmp_path):
    """A full run with the suite above, whose time passes only while an implementation hangs."""
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    out, clock = tmp_path / "out", Clock()

    def command(path, which, seconds):
        return [sys.executable, str(script), "--report", str(path), "--seconds", str(seconds)]

    def sleep(seconds):
        time.sleep(0.02)
        running = Report.load(out / "results.json").running()
        if running and (running[1].get("at"), running[1].get("doing")) == ("hangs", "runs"):
            clock.now += 1.0

    return lambda: full_run.run_all(
        out,
        CHECKOUT,
        "quick",
        1000,
        "command",
        skip=("tests",),
        suite=command,
        sleep=sleep,
        clock=clock,
    )


def test_culprits_are_named_and_everything_else_is_measured(run):
    """One crashes, one hangs, one loses the device behind its calls, one is wrong."""
    report = run()
    assert report.data["suite"] == "finished"
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
    others = {
        (r["case"]["name"], r["implementation"]): r["status"]
        for r in report.data["results"]
        if r["implementation"] != "wrong" and r["status"] != "timed"
    }
    causal, window = "forward-B1-H2:1-T8-D8-causal-float32-cpu", "full-window2:0-float32-cpu"
    backward = "backward-B1-H2:1-T8-D8-full-float32-cpu"
    assert others == {
        (causal, "hangs"): "failed",
        **{(backward, name): "failed" for name in ("crashes", "hangs")},
        **{(f"forward-B1-H2:1-T8-D8-{window}", name): "failed" for name in ("hangs", "loses")},
    }
    wrong = [r["status"] for r in report.data["results"] if r["implementation"] == "wrong"]
    assert wrong == ["wrong"] * 5
    assert len(report.data["results"]) == 5 * 6 + 1
    log = (report.path.parent / "log.txt").read_text()
    assert "ValueError: no such layer" in log and "exceeds the budget" in log


def test_shares_leave_most_of_the_time_to_the_measurements():
    for seconds in (300, 540, 3600):
        share = full_run.shares(seconds)
        assert share["tests"] + share["tuning"] <= 0.5 * seconds


@pytest.mark.parametrize("script", ["run_all.py", "tune.py"])
def test_scripts_say_that_there_is_no_gpu(tmp_path, script, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = str(CHECKOUT / "bench" / script)
    monkeypatch.setattr(sys, "argv", [path, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
