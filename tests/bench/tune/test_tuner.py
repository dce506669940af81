"""A tuning run in the interpreter, with planned times: what wins, what is kept and reported."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from fake_child import FakeChild

from fastattn import dispatch
from fastattn.bench.cases.case import Case
from fastattn.bench.time.ahead import Ahead
from fastattn.bench.time.failures import LOST
from fastattn.bench.time.measure import serve
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.bench.tune import trial, tune
from fastattn.bench.tune.plan import Candidate, Choice, Gpu, Verification, tile_candidate
from fastattn.bench.tune.tune import Tuner, verification
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.ops import attend
from fastattn.testing.verify import Finding
from fastattn.tuned import choices
from fastattn.tuned.environment import Environment, environment
from fastattn.tuned.store import Store

QUICK = Effort(warm_up=0, target_ms=0, least=1, most=10, pause=0)
A, B, C = TileConfig(32, 16), TileConfig(16, 32), TileConfig(16, 16)
NAMES = {A: "(32, 16, 4, 1)", B: "(16, 32, 4, 1)", C: "(16, 16, 4, 1)"}
FORWARD = Case("forward", "forward", 1, 1, 1, 20, 20, 16, True, dtype="float32", device="cpu")
BACKWARD = replace(FORWARD, family="backward", direction="backward")
DECODE = replace(FORWARD, family="decode", T_q=1, layout="bhtd")
VERIFY = Verification((("triton", "forward"), ("triton", "backward")), "float32", 64)


def choice(kernel="forward") -> Choice:
    """Three tiles of a kernel; A is the shipped one."""
    case = {"forward": FORWARD, "decode": DECODE}.get(kernel, BACKWARD)
    cases = (case,) if kernel == "decode" else (case, replace(case, causal=False))
    made = [tile_candidate(kernel, "plain", tile) for tile in (A, B, C)]
    key = {"kernel": kernel, "calls": "plain", "element_size": 4, "BLOCK_D": 64}
    return Choice("tiles", key, cases, tuple(made))


class Planned(HostTimer):
    """A call takes the milliseconds that are planned for the tile in force when it first runs."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def prepare(self, function):
        used, lookup = set(), tiles.lookup

        def remember(kernel, *sizes, **kind):
            tile = lookup(kernel, *sizes, **kind)
            used.add((kernel, tile))
            return tile

        call_memo.forget()
        launches.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "lookup", remember)
            function()

        ms = sum(self.times.get(one, 0.0) for one in used)
        return lambda: lambda: ms


class NothingAhead(Ahead):
    """Nothing is compiled ahead; some tiles are known not to compile."""

    def __init__(self, refused=()):
        super().__init__("an unknown architecture", pool=object())
        self.refused, self.submitted = refused, []

    def submit(self, key, cases, implementations=None, forced=None):
        self.submitted.append(key[1])

    def close(self): ...

    def why_not(self, key, seconds):
        return "does not compile: no" if key[1] in self.refused else None


class Kept:
    """Findings in memory. rows: what a run stored. before: what earlier ones did, by kind."""

    def __init__(self, before=None):
        self.rows, self.before = [], dict(before or {})

    def read(self, kind):
        stored = [{"date": "2000-01-01", **row} for row in self.before.get(kind, ())]
        return stored + [{"date": "2000-01-02", **row} for of, row in self.rows if of == kind]

    def put(self, kind, row):
        self.rows.append((kind, row))


class Run:
    """A run in which tiles take the given milliseconds.

    notes: told on the way. announced: who was at work, and at what. store: what was stored.
    verdict: of every family that is verified.
    """

    def __init__(
        self, times, left=lambda: 1.0, refused=(), store=None, verdict="right", broken=None
    ):
        by_kernel = {
            ("forward", key) if isinstance(key, TileConfig) else key: x for key, x in times.items()
        }
        self.bench = Bench(Planned(by_kernel), QUICK, expected=trial.expect_all)
        self.store, self.ahead, self.verdict = store or Kept(), NothingAhead(refused), verdict
        self.broken, self.verified, self.notes, self.announced = broken or {}, [], [], []
        self._left, self._done = left, []

    def tell(self, **message):
        self.notes += [message["note"]] if "note" in message else []
        self.announced += [(message["at"], message.get("doing"))] if "at" in message else []
        self._done += message.get("records", [])

    def verify(self, scope, device, *, store, progress):
        progress(1, 1, None)
        self.verified.append((scope.backends, scope.families, scope.dtypes, scope.quick))
        for family in scope.families:
            about = {"backend": "triton", "family": family, "verdict": self.verdict}
            store.put("verification", {**about, "dtype": scope.dtypes[0], "head_dim": 64})
            yield about

    def run(self, plan):
        """The records of the steps, and the exit code of the process if that is not 0."""
        about = (self.ahead, self.store, "imaginary", True, self.tell)
        tuner = Tuner(torch.device("cpu"), self._left, *about)
        for step in plan:
            if isinstance(step, Choice):
                tuner.compile(step)
        requests = [
            {"job": step.name, "broken": self.broken.get(step.name, {}), "alone": False}
            for step in plan
        ]
        runs = {step.name: partial(tuner.run, step) for step in plan}
        try:
            with mock.patch.object(verification, "run", self.verify):
                code = serve(runs, self.bench, self.tell, requests)
        finally:
            choices.forget()
            tiles.install((), -1)
        return self._done + [code] * (code != 0)


