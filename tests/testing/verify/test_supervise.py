"""The supervision of child processes: planned messages on a planned clock, and real ends."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattn.bench.time.failures import LOST
from fastattn.testing.verify.case import Subject
from fastattn.testing.verify.supervise import (
    ChildProcess,
    Ended,
    Job,
    Stall,
    supervise,
)
from fastattn.testing.verify.verdicts import Outcome

FIRST, SECOND, THIRD = (Subject("triton", x, "bfloat16", 64) for x in ("forward", "decode", "fp8"))
JOBS = [Job(FIRST, ("a", "b")), Job(SECOND, ("c",)), Job(THIRD, ("d",))]
STALL = Stall(start=30.0, case=10.0)
READY = {"ready": True}


def passed(*names: str) -> list[dict[str, Any]]:
    """Messages of a child about cases that are right."""
    each = ([{"starts": x}, {"outcome": [x, "right", 0.5, ""]}] for x in names)
    return [message for messages in each for message in messages]


class Planned:
    """A child that tells a message at a time, and whose plan may end by its exit code."""

    def __init__(self, plan: list[Any]) -> None:
        self.plan, self.sent, self.killed = list(plan), [], False

    def send(self, job: Job) -> None:
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
        self.now, self._plans = 0.0, iter(plans)
        self.children: list[Planned] = []

    def start(self) -> Planned:
        self.children.append(Planned(next(self._plans)))
        return self.children[-1]

    def sleep(self, seconds: float) -> None:
        self.now += 1.0

    def run(self, jobs: list[Job], children: int = 1) -> list[Ended]:
        host = {"sleep": self.sleep, "clock": lambda: self.now}
        found = list(supervise(jobs, self.start, children=children, stall=STALL, **host))
        assert all(child.killed for child in self.children)
        return found


def verdicts(found: list[Ended]) -> list[tuple[str, str, str]]:
    return [(job.subject.family, x.case, x.verdict) for job in found for x in job.outcomes]


DONE = {"done": True}


def test_one_child_runs_all_jobs() -> None:
    host = Host([READY, *passed("a", "b"), DONE, *passed("c"), DONE, *passed("d"), DONE])
    found = host.run(JOBS)
    assert [x.subject for x in found] == [FIRST, SECOND, THIRD]
    assert found[0].outcomes == [Outcome("a", "right", 0.5, ""), Outcome("b", "right", 0.5, "")]
    assert host.children[0].sent == JOBS


def test_a_case_that_hangs_is_named_and_the_next_job_has_a_new_child() -> None:
    host = Host([READY, *passed("a"), {"starts": "b"}], [READY, *passed("c"), DONE])
    found = host.run(JOBS[:2])
    assert verdicts(found) == [
        ("forward", "a", "right"),
        ("forward", "b", "hang"),
        ("decode", "c", "right"),
    ]
    assert found[0].outcomes[1].reason == "no progress for 10 s"


def test_what_is_compiled_is_progress() -> None:
    """Nine messages with six seconds between them: longer than a stall, and none is one."""
    compiled = [{"compiled": True}] * 9
    host = Host([READY, {"starts": "a"}, *compiled, *passed("a")[1:], DONE])
    host.sleep = lambda seconds: setattr(host, "now", host.now + 6)
    assert verdicts(host.run([Job(FIRST, ("a",))])) == [("forward", "a", "right")]


@pytest.mark.parametrize(
    ("code", "how"), [(-11, "ended by SIGSEGV"), (7, "ended with exit code 7")]
)
def test_a_case_that_ends_its_process_is_named(code: int, how: str) -> None:
    host = Host([READY, *passed("a"), {"starts": "b"}, code], [READY, *passed("c"), DONE])
    found = host.run(JOBS[:2])
    assert verdicts(found)[1:] == [("forward", "b", "crash"), ("decode", "c", "right")]
    assert found[0].outcomes[1].reason == f"{how}: its last line"


def test_a_child_that_lost_its_device_is_replaced() -> None:
    told = [{"starts": "a"}, {"outcome": ["a", "crash", None, "illegal address"]}]
    host = Host([READY, *told, LOST], [READY, *passed("c"), DONE])
    found = host.run(JOBS[:2])
    assert verdicts(found) == [("forward", "a", "crash"), ("decode", "c", "right")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([1], "ended with exit code 1: its last line"),
        ([], "said nothing for 30 s"),
        ([READY, 0], "ended with exit code 0"),
    ],
)
def test_children_that_cannot_run_end_it(plan: list[Any], message: str) -> None:
    host = Host(plan)
    with pytest.raises(ChildProcessError, match=message):
        host.run(JOBS)
    assert host.children[0].killed


# A child without torch: its cases are named by what they do.
PROGRAM = """
import json, os, signal, sys, time

def tell(**message):
    print(json.dumps(message), flush=True)

tell(ready=True)
for line in sys.stdin:
    subject, cases = json.loads(line)
    for case in cases:
        tell(starts=case)
        if case == "sleeps":
            time.sleep(600)
        if case == "dies":
            sys.stderr.write("the kernel reads what is not there\\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        tell(outcome=[case, "right", 0.25, ""])
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

    jobs = [Job(FIRST, ("a", "sleeps", "b")), Job(SECOND, ("dies", "c")), Job(THIRD, ("d", "e"))]
    found = list(supervise(jobs, start, stall=Stall(start=60.0, case=1.0)))
    assert verdicts(found) == [
        ("forward", "a", "right"),
        ("forward", "sleeps", "hang"),
        ("decode", "dies", "crash"),
        ("fp8", "d", "right"),
        ("fp8", "e", "right"),
    ]
    assert found[1].outcomes[0].reason == "ended by SIGSEGV: the kernel reads what is not there"
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
