"""Compiles what a run launches in other processes, before it is asked for.

What they compile lands in Triton's disk cache, under the keys that the launches look it up by: the
tensors there have the sizes, strides and dtypes of the case, and no contents.
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
from ...ops import attention
from ...testing.compiling.compile_pool import CompilePool
from ...testing.compiling.cross_compile import TARGETS
from ..attention import work_from_nothing
from ..cases import Case
from ..failures import log
from ..implementations.fp8 import EIGHT_BITS
from ..implementations.registry import IMPLEMENTATIONS
from ..inputs import make_inputs
from .jobs import Job

_TRITONS = ("fastattn-triton", "fastattn-one-pass", "fastattn-hopper", "fastattn-hopper-one-pass")
_SMALL = 256  # tokens


def launch(case: Case, implementation: str) -> None:
    """Launch what measuring a case launches, for the stand-in driver of a compiling process."""
    found = next(i for i in IMPLEMENTATIONS if i.name == implementation)
    here = replace(case, device="cpu")
    inputs = make_inputs(here, empty=True)
    with (
        mock.patch.object(dispatch, "why_not_triton", lambda *tensors: None),
        mock.patch.object(attention, "on_hopper", lambda device: True),
    ):
        work_from_nothing(here, found.prepare(here, inputs), inputs)()


def small(case: Case) -> Case:
    """A case of fewer tokens that launches the same kernels, which no length is part of."""
    if case.family == "decode":
        return case  # it is split by its length
    lengths = None if case.lengths is None else (_SMALL,)
    return replace(case, B=1, T_q=_SMALL, T_k=_SMALL, lengths=lengths, label="", slow_peers=True)


class Ahead:
    """Starts with all that jobs will launch, the first jobs first.

    Args:
        jobs: to be run.
        arch: name of the GPU's architecture; for others than `cross_compile.TARGETS`, nothing is
            compiled ahead.
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
                        # Queries, keys and values in 8 bits are computed, which takes their length.
                        of = key[0] if name in _EIGHT_BITS else case
                        started[key] = self._pool.submit(
                            f"{__name__}:launch", arch, case=of, implementation=name
                        )
                    needed.append(started[key])
                self._by_job[job.name] = needed

    def ready(self, job: str, seconds: float = 60.0) -> None:
        """Wait until what a job launches is compiled, and not for ever.

        What did not compile is tried again, and fails, where it is launched.
        """
        futures = self._by_job.pop(job, [])
        for future in wait(futures, timeout=seconds).done:
            if (error := future.exception()) is not None:
                log(f"ahead of {job}", error)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


_EIGHT_BITS = tuple(i.name for i in EIGHT_BITS)


def _launches(job: Job) -> Iterator[tuple[Case, str]]:
    for case in job.compiles:
        for found in IMPLEMENTATIONS:
            if found.name in (*_TRITONS, *_EIGHT_BITS) and found.why_not(case) is None:
                yield case, found.name


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Processes that start in the block see no GPU, on which they would only take memory."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        yield