def prepare_lookups(implementation, case, inputs, expected, issued=None):
    """In place of kernels, which the interpreter takes seconds for: what they look up."""
    kernels = ["forward"] if case.direction == "forward" else ["forward", "backward_dq"]
    ours = implementation.name == "fastattn-triton"
    return (lambda: [tiles.lookup(kernel, 4, 16) for kernel in kernels if ours]), {}


HERE = Environment("imaginary", 4, "1.0", "2.0", "3.0", "0123456789abcdef")
TIMES = {A: 3.0, B: 1.0, C: 2.0}
OF_DQ = {("backward_dq", tile): ms for tile, ms in TIMES.items()}
WINS = "(16, 32, 4, 1) in place of (32, 16, 4, 1): 66.7 % less time"


@pytest.fixture
def lookups_alone(monkeypatch):
    monkeypatch.setattr(trial, "prepare", prepare_lookups)
    monkeypatch.setattr(trial, "release", lambda: None)


@pytest.mark.parametrize("kernel", [*tiles.KERNELS, "decode"])
def test_the_fastest_tile_is_found_and_forced_for_its_kernel_alone(kernel):
    run = Run({(kernel, A): 3.0, (kernel, B): 1.0, (kernel, C): 2.0})
    one = choice(kernel)
    if kernel.startswith("backward"):
        one = replace(one, cases=one.cases[:1])
    (record,) = run.run([one])
    assert (record["step"], record["text"]) == (f"tiles: {kernel} plain 4 bytes D 64", WINS)
    ((kind, row),) = run.store.rows
    assert kind == record["kind"] == "tiles" and row.items() >= choice(kernel).key.items()
    assert row == record["row"] | {"arch": "imaginary"}
    assert (row["BLOCK_M"], row["BLOCK_N"], row["gain"]) == (16, 32, 0.6667)
    assert (row["ms"], row["ms_shipped"]) == (1.0, 3.0)
    assert ("ms_full" in row) == (kernel == "forward")
    assert [tried["ms"] for tried in record["tried"]] == [3.0, 1.0, 2.0]
    assert run.ahead.submitted == [NAMES[tile] for tile in (A, B, C)]
    assert run.notes[1:] == [
        f"{n} of 3; best so far (16, 32, 4, 1) 1 ms, 66.7 % less" for n in (2, 3)
    ]


def test_what_is_not_surely_faster_does_not_win(lookups_alone):
    """The shipped tile is stored as measured, and as what stays."""
    run = Run({A: 3.0, B: 2.95, C: 9.0})
    (record,) = run.run([choice()])
    assert record["text"] == "(32, 16, 4, 1) stays: nothing else saves more than 3 %"
    ((_, row),) = run.store.rows
    assert (row["BLOCK_M"], row["gain"], row["ms"], row["ms_shipped"]) == (32, 0.0, 3.0, 3.0)


def test_a_tile_that_won_is_in_use_where_backends_are_compared(lookups_alone):
    """Its own time is that of the backend then."""
    names = ("triton", "torch")
    made = [Candidate(name, f"fastattn-{name}", {}, {"backend": name}) for name in names]
    key = {"direction": "forward", "dtype": "float32", "head_dim": 64}
    backends = Choice("backends", key, (FORWARD,), tuple(made))
    run = Run(TIMES)
    run.run([choice(), backends])
    assert run.store.rows[1][1]["ms"]["triton"] == 1.0
    assert run.store.rows[1][0] == "backends"


