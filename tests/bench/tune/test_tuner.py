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
from fastattn.bench.time.measure import serve
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.bench.tune import trial, tune
from fastattn.bench.tune.plan import Choice, Gpu, tile_candidate
from fastattn.bench.tune.tune import VERIFICATION, Tuner, verification
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.ops import attention_ops
from fastattn.tuned import choices
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

QUICK = Effort(warm_up=0, target_ms=0, least=1, most=10, pause=0)
A, B, C = TileConfig(32, 16), TileConfig(16, 32), TileConfig(16, 16)
NAMES = {A: "(32, 16, 4, 1)", B: "(16, 32, 4, 1)", C: "(16, 16, 4, 1)"}
FORWARD = Case("forward", "forward", 1, 1, 1, 20, 20, 16, True, dtype="float32", device="cpu")
BACKWARD = replace(FORWARD, family="backward", direction="backward")
DECODE = replace(FORWARD, family="decode", T_q=1, layout="bhtd")
HERE = Environment("imaginary", 4, "1.0", "2.0", "3.0", "0123456789abcdef")
TIMES = {("forward", A): 3.0, ("forward", B): 1.0, ("forward", C): 2.0}
OF_DQ = {("backward_dq", tile): ms for (_, tile), ms in TIMES.items()}
WINS = "(16, 32, 4, 1) in place of (32, 16, 4, 1): 66.7 % less time"


def choice(kernel="forward") -> Choice:
    """Three tiles of a kernel; A is the shipped one."""
    case = {"forward": FORWARD, "decode": DECODE}.get(kernel, BACKWARD)
    cases = (case, replace(case, causal=False)) if kernel == "forward" else (case,)
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
        with mock.patch.object(tiles, "lookup", remember):
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


