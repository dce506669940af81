"""The supervision of child processes: planned messages on a planned clock, and real ends."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattn.bench.time.failures import LOST
from fastattn.bench.time.supervise import STALL, ChildProcess, Ended, supervise

LIMITS = {**STALL, "starts": 30.0, "prepares": 10.0, "runs": 5.0}
READY, DONE = {"ready": True}, {"done": True}
A, B = {"at": "a"}, {"at": "b", "doing": "runs"}


class Planned:
    """A child that tells a message at a time, and whose plan may end by its exit code."""

    def __init__(self, plan: list[Any]) -> None:
        self.plan, self.sent, self.killed = list(plan), [], False

    def send(self, job: Any) -> None:
        self.sent.append(job)

    def messages(self) -> list[dict[str, Any]]:
        if not self.plan or not isinstance(self.plan[0], dict):
            return []
        return [self.plan.pop(0)]

    def poll(self) -> int | None:
        return self.plan[0] if self.plan and isinstance(self.plan[0], int) else None

    def kill(self) -> None:
        self.killed = True

    def last_words(self) -> str:
        return "its last line"


class Host:
    """Starts planned children, and has a clock that moves when somebody sleeps."""

    def __init__(self, *plans: list[Any]) -> None:
        self.now, self._plans, self.step = 0.0, iter(plans), 1.0
        self.children: list[Planned] = []

    def start(self) -> Planned:
        self.children.append(Planned(next(self._plans)))
        return self.children[-1]

    def sleep(self, seconds: float) -> None:
        self.now += self.step

    def run(self, waiting: deque[str], **how: Any) -> list[Ended]:
        host = {"sleep": self.sleep, "clock": lambda: self.now, "stall": LIMITS}
        actual = list(supervise(waiting, self.start, **host, **how))
        assert all(child.killed for child in self.children)
        return actual


def ends(jobs: list[Ended]) -> list[tuple[str, str, str]]:
    return [(ended.job, ended.at, ended.why) for ended in jobs]


def test_one_child_does_all_jobs() -> None:
    host, heard = Host([READY, A, DONE, A, DONE]), []
    actual = host.run(
        deque(["x", "y"]), request=str.upper, heard=lambda job, told: heard.append((job, told))
    )
    assert ends(actual) == [("x", "a", ""), ("y", "a", "")]
    assert actual[0].messages == [A, DONE] and actual[0].seconds > 0
    assert host.children[0].sent == ["X", "Y"]
    assert heard == [("x", A), ("x", DONE), ("y", A), ("y", DONE)]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ([-11], "ended by SIGSEGV: its last line"),
        ([7], "ended with exit code 7: its last line"),
        ([{"lost": "an address"}, LOST], "broke the device: an address"),
        ([LOST], f"ended with exit code {LOST}: its last line"),
        ([], "made no progress for 5 s"),
    ],
)
def test_who_ends_a_process_is_named_and_the_next_job_has_a_new_one(
    end: list[Any], why: str
) -> None:
    host = Host([READY, A, B, *end], [READY, A, DONE])
    actual = host.run(deque(["x", "y"]))
    assert ends(actual) == [("x", "b", why), ("y", "a", "")]
    assert actual[0].hung == (not end)


def test_every_message_is_progress_and_some_work_may_take_its_time() -> None:
    """Nine messages with six seconds between them: longer than a stall, and none is one."""
    host = Host([READY, A, *[{"compiled": True}] * 9, DONE])
    host.step = 6.0
    assert ends(host.run(deque("x"))) == [("x", "a", "")]
    host = Host([READY, {"at": "a", "doing": "waits"}])
    assert host.run(deque("x"), left=lambda: 999 - host.now) == []


def test_the_time_is_kept_and_what_is_not_done_is_left() -> None:
    for grace, done in ((0.0, ["x"]), (9.0, ["x", "y"])):
        host = Host([READY, A, DONE, A, *[{}] * 3, DONE, A, DONE])
        waiting = deque("xyz")
        actual = host.run(waiting, left=lambda host=host: 5 - host.now, grace=grace)
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
def test_a_child_that_cannot_do_anything_ends_it(plan: list[Any], message: str) -> None:
    host = Host(plan)
    with pytest.raises(ChildProcessError, match=message):
        host.run(deque("xyz"))
    assert host.children[0].killed


# A child without torch: its cases are named by what they do.
PROGRAM = """
import json, os, signal, sys, time

def tell(**message):
    print(json.dumps(message), flush=True)

tell(ready=True)
for line in sys.stdin:
    for case in json.loads(line):
        tell(at=case)
        if case == "sleeps":
            time.sleep(600)
        if case == "dies":
            sys.stderr.write("the kernel reads what is not there\\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
    tell(done=True)
"""


@pytest.fixture
def processes() -> Iterator[list[ChildProcess]]:
    started: list[ChildProcess] = []
    yield started
    assert all(child.poll() is not None for child in started), "a process was left behind"


def test_processes_that_sleep_and_die(processes: list[ChildProcess]) -> None:
    def start() -> ChildProcess:
        processes.append(ChildProcess([sys.executable, "-S", "-c", PROGRAM]))
        return processes[-1]

    jobs = deque([("a", "sleeps", "b"), ("dies", "c"), ("d", "e")])
    actual = list(supervise(jobs, start, stall={**STALL, "prepares": 1.0}))
    assert [(ended.at, ended.why) for ended in actual] == [
        ("sleeps", "made no progress for 1 s"),
        ("dies", "ended by SIGSEGV: the kernel reads what is not there"),
        ("e", ""),
    ]
    assert len(processes) == 3


def test_a_process_without_messages_prints_to_the_log_and_is_killed_with_its_children(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    process = ChildProcess(["sh", "-c", "sleep 1000 & echo $!; wait"], log=log, listen=False)
    while not (child := log.read_text()).endswith("\n"):
        assert process.poll() is None
    process.kill()
    assert process.poll() == -9
    # A child that is dead, or that nobody has waited for yet.
    state = subprocess.run(["ps", "-o", "stat=", "-p", child.strip()], capture_output=True)
    assert state.stdout.strip()[:1] in (b"", b"Z")