def test_tiles_that_do_not_compile_are_not_tried(lookups_alone):
    run = Run(TIMES, refused=(NAMES[B],))
    (record,) = run.run([choice()])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert record["tried"][1]["reason"] == "does not compile: no"


def test_candidates_that_compute_something_else_are_not_timed(monkeypatch):
    """In a head that no sample would have had."""

    def prepare(implementation, case, inputs, expected, issued):
        assert len(expected.exact) == case.B * case.H_k
        if tiles.lookup("forward", 4, 16) == B:
            raise AssertionError("o: error 1 exceeds the budget 0")
        return prepare_lookups(implementation, case, inputs, expected)

    monkeypatch.setattr(trial, "prepare", prepare)
    many = replace(choice(), cases=(replace(FORWARD, B=3, H_q=4, H_k=2),))
    run = Run(TIMES)
    (record,) = run.run([many])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert "exceeds the budget" in record["tried"][1]["reason"]


def test_where_the_shipped_tile_does_not_run_the_fastest_other_one_does(lookups_alone):
    run = Run({B: 1.0, C: 2.0}, refused=(NAMES[A],))
    (record,) = run.run([choice()])
    assert record["text"] == "(16, 32, 4, 1) in place of (32, 16, 4, 1): does not compile: no"
    assert run.store.rows[0][1]["gain"] == 1.0 and "ms_shipped" not in run.store.rows[0][1]


def test_what_is_not_right_is_not_timed_and_what_is_known_is_not_verified_again(lookups_alone):
    run = Run(TIMES, verdict="hang")
    known = {"backend": "triton", "family": "forward", "dtype": "float32", "head_dim": 64}
    run.store.before["verification"] = [known | {"verdict": "right"}]
    records = run.run([VERIFY, choice(), choice("backward_dq"), VERIFY])
    assert run.verified == [(("triton",), ("backward",), ("float32",), True)]
    assert ("the verification", "waits") in run.announced and "1 of 1" in run.notes
    assert records[0]["text"] == records[3]["text"] == "triton backward: hang"
    assert records[1]["text"] == WINS
    assert records[2]["text"] == "verification of triton backward says: hang"
    assert [kind for kind, _ in run.store.rows] == ["verification", "tiles"]


def test_a_choice_ends_in_time(lookups_alone):
    """The shipped tile alone says nothing."""
    left = iter([1.0, *[-1.0] * 100])
    run = Run(TIMES, left=lambda: next(left))
    (record,) = run.run([choice()])
    assert record["text"] == "nothing was compared: the time was up"
    assert len(record["tried"]) == 1 and not run.store.rows


def test_who_loses_the_device_is_named_and_not_tried_in_the_next_process(monkeypatch):
    """Only in the choice where it did."""
    run = Run({**TIMES, **OF_DQ})

    def prepare(*arguments, issued):
        if tiles.lookup("backward_dq", 4, 16) == B:
            monkeypatch.setattr(run.bench.timer, "synchronize", lost)
            raise RuntimeError("an illegal memory access was encountered")
        return prepare_lookups(*arguments)

    def lost():
        raise RuntimeError("the context is lost")

    monkeypatch.setattr(trial, "prepare", prepare)
    plan = [choice(), choice("backward_dq"), choice("backward_dkv")]
    (first, code) = run.run(plan)
    assert (first["text"], code, run.announced[-1][0]) == (WINS, LOST, NAMES[B])
    again = Run({**TIMES, **OF_DQ}, broken={plan[1].name: {NAMES[B]: "broke the device"}})
    (second, third) = again.run([plan[1], plan[0]])
    assert second["text"] == (
        "(16, 16, 4, 1) in place of (32, 16, 4, 1): 33.3 % less time; "
        "ended their processes: (16, 32, 4, 1)"
    )
    assert second["tried"][1]["reason"] == "ended its process: broke the device"
    assert third["row"]["BLOCK_N"] == B.BLOCK_N


def test_who_is_at_work_is_announced(lookups_alone):
    run = Run(TIMES)
    run.run([choice()])
    firsts = [("the compiler", "prepares"), ("the reference", "prepares"), (NAMES[A], "waits")]
    assert run.announced[:3] == firsts
    assert run.announced[3] == (NAMES[A], "prepares")
    # The finalists take turns.
    assert run.announced[-1] == ("the timing", "runs")


