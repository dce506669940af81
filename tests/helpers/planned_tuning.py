"""A tuner whose candidates take planned times, for tests: nothing is compiled, nothing timed."""

from dataclasses import replace

import pytest
import torch

from fastattn.bench.cases.case import Case
from fastattn.bench.time.ahead import Ahead
from fastattn.bench.time.measure import serve
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.bench.tune import trial
from fastattn.bench.tune.choices import Choice, tile_candidate
from fastattn.bench.tune.plan import Verification
from fastattn.bench.tune.tuner import Tuner
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.tuned import choices

QUICK = Effort(warm_up=0, target_ms=0, least=1, most=10, pause=0)
A, B, C = TileConfig(32, 16), TileConfig(16, 32), TileConfig(16, 16)
NAMES = {A: "(32, 16, 4, 1)", B: "(16, 32, 4, 1)", C: "(16, 16, 4, 1)"}
FORWARD = Case("forward", "forward", 1, 1, 1, 20, 20, 16, True, dtype="float32", device="cpu")
BACKWARD = replace(FORWARD, family="backward", direction="backward")
DECODE = replace(FORWARD, family="decode", T_q=1, layout="bhtd")
VERIFY = Verification((("triton", "forward"), ("triton", "backward")), "float32", 64)


def choice(kernel="forward", calls="plain", **changes) -> Choice:
    """Three tiles of a kernel; A is the shipped one."""
    case = {"forward": FORWARD, "decode": DECODE}.get(kernel, BACKWARD)
    cases = (case,) if kernel == "decode" else (case, replace(case, causal=False))
    made = [tile_candidate(kernel, calls, tile) for tile in (A, B, C)]
    key = {"kernel": kernel, "calls": calls, "element_size": 4, "BLOCK_D": 64}
    return Choice("tiles", key, cases, tuple(made), **changes)


class Planned(HostTimer):
    """A call takes the times that are planned for the tile that is in force when it first runs.

    times: by kernel and tile: milliseconds, or a list of those of the call's samples.
    """

    def __init__(self, times):
        super().__init__()
        self.times = times

    def prepare(self, function):
        used, count = set(), iter(range(1000))
        lookup = tiles.lookup

        def remember(kernel, *sizes, **kind):
            tile = lookup(kernel, *sizes, **kind)
            used.add((kernel, tile))
            return tile

        call_memo.forget()
        launches.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "lookup", remember)
            function()

        def start():
            number = next(count)
            planned = [self.times[one] for one in used if one in self.times]
            ms = sum(x[number % len(x)] if isinstance(x, list) else x for x in planned)
            return lambda: ms

        return start


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

    said: what was told on the way. announced: who was at work, and at what. store: what was stored.
    verdict: of every family that is verified.
    """

    def __init__(
        self, times, left=lambda: 1.0, refused=(), store=None, verdict="right", broken=None
    ):
        by_kernel = {
            ("forward", key) if isinstance(key, TileConfig) else key: x for key, x in times.items()
        }
        self.bench = Bench(
            Planned(by_kernel), QUICK, sleep=lambda seconds: None, expected=trial.expect_all
        )
        self.store, self.ahead, self.verdict = store or Kept(), NothingAhead(refused), verdict
        self.broken, self.verified, self.notes, self.announced = broken or {}, [], [], []
        self._left, self._done = left, []

    def tell(self, **message):
        self.notes += [message["note"]] if "note" in message else []
        self.announced += [(message["at"], message.get("doing"))] if "at" in message else []
        self._done += message.get("records", [])

    def verify(self, step, show):
        self.verified.append(step.families)
        show("1 of 1")
        for backend, family in step.families:
            about = {"backend": backend, "family": family, "verdict": self.verdict}
            self.store.put("verification", {**about, "dtype": step.dtype, "head_dim": 64})

    def run(self, plan):
        """The records of the steps, and the exit code of the process if that is not 0."""
        device = torch.device("cpu")
        tuner = Tuner(
            device, self._left, self.ahead, self.store, "imaginary", self.verify, self.tell
        )
        for step in plan:
            if isinstance(step, Choice):
                tuner.compile(step)
        requests = [
            {"job": step.name, "broken": self.broken.get(step.name, {}), "alone": False}
            for step in plan
        ]
        try:
            code = serve([tuner.job(step) for step in plan], self.bench, self.tell, requests)
        finally:
            choices.forget()
            tiles.install((), -1)
        return self._done + [code] * (code != 0)


def prepare_lookups(implementation, case, inputs, expected, issued=None):
    """In place of kernels, which the interpreter takes seconds for: what they look up."""
    kernels = ["forward"] if case.direction == "forward" else ["forward", "backward_dq"]
    ours = implementation.name == "fastattn-triton"
    return (lambda: [tiles.lookup(kernel, 4, 16) for kernel in kernels if ours]), {}
