"""A tuning run in the interpreter, with planned times: what wins, what is kept and reported."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from planned_tuning import FORWARD, NAMES, VERIFY, A, B, C, choice, prepare_lookups, tuner

from fastattn.bench.tune import trial, tune
from fastattn.bench.tune.choices import Candidate, Choice
from fastattn.bench.tune.plan import Gpu
from fastattn.bench.tune.tuner import DONE, LOST, NOT_REACHED, SKIPPED, Progress, Record, culprit
from fastattn.kernels.launch import tiles
from fastattn.ops import attend
from fastattn.testing.verify import Finding
from fastattn.tuned import choices
from fastattn.tuned.environment import Environment, environment
from fastattn.tuned.store import Store

HERE = Environment("imaginary", 4, "1.0", "2.0", "3.0", "0123456789abcdef")


@pytest.fixture
def lookups_alone(monkeypatch):
    monkeypatch.setattr(trial, "prepare", prepare_lookups)
    monkeypatch.setattr(trial, "release", lambda device: None)


@pytest.mark.parametrize("kernel", [*tiles.KERNELS, "decode"])
def test_the_fastest_tile_is_found_and_forced_for_its_kernel_alone(kernel):
    run = tuner({(kernel, A): 3.0, (kernel, B): 1.0, (kernel, C): 2.0})
    one = choice(kernel)
    if kernel.startswith("backward"):
        one = replace(one, cases=one.cases[:1])
    (record,) = run.run([one])
    assert record == Record(
        f"tiles: {kernel} plain 4 bytes D 64",
        DONE,
        "(16, 32, 4, 1) in place of (32, 16, 4, 1): 66.7 % less time",
    )
    ((kind, row),) = run.store.rows
    assert (
        kind == "tiles" and {name: row[name] for name in choice(kernel).key} == choice(kernel).key
    )
    assert (row["BLOCK_M"], row["BLOCK_N"], row["gain"]) == (16, 32, 0.6667)
    assert (row["ms"], row["ms_shipped"]) == (1.0, 3.0)
    assert ("ms_full" in row) == (kernel == "forward")
    assert [tried["ms"] for tried in run.tried] == [3.0, 1.0, 2.0]
    assert run.ahead.submitted == [NAMES[tile] for tile in (A, B, C)]


@pytest.mark.parametrize(
    "times",
    [2.95, 3.0, 3.3, [2.0] * 6 + [3.0] * 4, [3.0] * 5 + [1.0] * 5],
    ids=["less-than-3-percent", "equal", "slower", "first-half", "second-half"],
)
def test_what_is_not_surely_faster_does_not_win(lookups_alone, times):
    """The shipped tile is stored as measured, and as what stays."""
    run = tuner({A: 3.0, B: times, C: 9.0})
    (record,) = run.run([choice()])
    assert record.text == "(32, 16, 4, 1) stays: nothing else saves more than 3 %"
    ((_, row),) = run.store.rows
    assert (row["BLOCK_M"], row["gain"], row["ms"], row["ms_shipped"]) == (32, 0.0, 3.0, 3.0)


def test_every_step_is_recorded_with_what_came_of_it(lookups_alone):
    shown = []
    times = {A: 3.0, B: 1.0, ("backward_dq", A): 2.0, ("backward_dq", B): 2.0}
    run = tuner({**times, C: 3.0, ("backward_dq", C): 2.0}, show=shown.append)
    plan = [VERIFY, choice(), choice("backward_dq")]
    assert run.run(plan) == [
        Record("verify float32 D 64: triton forward, triton backward", DONE, "all right"),
        Record(plan[1].name, DONE, "(16, 32, 4, 1) in place of (32, 16, 4, 1): 66.7 % less time"),
        Record(plan[2].name, DONE, "(32, 16, 4, 1) stays: nothing else saves more than 3 %"),
    ]
    assert [(p.number, p.steps, p.text) for p in shown if p.done] == [
        (1, 3, "all right"),
        (2, 3, "(16, 32, 4, 1) in place of (32, 16, 4, 1): 66.7 % less time"),
        (3, 3, "(32, 16, 4, 1) stays: nothing else saves more than 3 %"),
    ]
    assert [p.text for p in shown if p.number == 2 and not p.done] == [
        "",
        "1 of 3; best so far (32, 16, 4, 1) 3 ms, 0.0 % less",
        "2 of 3; best so far (16, 32, 4, 1) 1 ms, 66.7 % less",
        "3 of 3; best so far (16, 32, 4, 1) 1 ms, 66.7 % less",
    ]


def test_a_tile_that_won_is_in_use_where_backends_are_compared(lookups_alone):
    """Its own time is that of the backend then."""
    names = ("triton", "torch")
    made = [Candidate(name, f"fastattn-{name}", {}, {"backend": name}) for name in names]
    key = {"direction": "forward", "dtype": "float32", "head_dim": 64}
    backends = Choice("backends", key, (FORWARD,), tuple(made))
    run = tuner({A: 3.0, B: 1.0, C: 2.0})
    run.run([choice(), backends])
    assert run.store.rows[1][1]["ms"]["triton"] == 1.0
    assert run.store.rows[1][0] == "backends"


def test_tiles_that_spill_are_not_tried(lookups_alone):
    run = tuner({A: 3.0, B: 1.0, C: 2.0}, refused=(NAMES[B],))
    run.run([choice()])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert run.tried[1]["reason"] == "spills 8 bytes a thread"


def test_candidates_that_compute_something_else_are_not_timed(monkeypatch):
    """In a head that no sample would have had."""

    def prepare(implementation, case, inputs, expected):
        assert len(expected.exact) == case.B * case.H_k
        if tiles.lookup("forward", 4, 16) == B:
            raise AssertionError("o: error 1 exceeds the budget 0")
        return prepare_lookups(implementation, case, inputs, expected)

    monkeypatch.setattr(trial, "prepare", prepare)
    many = replace(choice(), cases=(replace(FORWARD, B=3, H_q=4, H_k=2),))
    run = tuner({A: 3.0, B: 1.0, C: 2.0})
    run.run([many])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert "exceeds the budget" in run.tried[1]["reason"]


def test_where_the_shipped_tile_does_not_run_the_fastest_other_one_does(lookups_alone):
    run = tuner({B: 1.0, C: 2.0}, refused=(NAMES[A],))
    (record,) = run.run([choice()])
    assert record.text == "(16, 32, 4, 1) in place of (32, 16, 4, 1): spills 8 bytes a thread"
    assert run.store.rows[0][1]["gain"] == 1.0 and "ms_shipped" not in run.store.rows[0][1]


def test_what_is_not_right_is_not_timed_and_what_is_known_is_not_verified_again(lookups_alone):
    asked = []

    def verify(step, show):
        asked.append(step.families)
        return {("triton", "backward", "float32", 64): "hang"}

    known = {"backend": "triton", "family": "forward", "dtype": "float32", "head_dim": 64}
    before = {"verification": [known | {"verdict": "right"}]}
    run = tuner({A: 3.0, B: 1.0, C: 2.0}, verify=verify, before=before)
    records = run.run([VERIFY, choice(), choice("backward_dq"), VERIFY])
    assert asked == [(("triton", "backward"),)]
    assert records[0].text == records[3].text == "triton backward: hang"
    assert records[1].status == DONE and records[2].status == SKIPPED
    assert records[2].text == "verification of triton backward says: hang"
    assert len(run.store.rows) == 1


def test_a_run_ends_in_time(lookups_alone):
    """It finishes what it began: the shipped tile alone says nothing."""
    left = iter([1.0, 1.0, 1.0, *[-1.0] * 100])
    run = tuner({A: 3.0, B: 1.0, C: 2.0}, left=lambda: next(left))
    records = run.run([choice(), choice("backward_dq"), VERIFY])
    assert [record.status for record in records] == [DONE, NOT_REACHED, NOT_REACHED]
    assert records[0].text == "nothing was compared: the time was up"
    assert len(run.tried) == 1 and not run.store.rows


def test_too_short_a_time_is_enough_for_nothing_and_compiles_nothing():
    run = tuner({}, left=lambda: 0.0)
    assert {record.status for record in run.run([VERIFY, choice()])} == {NOT_REACHED}
    assert not run.ahead.submitted


def test_a_lost_device_ends_the_run_and_names_its_culprit(monkeypatch):
    times = {A: 3.0, B: 1.0, C: 2.0}
    run = tuner({**times, **{("backward_dq", tile): ms for tile, ms in times.items()}})

    def prepare(*arguments):
        if tiles.lookup("backward_dq", 4, 16) == B:
            monkeypatch.setattr(run.bench.timer, "synchronize", lost)
            raise RuntimeError("an illegal memory access was encountered")
        return prepare_lookups(*arguments)

    def lost():
        raise RuntimeError("the context is lost")

    monkeypatch.setattr(trial, "prepare", prepare)
    plan = [choice(), choice("backward_dq"), choice("backward_dkv")]
    records = run.run(plan)
    assert [record.status for record in records] == [DONE, LOST, NOT_REACHED]
    assert records[1].text.startswith("(16, 32, 4, 1): RuntimeError: an illegal memory access")
    (_, (kind, row)) = run.store.rows
    assert (kind, row["choice"], row["candidate"]) == ("culprits", plan[1].name, NAMES[B])
    assert row["reason"] == "RuntimeError: an illegal memory access was encountered"


def test_what_ended_an_earlier_run_is_passed_over(lookups_alone):
    """Only in the choice where it did. Which candidate runs is told, and when none does alone."""
    tried = []
    plan = [choice(), choice("backward_dq")]
    times = {A: 3.0, B: 1.0, C: 2.0}
    run = tuner(
        {**times, **{("backward_dq", tile): ms for tile, ms in times.items()}},
        before={"culprits": [culprit(plan[0].name, NAMES[B], "a kernel may hang")]},
        trying=lambda *names: tried.append(names),
    )
    first, second = run.run(plan)
    assert first.text == (
        "(16, 16, 4, 1) in place of (32, 16, 4, 1): 33.3 % less time; "
        "passed over, for it ended an earlier run: (16, 32, 4, 1)"
    )
    assert run.tried[1]["reason"] == "ended an earlier run: a kernel may hang (2000-01-01)"
    assert second.text == "(16, 32, 4, 1) in place of (32, 16, 4, 1): 40.0 % less time"
    assert {name for of, name in tried if of == plan[0].name} == {NAMES[A], NAMES[C], ""}
    assert (plan[1].name, NAMES[B]) in tried and tried[-1] == (plan[1].name, "")


def test_a_shape_in_whose_place_the_portable_kernels_served_was_not_timed(monkeypatch):
    def prepare(*arguments):
        if tiles.lookup("forward", 4, 16) == B:
            attend.uncompiled.append("a kernel of it does not compile here")
        return prepare_lookups(*arguments)

    monkeypatch.setattr(trial, "prepare", prepare)
    run = tuner({A: 3.0, B: 1.0, C: 2.0})
    run.run([choice()])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert run.tried[1]["reason"] == "RuntimeError: a kernel of it does not compile here"
    assert not attend.uncompiled


@pytest.fixture
def imaginary_gpu(monkeypatch):
    """A GPU with one step to verify and one choice; what is known about it, when it is asked."""
    monkeypatch.setattr(attend, "on_hopper", lambda device: False)
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tune, "environment", lambda device: HERE)
    monkeypatch.setattr(tune, "gpu_of", lambda device: Gpu("imaginary", 2**16, 4, hopper=False))
    monkeypatch.setattr(tune, "steps", lambda shapes, gpu: [VERIFY, choice()])
    times = {A: 3.0, B: 1.0, C: 2.0}
    monkeypatch.setattr(tune, "gpu_bench", lambda which: tuner(times).bench)
    asked = []

    def verify(scope, device, *, store, progress):
        assert choices.choices(device) == choices.Choices({}, {}, {}, {}, {}, 0)
        progress(1, 1, None)
        asked.append((scope.backends, scope.families, scope.dtypes, scope.head_dims, scope.quick))
        for family in scope.families:
            found = Finding("triton", family, "float32", 64, 1, 0.5, "right", "case", "")
            store.put("verification", found._asdict())
            yield found

    monkeypatch.setattr(tune.verification, "run", verify)
    yield asked
    choices.forget()


def test_on_a_gpu_it_verifies_times_and_stores(imaginary_gpu, lookups_alone, tmp_path, monkeypatch):
    """Earlier findings count for nothing meanwhile, and are read again afterwards."""
    device = torch.device("cuda", 0)
    key = {"backend": "triton", "dtype": "float32", "head_dim": 64}
    rows = {"passes": [{**key, "passes": "two", "date": "2000-01-01"}]}
    monkeypatch.setattr(choices, "applies", lambda device: True)
    monkeypatch.setattr(choices, "read", lambda device: rows)
    assert choices.choices(device).passes
    shown = []
    found = tune.tune(seconds=100, folder=tmp_path, show=shown.append)
    assert [step.status for step in found.steps] == [DONE, DONE]
    assert imaginary_gpu == [(("triton",), ("forward", "backward"), ("float32",), (64,), True)]
    (row,) = Store(HERE, tmp_path).read("tiles")
    assert (row["BLOCK_M"], row["arch"]) == (16, "imaginary")
    assert found.folder == Store(HERE, tmp_path).folder
    assert "1 of 1" in [progress.text for progress in shown]
    assert choices.choices(device).passes
    # Another run knows what is right.
    tune.tune(seconds=100, folder=tmp_path)
    assert len(imaginary_gpu) == 1


def test_what_was_found_survives_an_end_in_the_middle(lookups_alone, tmp_path):
    """Each winner is on disk before the next step begins, whatever ends the process then."""

    class Killed(BaseException):
        pass

    def show(progress):
        if progress.number == 2:
            raise Killed

    store = Store(environment("cpu"), tmp_path)
    plan = [VERIFY, choice(), choice("backward_dq")]
    with pytest.raises(Killed):
        tuner({A: 3.0, B: 1.0, C: 2.0}, store=store, show=show).run(plan[1:])
    (row,) = store.read("tiles")
    assert (row["kernel"], row["BLOCK_M"], row["arch"]) == ("forward", 16, "imaginary")
    # Another run goes on with what has no finding yet.
    assert tune.unknown_first(plan, store) == [VERIFY, plan[2], plan[1]]


def test_a_step_that_hangs_ends_the_process():
    """Here a stand-in for its end; a kernel that waits for ever would not return."""
    ended, kept, shown = [], [], []
    done = threading.Event()

    def end(why):
        ended.append(why)
        done.set()

    def watched():
        return tune.Watchdog(shown.append, kept.append, stall_seconds=0.01, end=end)

    with watched() as first:
        assert done.wait(60)
    said = "nothing happened for 0 s, a kernel may hang"
    assert ended == [f": {said}"] and not kept
    first(Progress(1, 2, 3.0, "a step", "text", False))
    assert shown[0].step == "a step"
    done.clear()
    second = watched()
    second.trying("a choice", "a tile")
    with second:
        assert done.wait(60)
    assert ended[1] == f": a tile: {said}; the next run passes over it"
    assert kept == [{"choice": "a choice", "candidate": "a tile", "reason": said}]


def test_without_a_gpu_nothing_is_tuned(monkeypatch):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU: torch sees no CUDA device"):
        tune.tune(seconds=1)
