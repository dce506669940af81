"""Kernels of a run, compiled in worker processes before they are launched.

The workers fill Triton's disk cache under the keys that the launches look up: their tensors have
the sizes, strides and dtypes of the case, and uninitialised contents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from ... import dispatch
from ...ops import attend
from ...testing.compiling.compile_pool import CompilePool
from ...testing.compiling.cross_compile import TARGETS
from ..attention import work_from_nothing
from ..cases import Case
from ..failures import log
from ..implementations.fp8 import EIGHT_BITS
from ..implementations.registry import IMPLEMENTATIONS
from ..inputs import make_inputs
from .jobs import Job

TRITONS = ("fastattn-triton", "fastattn-one-pass", "fastattn-hopper", "fastattn-hopper-one-pass")
_SMALL = 256  # tokens


def launch(case: Case, implementation: str) -> None:
    """Launch the kernels of a case, to be compiled only: runs in a process of `CompilePool`."""
    found = next(i for i in IMPLEMENTATIONS if i.name == implementation)
    here = replace(case, device="cpu")
    inputs = make_inputs(here, empty=True)
    with (
        mock.patch.object(dispatch, "why_not_triton", lambda *tensors: None),
        mock.patch.object(attend, "on_hopper", lambda device: True),
    ):
        work_from_nothing(here, found.prepare(here, inputs), inputs)()


def small(case: Case) -> Case:
    """A case of fewer tokens that launches the same kernels: no length is compiled in."""
    if case.family == "decode":
        return case  # the number of splits depends on its length
    lengths = None if case.lengths is None else (_SMALL,)
    return replace(case, B=1, T_q=_SMALL, T_k=_SMALL, lengths=lengths, label="", slow_peers=True)


class Precompiler:
    """Compiles all kernels that the jobs launch, in the order of the jobs.

    Args:
        jobs: the jobs of the run.
        arch: name of the GPU's architecture. One that `cross_compile.TARGETS` lacks compiles
            nothing ahead.
        workers: processes; default all but four of the machine's CPUs.
        pool: compiles; default a `CompilePool` of that many.
    """

    def __init__(
        self, jobs: Iterable[Job], arch: str, workers: int | None = None, pool: Any = None
    ) -> None:
        self._pool = pool or CompilePool(workers or max(1, (os.cpu_count() or 1) - 4))
        self._by_job: dict[str, list[Future[Any]]] = {}
        started: dict[tuple[Case, str], Future[Any]] = {}
        with _without_gpu():
            for job in jobs if arch in TARGETS else ():
                needed = []
                for case, name in _launches(job):
                    key = (small(case), name)
                    if key not in started:
                        # Quantising to 8 bits computes on the inputs, so it gets the smaller case.
                        of = key[0] if name in EIGHT_BIT_NAMES else case
                        started[key] = self._pool.submit(
                            f"{__name__}:launch", arch, case=of, implementation=name
                        )
                    needed.append(started[key])
                self._by_job[job.name] = needed

    def ready(self, job: str, seconds: float = 60.0) -> None:
        """Wait until a job's kernels are compiled, at most `seconds`.

        An error goes to the log: its launch compiles again, and raises there.
        """
        futures = self._by_job.pop(job, [])
        for future in wait(futures, timeout=seconds).done:
            if (error := future.exception()) is not None:
                log(f"ahead of {job}", error)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


EIGHT_BIT_NAMES = tuple(i.name for i in EIGHT_BITS)


def _launches(job: Job) -> Iterator[tuple[Case, str]]:
    for case in job.compiles:
        for found in IMPLEMENTATIONS:
            if found.name in (*TRITONS, *EIGHT_BIT_NAMES) and found.why_not(case) is None:
                yield case, found.name


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Processes that start in the block see no GPU, on which they would only take memory."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        yield