class Run:
    """A run in which tiles take the given milliseconds.

    notes: told on the way. announced: who was at work, and at what. rows: what was stored.
    verified: scopes. verdict: of every family that is verified.
    """

    def __init__(self, folder, times, refused=(), verdict="right", broken=None, left=lambda: 1.0):
        self.bench = Bench(Planned(times), QUICK, expected=trial.expect_all)
        self.store, self.ahead, self.verdict = Store(HERE, folder), NothingAhead(refused), verdict
        self.broken, self.verified, self.notes, self.announced = broken or {}, [], [], []
        self._left, self._done = left, []

    def tell(self, **message):
        self.notes += [message["note"]] if "note" in message else []
        self.announced += [(message["at"], message.get("doing"))] if "at" in message else []
        self._done += message.get("records", [])

    def verify(self, scope, device, *, store, left, again):
        known = {row["family"] for row in store.read("verification") if not again}
        families = [family for family in scope.families if family not in known]
        self.verified.append((families, [*scope.dtypes], [*scope.head_dims], scope.quick, left()))
        for family in families:
            about = {"backend": "triton", "family": family, "verdict": self.verdict}
            store.put("verification", {**about, "dtype": "float32", "head_dim": 64})
            yield family

    def run(self, *plan):
        """The records of jobs: choices, or verification of all of them."""
        about = (self.ahead, self.store, "imaginary", True, self.tell)
        tuner = Tuner(torch.device("cpu"), self._left, *about)
        choices_of = {step.name: step for step in plan if step != VERIFICATION}
        for choice_of in choices_of.values():
            tuner.compile(choice_of)
        runs = {name: partial(tuner.choose, step) for name, step in choices_of.items()}
        runs[VERIFICATION] = partial(tuner.verify, choices_of.values())
        names = [step if step == VERIFICATION else step.name for step in plan]
        requests = [{"job": name, "broken": self.broken.get(name, {})} for name in names]
        try:
            with mock.patch.object(verification, "run", self.verify):
                serve(runs, self.bench, self.tell, requests)
        finally:
            choices.forget()
            tiles.install((), -1)
        return self._done


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Makes runs that store in one folder."""
    monkeypatch.setattr(trial, "release", lambda: None)
    return partial(Run, tmp_path)


@pytest.fixture
def prepares(monkeypatch):
    """In place of kernels, which the interpreter takes seconds for: `before`, and their lookups."""

    def install(before=lambda *arguments: None):
        def prepare(implementation, case, *tensors, issued):
            before(case, *tensors)
            kernels = ["forward"] if case.direction == "forward" else ["forward", "backward_dq"]
            ours = implementation.name == "fastattn-triton"
            return (lambda: [tiles.lookup(kernel, 4, 16) for kernel in kernels if ours]), {}

        monkeypatch.setattr(trial, "prepare", prepare)

    install()
    return install


@pytest.mark.parametrize("kernel", [*tiles.KERNELS, "decode"])
def test_the_fastest_tile_is_found_and_forced_for_its_kernel_alone(kernel, run_of):
    run = run_of({(kernel, A): 3.0, (kernel, B): 1.0, (kernel, C): 2.0})
    (record,) = run.run(choice(kernel))
    assert (record["step"], record["text"]) == (f"tiles: {kernel} plain 4 bytes D 64", WINS)
    (row,) = run.store.read("tiles")
    assert row.items() >= choice(kernel).key.items() and record["kind"] == "tiles"
    assert row == record["row"] | {"arch": "imaginary", "date": row["date"]}
    assert (row["BLOCK_M"], row["BLOCK_N"], row["gain"]) == (16, 32, 0.6667)
    assert (row["ms"], row["ms_shipped"]) == (1.0, 3.0)
    assert ("ms_full" in row) == (kernel == "forward")
    assert [tried["ms"] for tried in record["tried"]] == [3.0, 1.0, 2.0]
    assert run.ahead.submitted == [NAMES[tile] for tile in (A, B, C)]
    best = "best so far (16, 32, 4, 1) 1 ms, 66.7 % less"
    assert run.notes[1:] == [f"2 of 3; {best}", f"3 of 3; {best}"]
    firsts = [("the compiler", "prepares"), ("the reference", "prepares")]
    assert run.announced[:4] == [*firsts, (NAMES[A], "waits"), (NAMES[A], "prepares")]
    assert run.announced[-1] == (NAMES[A], "runs")


STAYS = f"{NAMES[A]} stays: nothing else saves more than 3 %"
C_WINS = f"{NAMES[C]} in place of {NAMES[A]}: 33.3 % less time"
B_RUNS = f"{NAMES[B]} in place of {NAMES[A]}: does not compile: no"
NOTHING = "nothing was compared: does not compile: no"


@pytest.mark.parametrize(
    ("of_b", "refused", "text", "stored"),
    [
        # The shipped tile is stored as measured, and as what stays.
        (2.95, [C], STAYS, {"BLOCK_M": 32, "gain": 0.0, "ms": 3.0, "ms_shipped": 3.0}),
        (1.0, [B], C_WINS, {"BLOCK_N": 16, "ms_shipped": 3.0}),
        # Where the shipped tile does not run, the fastest other one does.
        (1.0, [A], B_RUNS, {"BLOCK_M": 16, "gain": 1.0}),
        (1.0, [A, B, C], NOTHING, None),
    ],
)
def test_what_is_surely_faster_wins(of_b, refused, text, stored, run_of, prepares):
    run = run_of(TIMES | {("forward", B): of_b}, [NAMES[tile] for tile in refused])
    (record,) = run.run(choice())
    assert record["text"] == text
    failed = [x.get("reason") == "does not compile: no" for x in record["tried"]]
    assert failed == [tile in refused for tile in NAMES]
    rows = run.store.read("tiles")
    assert [row.items() >= stored.items() for row in rows] == [True] if stored else rows == []
    assert not rows or ("ms_shipped" in rows[0]) == (A not in refused)


def wrong(case, inputs, expected):
    """In a head that no sample would have had."""
    assert len(expected) == case.B * case.H_k
    if tiles.lookup("forward", 4, 16) == B:
        raise AssertionError("o: error 1 exceeds the budget 0")


def replaced(*arguments):
    if tiles.lookup("forward", 4, 16) == B:
        attention_ops.uncompiled.append("no kernel")


@pytest.mark.parametrize(
    ("before", "reason"),
    [(wrong, "o: error 1 exceeds the budget 0"), (replaced, "RuntimeError: no kernel")],
)
def test_what_computes_something_else_or_elsewhere_is_not_timed(before, reason, run_of, prepares):
    prepares(before)
    run = run_of(TIMES)
    (record,) = run.run(replace(choice(), cases=(replace(FORWARD, B=3, H_q=4, H_k=2),)))
    assert run.store.read("tiles")[0]["BLOCK_N"] == C.BLOCK_N
    assert record["tried"][1]["reason"] == reason and not attention_ops.uncompiled


def test_what_is_not_right_is_not_timed_and_what_is_known_is_not_verified_again(run_of, prepares):
    run = run_of(TIMES, verdict="hang")
    known = {"backend": "triton", "family": "forward", "dtype": "float32", "head_dim": 64}
    run.store.put("verification", known | {"verdict": "right"})
    records = run.run(VERIFICATION, choice(), choice("backward_dq"), VERIFICATION)
    assert [families for families, *_ in run.verified] == [["backward"], []]
    assert ("verification", "waits") in run.announced and run.notes[0] == "backward"
    assert records[0]["text"] == records[3]["text"] == "triton backward float32 64 hang"
    assert records[1]["text"] == WINS
    assert records[2]["text"] == "verification of triton backward says: hang"
    assert [row["kernel"] for row in run.store.read("tiles")] == ["forward"]


def test_a_choice_ends_in_time(run_of, prepares):
    """The shipped tile alone says nothing."""
    left = iter([1.0, *[-1.0] * 100])
    run = run_of(TIMES, left=lambda: next(left))
    (record,) = run.run(choice())
    assert record["text"] == "nothing was compared: the time was up"
    assert len(record["tried"]) == 1 and not run.store.read("tiles")


def test_who_loses_the_device_is_not_tried_in_its_next_process(run_of, prepares, monkeypatch):
    """Only in the choice where it did."""
    run = run_of({**TIMES, **OF_DQ})

    def breaks(*arguments):
        if tiles.lookup("backward_dq", 4, 16) == B:
            lost = mock.Mock(side_effect=RuntimeError("the context is lost"))
            monkeypatch.setattr(run.bench.timer, "synchronize", lost)
            raise RuntimeError("an illegal memory access was encountered")

    prepares(breaks)
    plan = [choice(), choice("backward_dq"), choice("backward_dkv")]
    with pytest.raises(RuntimeError, match="the context is lost"):
        run.run(*plan)
    assert run.announced[-1][0] == NAMES[B]
    # Each winner is on disk before the next step begins; another run goes on with the others.
    assert [row["kernel"] for row in run.store.read("tiles")] == ["forward"]
    assert tune.unknown_first(plan, run.store) == [plan[1], plan[2], plan[0]]
    again = run_of({**TIMES, **OF_DQ}, broken={plan[1].name: {NAMES[B]: "broke the device"}})
    (second, third) = again.run(plan[1], plan[0])
    saved = f"{NAMES[C]} in place of {NAMES[A]}: 25.0 % less time"
    assert second["text"] == f"{saved}; ended their processes: {NAMES[B]}"
    assert second["tried"][1]["reason"] == "ended its process: broke the device"
    assert third["row"]["BLOCK_N"] == B.BLOCK_N


def test_on_a_gpu_it_verifies_times_and_stores(run_of, prepares, tmp_path, monkeypatch):
    """A made-up GPU with one choice.

    Earlier findings count for nothing meanwhile, and are read again afterwards.
    """

    def child(command, environment):
        """`tune.run` with what `tune` gives it."""
        assert tune.__name__ in command[2] and environment["PYTHONSAFEPATH"] == "1"
        return FakeChild(partial(tune.run, json.loads(command[3])))

    run = run_of(TIMES)
    key = {"backend": "triton", "dtype": "float32", "head_dim": 64}
    for module, name, value in (
        (torch.cuda, "is_available", True),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "set_device", None),
        (torch.cuda, "device", contextlib.nullcontext()),
        (dispatch, "on_hopper", False),
        (tune, "gpu_of", Gpu("an unknown architecture", 2**16, 4, hopper=False)),
        (tune, "environment", HERE),
        (tune, "gpu_bench", run.bench),
        (tune, "Ahead", run.ahead),
        (tune, "plan_of", [choice()]),
        (choices, "applies", True),
        (choices, "read", {"passes": [{**key, "passes": "two", "date": "2000-01-01"}]}),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr(tune, "ChildProcess", child)
    device = torch.device("cuda", 0)
    assert choices.choices(device).passes

    def verify(*arguments, **options):
        assert not any(choices.choices(device)[1:6])
        yield from run.verify(*arguments, **options)

    monkeypatch.setattr(verification, "run", verify)
    shown = []
    actual = tune.tune(seconds=100, folder=tmp_path, show=shown.append)
    texts = {VERIFICATION: "all right", choice().name: WINS}
    assert actual.steps == [tune.Record(name, "done", text) for name, text in texts.items()]
    (of, dtypes, head_dims, quick, left) = run.verified[0]
    assert (of, dtypes, head_dims, quick) == (["forward"], ["float32"], [64], True)
    assert 40 < left <= 50
    (row,) = run.store.read("tiles")
    assert (row["BLOCK_M"], row["arch"]) == (16, "an unknown architecture")
    assert actual.rows[0][1].items() <= row.items() and len(actual.tried) == 3
    assert actual.folder == run.store.folder
    done = [(p.number, p.steps, p.text) for p in shown if p.done]
    assert done == [(1, 2, "all right"), (2, 2, WINS)]
    assert "1 of 3; best so far (32, 16, 4, 1) 3 ms, 0.0 % less" in [p.text for p in shown]
    assert choices.choices(device).passes
    choices.forget()
    # Another run knows what is right, and one without time does nothing.
    tune.tune(seconds=100, folder=tmp_path)
    assert run.verified[1][0] == []
    nothing = tune.tune(seconds=0, folder=tmp_path)
    assert {step.status for step in nothing.steps} == {"not reached"} and not nothing.rows


def test_without_a_gpu_nothing_is_tuned(monkeypatch):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU: torch sees no CUDA device"):
        tune.tune(seconds=1)


SHIPPED = [[10.0] * 10, [20.0] * 10]


def scaled(*factors: float) -> list[list[float]]:
    """Ten samples of each case, the shipped one's times these factors in turn."""
    return [[ms * f for ms, f in zip(of, factors * 10, strict=False)] for of in SHIPPED]


