"""Kernels compiled ahead: in order, each once, under the launch's cache key."""

import os
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import triton

from fastattn.bench.cases import case as cases
from fastattn.bench.cases.registry import CUDNN, ONE_PASS, OURS, PORTABLE
from fastattn.bench.cases.sets import FP8, every_row
from fastattn.bench.time import ahead
from fastattn.bench.time.ahead import Ahead
from fastattn.bench.time.jobs import Session, gpu_jobs
from fastattn.functional import call_memo
from fastattn.kernels import forward
from fastattn.kernels.launch import launches
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing.compiling.compile_pool import CompilePool, CrossCompileError
from fastattn.testing.compiling.cross_compile import compiling_for

FIRST = cases.sweep("forward", 64, 4096, causal=True)
KERNEL = "attention_forward_kernel"


class Pool:
    """Takes requests down; their results are for the test to give."""

    def __init__(self):
        self.requests, self.futures, self.closed = [], [], False

    def submit(self, job, target, **arguments):
        assert (job, target) == (f"{ahead.__name__}:launch", "sm_90")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        self.requests.append((arguments["case"].name, arguments["implementation"]))
        self.futures.append(Future())
        return self.futures[-1]

    def close(self):
        self.closed = True


def test_each_kernel_is_compiled_once_in_the_order_of_the_requests():
    pool = Pool()
    actual = Ahead("sm_90", pool=pool)
    backward = cases.sweep("backward", 64, 4096, causal=True)
    names = (CUDNN, OURS, PORTABLE, ONE_PASS, "fastattn-torch")
    for case in (FIRST, cases.sweep("forward", 64, 16384, causal=True), backward):
        actual.submit(case.name, [case], names)
    expected = [(FIRST.name, name) for name in (OURS, PORTABLE)]
    expected += [(backward.name, name) for name in (OURS, PORTABLE, ONE_PASS)]
    assert pool.requests == expected
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    for key in ("a tile", "it again"):
        actual.submit(key, [FIRST], [PORTABLE], {"forward": TileConfig(64, 64)})
    Ahead("unknown", pool=pool).submit("a", [FIRST], names)
    assert len(pool.requests) == len(expected) + 1
    actual.close()
    assert pool.closed


@pytest.mark.parametrize(
    ("end", "why_not"),
    [
        ([], None),
        (CrossCompileError("no such\n instruction"), "does not compile: no such instruction"),
        (None, "was not compiled in time"),  # Python 3.10 has two TimeoutErrors
    ],
)
def test_what_is_not_worth_a_launch(end, why_not):
    pool = Pool()
    actual = Ahead("sm_90", pool=pool)
    for name, D in {"a": 64, "b": 128}.items():  # b would be waited for for ever
        actual.submit(name, [replace(FIRST, D=D)], [PORTABLE])
    if end is not None:
        (pool.futures[0].set_exception if why_not else pool.futures[0].set_result)(end)
    assert actual.why_not("a", 0.0 if end is None else 1e6) == why_not
    assert actual.why_not("what launches nothing", 1e6) is None


def test_the_jobs_of_a_run_say_what_they_launch():
    jobs = gpu_jobs(Session("short", Path(), 500.0, lambda: 500.0, lambda **_: None))
    assert jobs[FIRST.name].compiles == ((FIRST, (OURS, CUDNN)),)
    assert jobs[cases.decode(1, 4096, graph=True).name].kinds == ("decode D 128 bfloat16",)
    ((case, names),) = jobs["training-T1024"].compiles
    assert (case.B * case.T_q, case.H_q * case.D, names) == (16384, 768, (OURS,))


def launched(case: cases.Case, name: str) -> list[str]:
    """Kernels that a case launches, none of them compiled."""
    names: list[str] = []

    def run(function, *arguments, **how):
        names.append(function.fn.__name__)

    with mock.patch.object(triton.JITFunction, "run", run):
        ahead.launch(case, name, {})
    return names


def launches_of_the_set() -> dict[str, list[str]]:
    """Kernels by case and name, of all that the short set compiles ahead."""
    found = {}
    for case, names in every_row("short"):
        for name in ahead.compiled(case, names):
            small = ahead.small(case) if name in FP8 or case.family != "decode" else case
            found[f"{case.name} {name}"] = launched(replace(small, device="cpu"), name)
    return found


def cache_hits() -> list[tuple[str, bool]]:
    """Kernels that a case launches after a smaller one, and whether the disk cache had them."""
    hits = []

    def note(*, src, cache_hit, **details):
        hits.append((src.name, cache_hit))

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with compiling_for("sm_90"), triton.knobs.compilation.scope():
            for case in (ahead.small(FIRST), replace(FIRST, B=4, T_q=16384, T_k=16384)):
                forget()
                triton.knobs.compilation.listener = note
                ahead.launch(case, PORTABLE, {})
    # Other tests of this process would look for the kernel in the folder, which is gone.
    forget()
    return hits


def forget() -> None:
    forward.attention_forward_kernel.device_caches.clear()
    call_memo.forget()
    launches.forget()


def test_every_row_of_the_short_set_launches_kernels(compile_pool: CompilePool):
    """In 8 bits too, whose inputs are drawn; no row draws inputs that only a compilation needs."""
    found = compile_pool.call(f"{__file__}:launches_of_the_set", "sm_90")
    assert len(found) > 100
    assert {name for name, kernels in found.items() if not kernels} == set()
    by_auto = {name: kernels for name, kernels in found.items() if name.endswith(" fastattn")}
    portable = {name.split("-")[0] for name, x in by_auto.items() if "hopper" not in str(x)}
    assert portable == {"decode"}


def test_what_is_compiled_ahead_is_what_is_launched(compile_pool: CompilePool):
    assert compile_pool.call(f"{__file__}:cache_hits", "sm_90") == [(KERNEL, False), (KERNEL, True)]
