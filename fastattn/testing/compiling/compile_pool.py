"""Cross compilation from a process that interprets its kernels.

Triton binds kernels to its interpreter or compiler at import, so kernels are compiled in worker
processes without TRITON_INTERPRET. A worker imports a function by name and runs it; the function
launches kernels.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest import mock

from .cross_compile import CompiledFacts, compiling_for, describe
from .named_functions import load_function

_OUTPUT_SHOWN = 2000  # characters: enough for MLIR's diagnostic, not for the module after it


class CrossCompileError(RuntimeError):
    """Error: a function failed in its worker; with its name, the target and the error."""


class CompilePool(contextlib.AbstractContextManager["CompilePool"]):
    """Worker processes that compile kernels for any of `cross_compile.TARGETS`.

    Functions are named as in `load_function`. Arguments and results must be picklable. There are at
    most two workers, or one under pytest-xdist or with one CPU; they start on first use, and cache
    compiled kernels.
    """

    def __init__(self, workers: int | None = None) -> None:
        # Workers of pytest-xdist have pools of their own, and a start takes seconds of a CPU.
        sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._workers = workers or max(1, min(2, (os.cpu_count() or 1) // sharing))
        self._executor: ProcessPoolExecutor | None = None

    def facts(self, function: str, target: str, **kwargs: Any) -> list[CompiledFacts]:
        """Get facts of every launched kernel, in order; raise CrossCompileError."""
        facts: list[CompiledFacts] = self._finish(_facts, function, target, kwargs)
        return facts

    def submit(self, function: str, target: str, **kwargs: Any) -> "Future[list[CompiledFacts]]":
        """Submit `facts`; return a future."""
        return self._start(_facts, function, target, kwargs)

    def call(self, function: str, target: str, **kwargs: Any) -> Any:
        """Run the function in a worker for `target`; return its result, or raise as `facts`."""
        return self._finish(_call, function, target, kwargs)

    def close(self) -> None:
        """End the workers. The pool can be used again, with new ones."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, run: Callable[..., Any], function: str, target: str, kwargs: dict[str, Any]
    ) -> "Future[Any]":
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self._workers, context, _follow_parent)
        with mock.patch.dict(os.environ):
            # Processes that start now inherit the environment.
            os.environ.pop("TRITON_INTERPRET", None)
            return self._executor.submit(run, function, target, kwargs)

    def _finish(
        self, run: Callable[..., Any], function: str, target: str, kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._start(run, function, target, kwargs).result()
        except BrokenProcessPool:
            # Some errors abort the compiler's process; later requests start new workers.
            self.close()
            raise CrossCompileError(f"{function} for {target}: the worker process died") from None


def _follow_parent() -> None:
    """Set up a worker: ignore Ctrl-C, and exit with the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _facts(function: str, target: str, kwargs: dict[str, Any]) -> list[CompiledFacts]:
    with _readable_errors(function, target), compiling_for(target) as launched:
        load_function(function)(**kwargs)
        return [describe(kernel) for kernel in launched]


def _call(function: str, target: str, kwargs: dict[str, Any]) -> Any:
    with _readable_errors(function, target), compiling_for(target):
        return load_function(function)(**kwargs)


@contextlib.contextmanager
def _readable_errors(function: str, target: str) -> Iterator[None]:
    """Turn any error into a CrossCompileError, with the start of the compilers' output.

    Triton's errors are not picklable.
    """
    with tempfile.TemporaryFile() as output:
        try:
            with _output_to(output.fileno()):
                yield
        except Exception as error:
            output.seek(0)
            printed = output.read().decode(errors="replace").strip()[:_OUTPUT_SHOWN]
            reason = f"{type(error).__name__}: {error}"[:_OUTPUT_SHOWN]
            message = f"{function} for {target}: {reason}" + (f"\n{printed}" if printed else "")
            raise CrossCompileError(message) from None


@contextlib.contextmanager
def _output_to(file: int) -> Iterator[None]:
    """Redirect stdout and stderr to `file`, including output of LLVM and child processes."""
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
