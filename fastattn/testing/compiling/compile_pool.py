"""Cross compilation from a process that interprets its kernels.

Triton binds kernels to its interpreter or its compiler when they are imported, so compile jobs run
in worker processes that start without TRITON_INTERPRET. A job is a function that launches kernels;
it is named by a string, and it is imported in the worker.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

from .cross_compile import CompiledFacts, compiling_for, describe
from .named_functions import load_job

_Case = TypeVar("_Case")
_OUTPUT_SHOWN = 2000  # characters: enough for MLIR's diagnostic, not for the module after it


def compiled_cases(always: Iterable[_Case], at_leisure: Iterable[_Case]) -> list[_Case]:
    """What a test file compiles: some of each kind, and the rest if FASTATTN_COMPILE_ALL is 1.

    A kernel takes seconds to compile for each GPU, head dim, dtype and mask.
    """
    every = os.environ.get("FASTATTN_COMPILE_ALL") == "1"
    return [*always, *(at_leisure if every else ())]


class CrossCompileError(RuntimeError):
    """A job failed in its worker; the message says which, for which target, and why."""


class CompilePool:
    """Worker processes that compile kernels for any of `cross_compile.TARGETS`.

    Jobs are named as `load_job` has it and called with the keyword arguments of the request; those
    and what comes back travel between processes, so they must be picklable.

    Args:
        workers: processes at most; default two, or one on a machine with one CPU. They start with
            the first jobs, and keep what they compiled for the next.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or min(2, os.cpu_count() or 1)
        self._executor: ProcessPoolExecutor | None = None

    def facts(self, job: str, target: str, **kwargs: Any) -> list[CompiledFacts]:
        """The facts of every kernel that the job launched for `target`, each once, in order.

        Raises:
            CrossCompileError: the job raised, the compiler refused a kernel, or the worker died.
        """
        facts: list[CompiledFacts] = self._finish(_facts, job, target, kwargs)
        return facts

    def submit(self, job: str, target: str, **kwargs: Any) -> "Future[list[CompiledFacts]]":
        """`facts` without waiting for them: they are the result() of the future."""
        return self._start(_facts, job, target, kwargs)

    def call(self, job: str, target: str, **kwargs: Any) -> Any:
        """What the job returns, run in a worker while `target` is the GPU; errors as in `facts`.

        A job may use `cross_compile.count_compilations` to say what a second launch compiled.
        """
        return self._finish(_call, job, target, kwargs)

    def close(self) -> None:
        """End the workers. The pool can be used again, with new ones."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, run: Callable[..., Any], job: str, target: str, kwargs: dict[str, Any]
    ) -> "Future[Any]":
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self._workers, mp_context=context)
        with _without_interpreter():
            return self._executor.submit(run, job, target, kwargs)

    def _finish(
        self, run: Callable[..., Any], job: str, target: str, kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._start(run, job, target, kwargs).result()
        except BrokenProcessPool:
            # Some errors abort the compiler's process; later jobs get new ones.
            self.close()
            raise CrossCompileError(f"{job} for {target}: the worker process died") from None


@contextlib.contextmanager
def _without_interpreter() -> Iterator[None]:
    """Processes started in the block inherit an environment without TRITON_INTERPRET."""
    value = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["TRITON_INTERPRET"] = value


def _facts(job: str, target: str, kwargs: dict[str, Any]) -> list[CompiledFacts]:
    with _readable_errors(job, target), compiling_for(target) as launched:
        load_job(job)(**kwargs)
        return [describe(kernel) for kernel in launched]


def _call(job: str, target: str, kwargs: dict[str, Any]) -> Any:
    with _readable_errors(job, target), compiling_for(target):
        return load_job(job)(**kwargs)


@contextlib.contextmanager
def _readable_errors(job: str, target: str) -> Iterator[None]:
    """Any error as a CrossCompileError, with the start of what the compilers printed.

    Triton's errors hold syntax trees and modules that cannot go back to the other process.
    """
    with tempfile.TemporaryFile() as output:
        try:
            with _output_to(output.fileno()):
                yield
        except Exception as error:
            output.seek(0)
            printed = output.read().decode(errors="replace").strip()[:_OUTPUT_SHOWN]
            reason = f"{type(error).__name__}: {error}"[:_OUTPUT_SHOWN]
            message = f"{job} for {target}: {reason}" + (f"\n{printed}" if printed else "")
            raise CrossCompileError(message) from None


@contextlib.contextmanager
def _output_to(file: int) -> Iterator[None]:
    """Send stdout and stderr to `file`, with what LLVM and child processes write to them."""
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, stream in zip(saved, (1, 2), strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
