"""A tuner whose candidates take planned times, for tests: nothing is compiled, nothing timed."""

from dataclasses import replace

import pytest

from fastattn.bench.cases.case import Case
from fastattn.bench.time.ahead import Ahead
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.bench.tune import trial
from fastattn.bench.tune.choices import KERNEL_OF, Choice, tile_candidate
from fastattn.bench.tune.plan import Verification
from fastattn.bench.tune.tuner import Tuner
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig

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
    """Nothing is compiled ahead; some tiles are known not to be worth a launch."""

    def __init__(self, refused=()):
        super().__init__("an unknown architecture", pool=object())
        self.refused, self.submitted = refused, []

    def submit(self, key, cases, implementations=None, forced=None):
        self.submitted.append(key[1])

    def why_not(self, key, seconds, kernel=None):
        kind, name, *_ = key[0].split()
        assert kernel == (KERNEL_OF[name] if kind == "tiles:" else None)
        return "spills 8 bytes a thread" if key[1] in self.refused else None


def right(step, show):
    return {(*pair, step.dtype, step.head_dim): "right" for pair in step.families}


class Kept:
    """Findings in memory. rows: what a run stored. before: what earlier ones did, by kind."""

    def __init__(self, before):
        self.rows, self.before = [], before

    def read(self, kind):
        return [{"date": "2000-01-01", **row} for row in self.before.get(kind, ())]

    def put(self, kind, row):
        self.rows.append((kind, row))


def tuner(times, left=lambda: 1.0, refused=(), verify=right, before=(), **more) -> Tuner:
    """A run in which tiles take the given milliseconds; `store.rows` has what it stores."""
    by_kernel = {
        ("forward", key) if isinstance(key, TileConfig) else key: x for key, x in times.items()
    }
    bench = Bench(Planned(by_kernel), QUICK, sleep=lambda seconds: None, expected=trial.expect_all)
    more.setdefault("store", Kept(dict(before)))
    return Tuner(bench, left, NothingAhead(refused), arch="imaginary", verify=verify, **more)


def prepare_lookups(implementation, case, inputs, expected):
    """In place of kernels, which the interpreter takes seconds for: what they look up."""
    kernels = ["forward"] if case.direction == "forward" else ["forward", "backward_dq"]
    ours = implementation.name == "fastattn-triton"
    return (lambda: [tiles.lookup(kernel, 4, 16) for kernel in kernels if ours]), {}
