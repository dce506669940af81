"""Kernels compiled ahead: in the order of the jobs, each once, under the launch's cache key."""

import os
import tempfile
from concurrent.futures import Future
from dataclasses import replace

import triton

from fastattn.bench import cases
from fastattn.bench.implementations.registry import IMPLEMENTATIONS, ONE_PASS, OURS
from fastattn.bench.run import precompile
from fastattn.bench.run.jobs import Job, gpu_jobs
from fastattn.bench.run.precompile import Precompiler
from fastattn.functional import call_memo
from fastattn.kernels import forward
from fastattn.kernels.launch import launches
from fastattn.testing.compiling.cross_compile import compiling_for

FIRST = cases.sweep("forward", 64, 4096, causal=True)


class Pool:
    """Takes requests down; their results are for the test to give."""

    def __init__(self):
        self.requests, self.futures, self.closed = [], [], False

    def submit(self, job, target, **arguments):
        self.requests.append((job, target, arguments["case"], arguments["implementation"]))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        self.futures.append(Future())
        return self.futures[-1]

    def close(self):
        self.closed = True


def job(case):
    return Job(case.name, lambda *_: [], compiles=(case,))


def test_each_kernel_is_compiled_once_in_the_order_of_the_jobs():
    pool = Pool()
    longer = cases.sweep("forward", 64, 16384, causal=True)
    backward = cases.sweep("backward", 64, 4096, causal=True)
    Precompiler([job(FIRST), job(longer), job(backward)], "sm_90", pool=pool)
    assert {(request[0], request[1]) for request in pool.requests} == {
        ("fastattn.bench.run.precompile:launch", "sm_90")
    }
    by_triton = [(case.name, name) for _, _, case, name in pool.requests if "hopper" not in name]
    assert by_triton == [(FIRST.name, OURS), (backward.name, OURS), (backward.name, ONE_PASS)]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"]


def test_a_job_waits_for_its_own_and_what_does_not_compile_is_in_the_log(capsys):
    pool = Pool()
    second = cases.sweep("forward", 128, 4096, causal=True)
    found = Precompiler([job(FIRST), job(second)], "sm_90", pool=pool)
    pool.futures[0].set_exception(RuntimeError("no such instruction"))
    found.ready(FIRST.name)  # would wait for ever for the second
    assert "no such instruction" in capsys.readouterr().err
    found.ready(second.name, seconds=0.0)
    found.ready("a job that launches nothing")
    found.close()
    assert pool.closed


def test_other_architectures_are_not_compiled_ahead():
    pool = Pool()
    Precompiler([job(FIRST)], "sm_999", pool=pool).ready(FIRST.name)
    assert pool.requests == []


def test_the_jobs_of_a_run_say_what_they_launch():
    by_name = {job.name: job for job in gpu_jobs("quick")}
    assert by_name[FIRST.name].compiles[0].D == 64
    (case,) = by_name["training-T1024"].compiles
    assert (case.B * case.T_q, case.H_q * case.D) == (16384, 768)


def cache_hits() -> list[tuple[str, bool]]:
    """Kernels that a case launches after a smaller one, and whether the disk cache had them."""
    found = []

    def note(*, src, cache_hit, **details):
        found.append((src.name, cache_hit))

    ours = next(i for i in IMPLEMENTATIONS if i.name == OURS)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with compiling_for("sm_90"):
            for case in (precompile.small(FIRST), replace(FIRST, B=4, T_q=16384, T_k=16384)):
                forward.attention_forward_kernel.device_caches.clear()
                call_memo.forget()
                launches.forget()
                triton.knobs.compilation.listener = note
                try:
                    precompile.launch(case, ours.name)
                finally:
                    triton.knobs.compilation.listener = None
    return found


def test_what_is_compiled_ahead_is_what_is_launched(compile_pool):
    kernel = "attention_forward_kernel"
    assert compile_pool.call(f"{__file__}:cache_hits", "sm_90") == [(kernel, False), (kernel, True)]


def test_who_is_compiled_ahead_exists():
    assert {*precompile.TRITONS, *precompile.EIGHT_BIT_NAMES} <= {i.name for i in IMPLEMENTATIONS}
