"""The supervision of child processes: planned messages on a planned clock, and real ends."""

import io
import subprocess
import sys
from collections import deque

import pytest
from fake_child import Clock, FakeChild

from fastattn.testing import supervision as module
from fastattn.testing.supervision import STALL, ChildProcess, supervise, talk

READY, DONE = {"ready": True}, {"done": True}
A, B = {"at": "a"}, {"at": "b", "doing": "runs"}


class Host(Clock):
    """Starts planned children; a look at them takes a second."""

    step = 1.0

    def run(self, plans, waiting, **how):
        self.children = []

        def start():
            self.children.append(FakeChild(plan=plans[len(self.children)]))
            return self.children[-1]

        actual = list(supervise(waiting, start, **how))
        assert all(child.killed for child in self.children)
        return actual


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(module, "time", host)
    for phase, limit in {"starts": 30.0, "prepares": 10.0, "runs": 5.0}.items():
        monkeypatch.setitem(STALL, phase, limit)
    return host


def ends(jobs):
    return [(ended.job, ended.at, ended.why) for ended in jobs]


def test_one_child_does_all_jobs(host):
    heard = []
    how = {"request": str.upper, "heard": lambda *told: heard.append(told)}
    actual = host.run([[READY, A, DONE, A, DONE]], deque(["x", "y"]), **how)
    assert ends(actual) == [("x", "a", ""), ("y", "a", "")]
    assert actual[0].messages == [A, DONE]
    assert host.children[0].sent == ["X", "Y"]
    assert heard == [("x", A), ("x", DONE), ("y", A), ("y", DONE)]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ([-11], "ended by SIGSEGV: its last line"),
        ([7], "ended with exit code 7: its last line"),
        ([], "made no progress for 5 s"),
    ],
)
def test_who_ends_a_process_is_named_and_the_next_job_has_a_new_one(host, end, why):
    actual = host.run([[READY, A, B, *end], [READY, A, DONE]], deque(["x", "y"]))
    assert ends(actual) == [("x", "b", why), ("y", "a", "")]
    assert actual[0].hung == (not end)


def test_every_message_is_progress_and_some_work_may_take_its_time(host):
    """Nine messages with six seconds between them: longer than a stall, and none is one."""
    host.step = 6.0
    plans = [[READY, A, *[{"compiled": True}] * 9, DONE]]
    assert ends(host.run(plans, deque("x"))) == [("x", "a", "")]
    plans = [[READY, {"at": "a", "doing": "waits"}]]
    assert host.run(plans, deque("x"), left=lambda: 999 - host.now) == []


def test_the_time_is_kept_and_what_is_not_done_is_left(host):
    plans = [[READY, A, DONE, A, *[{}] * 3, DONE, A, DONE]]
    for grace, done in ((0.0, ["x"]), (9.0, ["x", "y"])):
        waiting, host.now = deque("xyz"), 0.0
        actual = host.run(plans, waiting, left=lambda: 5 - host.now, grace=grace)
        assert [ended.job for ended in actual] == done
        assert [*waiting] == [job for job in "xyz" if job not in done]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([1], "ended with exit code 1: its last line"),
        ([], "made no progress for 30 s"),
        ([READY, 0], "ended with exit code 0"),
    ],
)
def test_a_child_that_cannot_do_anything_ends_it(host, plan, message):
    with pytest.raises(ChildProcessError, match=message):
        host.run([plan], deque("xyz"))
    assert host.children[0].killed


def test_an_error_is_the_last_line_of_its_process(monkeypatch, capsys):
    codes = []
    nothing = {"dup": lambda file: None, "dup2": lambda *files: None, "_exit": codes.append}
    for name, function in (nothing | {"fdopen": lambda *file: io.StringIO()}).items():
        monkeypatch.setattr(module.os, name, function)
    talk(lambda tell, jobs: 1 / 0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert (codes, last) == ([1], "ZeroDivisionError: division by zero")


# A child without torch: its cases are named by what they do.
PROGRAM = """
import json, os, signal, subprocess, sys

def tell(**message):
    print(json.dumps(message), flush=True)

tell(ready=True)
for line in sys.stdin:
    for case in json.loads(line):
        tell(at=case)
        if case == "sleeps":
            child = subprocess.Popen(["sleep", "600"])
            print(child.pid, file=sys.stderr, flush=True)
            child.wait()
        if case == "dies":
            print("the kernel reads what is not there", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
    tell(done=True)
"""


def test_processes_that_sleep_and_die(monkeypatch, tmp_path):
    processes, log = [], tmp_path / "log"

    def start():
        processes.append(ChildProcess([sys.executable, "-S", "-c", PROGRAM], log=log))
        return processes[-1]

    monkeypatch.setitem(STALL, "prepares", 1.0)
    jobs = deque([("a", "sleeps", "b"), ("dies", "c"), ("d", "e")])
    assert [(ended.at, ended.why) for ended in supervise(jobs, start)] == [
        ("sleeps", "made no progress for 1 s"),
        ("dies", "ended by SIGSEGV: the kernel reads what is not there"),
        ("e", ""),
    ]
    assert [child.poll() for child in processes] == [-9, -11, -9]
    # The sleeper's own child dies soon, if not at once; nobody may have waited for it yet.
    ps = ["ps", "-o", "stat=", "-p", log.read_text().split()[0]]
    states = (subprocess.run(ps, capture_output=True).stdout.strip()[:1] for _ in range(200))
    assert any(state in (b"", b"Z") for state in states)
