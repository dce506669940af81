"""Candidates, compiled ahead in other processes: registers, spills and shared memory come back."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from ...kernels.launch import tiles
from ...testing.compiling.compile_pool import CompilePool, CrossCompileError
from ...testing.compiling.cross_compile import TARGETS, CompiledFacts
from ..cases import Case
from ..run import precompile
from .choices import Candidate, Choice


def launch(case: Case, candidate: Candidate) -> None:
    """Launch a candidate, to be compiled only: runs in a process of `CompilePool`."""
    with tiles.forced(**candidate.forced):
        precompile.launch(case, candidate.implementation)


def _small(case: Case) -> Case:
    """Fewer tokens; in decoding few rows, whose keys are split as those of few rows are."""
    return replace(case, B=1) if case.family == "decode" else precompile.small(case)


class Compilation:
    """Worker processes that compile candidates into Triton's disk cache before they are timed.

    Args:
        arch: name of the GPU's architecture. One that `cross_compile.TARGETS` lacks compiles
            nothing ahead.
        workers: processes.
    """

    def __init__(self, arch: str, workers: int) -> None:
        self._arch = arch
        self._pool = CompilePool(workers) if arch in TARGETS else None
        self._futures: dict[tuple[str, str], list[Future[list[CompiledFacts]]]] = {}

    def submit(self, choice: Choice, candidate: Candidate) -> None:
        """Start to compile a candidate for all cases of the choice."""
        if self._pool is not None and candidate.implementation != "fastattn-torch":
            self._futures[choice.name, candidate.name] = [
                self._pool.submit(
                    f"{__name__}:launch", self._arch, case=_small(case), candidate=candidate
                )
                for case in choice.cases
            ]

    def why_not(self, choice: Choice, candidate: Candidate, seconds: float) -> str | None:
        """Why a candidate is not worth a launch, waiting at most `seconds`; None if it is."""
        for future in self._futures.pop((choice.name, candidate.name), []):
            try:
                facts = future.result(timeout=max(0.0, seconds))
            except FutureTimeoutError:  # in Python 3.10 it is not the built-in one
                return "was not compiled in time"
            except BrokenProcessPool:
                continue  # a candidate crashed the compiler: the rest compile at their launch
            except Exception as error:
                return f"does not compile: {' '.join(str(error).split())[:200]}"
            for fact in facts:
                if fact.name != choice.kernel:
                    continue
                if fact.spills_in_loops:
                    return f"spills {fact.spill_store_bytes} bytes a thread"
                if not fact.fits_shared_memory:
                    return f"needs {fact.shared_bytes} bytes of shared memory"
        return None

    def facts(self, choice: Choice, candidate: Candidate) -> list[list[CompiledFacts]] | None:
        """The compiled kernels of a candidate in each of the cases; None if it does not compile."""
        try:
            futures = self._futures.pop((choice.name, candidate.name), [])
            return [future.result() for future in futures]
        except (CrossCompileError, BrokenProcessPool):
            return None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