FAST, SLOW = [0.9] * 6, [1.0] * 4


@pytest.mark.parametrize(
    ("samples", "wins"),
    [
        (scaled(0.971), False),
        (scaled(0.969), True),
        # The median of all samples is 8 % less, for a while that the GPU was cooler.
        (scaled(*FAST, *SLOW), False),
        (scaled(*SLOW, *FAST), False),
        (scaled(0.9, 0.95), True),
        # Faster where all is causal by as much as it is slower elsewhere.
        ([[8.0] * 10, [24.0] * 10], False),
        ([[8.0] * 10, [20.0] * 10], True),
    ],
)
def test_a_winner_saves_more_than_three_percent_in_both_halves(samples, wins):
    assert bool(trial.winner(SHIPPED, {"other": samples})) == wins


def test_the_halves_are_of_every_case_and_of_an_odd_number_too():
    assert trial.score([[1.0], [2.0]]) == 4.0 and trial.score([[3.0]]) == 3.0
    shipped = [[10.0] * 3, [10.0] * 5]
    # The middle sample belongs to both halves.
    assert trial.winner(shipped, {"other": [[5.0] * 3, [5.0] * 3 + [10.0] * 2]}) is not None
    assert trial.winner(shipped, {"other": [[5.0, 10.0, 10.0], [10.0] * 5]}) is None


def test_the_fastest_that_beats_the_shipped_one_wins():
    noisy = {"noisy": scaled(*[0.7] * 6, *[1.0] * 4), "the same": SHIPPED}
    others = {**noisy, "slower": scaled(0.9), "fast": scaled(0.8)}
    assert trial.winner(SHIPPED, others) == ("fast", pytest.approx(0.2))
    assert trial.winner(SHIPPED, noisy) is trial.winner(SHIPPED, {}) is None