def test_a_shape_in_whose_place_the_portable_kernels_served_was_not_timed(monkeypatch):
    def prepare(*arguments, issued):
        if tiles.lookup("forward", 4, 16) == B:
            attend.uncompiled.append("a kernel of it does not compile here")
        return prepare_lookups(*arguments)

    monkeypatch.setattr(trial, "prepare", prepare)
    run = Run(TIMES)
    (record,) = run.run([choice()])
    assert run.store.rows[0][1]["BLOCK_N"] == C.BLOCK_N
    assert record["tried"][1]["reason"] == "RuntimeError: a kernel of it does not compile here"
    assert not attend.uncompiled


def child(command, environment):
    """`tune.run` with what `tune` gives it."""
    assert tune.__name__ in command[2] and environment["PYTHONSAFEPATH"] == "1"
    settings = json.loads(command[3])
    return FakeChild(lambda tell, requests: tune.run(tell=tell, requests=requests, **settings))


@pytest.fixture
def imaginary_gpu(monkeypatch):
    """A GPU with one step to verify and one choice; what is known about it, when it is asked."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: False)
    for name, value in {
        "is_available": True, "current_device": 0, "device": contextlib.nullcontext(),
        "set_device": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    gpu = Gpu("an unknown architecture", 2**16, 4, hopper=False)
    monkeypatch.setattr(tune, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(tune, "ChildProcess", child)
    monkeypatch.setattr(tune, "environment", lambda device: HERE)
    monkeypatch.setattr(tune, "steps", lambda shapes, gpu: [VERIFY, choice()])
    monkeypatch.setattr(tune, "gpu_bench", lambda which: Run(TIMES).bench)
    monkeypatch.setattr(tune, "Ahead", lambda arch: Run({}).ahead)
    asked = []

    def verify(scope, device, *, store, progress):
        assert choices.choices(device) == choices.Choices({}, {}, {}, {}, {}, 0)
        progress(1, 1, None)
        asked.append((scope.backends, scope.families, scope.dtypes, scope.head_dims, scope.quick))
        for family in scope.families:
            actual = Finding("triton", family, "float32", 64, 1, 0.5, "right", "case", "")
            store.put("verification", actual._asdict())
            yield actual

    monkeypatch.setattr(verification, "run", verify)
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
    actual = tune.tune(seconds=100, folder=tmp_path, show=shown.append)
    assert actual.steps == [
        tune.Record(VERIFY.name, "done", "all right"), tune.Record(choice().name, "done", WINS),
    ]  # fmt: skip
    assert imaginary_gpu == [(("triton",), ("forward", "backward"), ("float32",), (64,), True)]
    (row,) = Store(HERE, tmp_path).read("tiles")
    assert (row["BLOCK_M"], row["arch"]) == (16, "an unknown architecture")
    assert actual.rows[0][1].items() <= row.items() and len(actual.tried) == 3
    assert actual.folder == Store(HERE, tmp_path).folder
    assert [(p.number, p.steps, p.text) for p in shown if p.done] == [
        (1, 2, "all right"),
        (2, 2, WINS),
    ]
    assert "1 of 1" in [progress.text for progress in shown]
    assert choices.choices(device).passes
    # Another run knows what is right.
    tune.tune(seconds=100, folder=tmp_path)
    assert len(imaginary_gpu) == 1
    # And one without time does nothing.
    nothing = tune.tune(seconds=0, folder=tmp_path)
    assert {step.status for step in nothing.steps} == {"not reached"} and not nothing.rows


def test_what_was_found_survives_an_end_in_the_middle(lookups_alone, tmp_path):
    """Each winner is on disk before the next step begins, whatever ends the process then."""

    class Killed(BaseException):
        pass

    class Cut(Run):
        def tell(self, **message):
            if message.get("at") == "the compiler" and self._done:
                raise Killed
            super().tell(**message)

    store = Store(environment("cpu"), tmp_path)
    plan = [VERIFY, choice(), choice("backward_dq")]
    with pytest.raises(Killed):
        Cut(TIMES, store=store).run(plan[1:])
    (row,) = store.read("tiles")
    assert (row["kernel"], row["BLOCK_M"], row["arch"]) == ("forward", 16, "imaginary")
    # Another run goes on with what has no finding yet.
    assert tune.unknown_first(plan, store) == [VERIFY, plan[2], plan[1]]


def test_without_a_gpu_nothing_is_tuned(monkeypatch):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU: torch sees no CUDA device"):
        tune.tune(seconds=1)
