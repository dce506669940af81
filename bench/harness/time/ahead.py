"""Compile kernels in worker processes before they are launched.

The workers fill Triton's disk cache under the keys of the launches: their tensors have the sizes,
strides and dtypes of the case, without contents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any
from unittest import mock

from ... import dispatch
from ...kernels.launch import tiles
from ...testing.compiling.compile_pool import CompilePool
from ...testing.compiling.cross_compile import TARGETS
from ..cases import sets
from ..cases.case import Case
from ..cases.inputs import Unserved, make_inputs
from ..cases.registry import BY_NAME, OURS, PORTABLE, named
from .attention import call

JOB = f"{__name__}:launch"
_SMALL = 256  # tokens


def launch(case: Case, implementation: str, forced: Mapping[str, Any], device: str = "cpu") -> None:
    """Launch the kernels of a case, only to compile them, in a process of `CompilePool`.

    For `auto` those of Hopper where they serve. device: of tensors without contents, but for 8
    bits, whose quantisation computes.
    """
    here = replace(case, device=device)
    inputs = make_inputs(here, empty=implementation not in sets.FP8)
    names = (named("hopper"), PORTABLE) if implementation == OURS else (implementation,)
    with (
        tiles.forced(**forced),
        mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None),
        mock.patch.object(dispatch, "on_hopper", lambda device: tiles.current_arch() == "sm_90"),
    ):
        for name in names:
            try:
                if BY_NAME[name].serves(case) is None:
                    call(here, BY_NAME[name].prepare(here, inputs), inputs)
                    return
            except (Unserved, ValueError) as error:
                if isinstance(error, ValueError) and "cannot serve this call" not in str(error):
                    raise


def compiled(case: Case, implementations: Iterable[str]) -> list[str]:
    """The implementations whose kernels this package compiles, and that serve the case."""
    ours = (x for x in implementations if x.startswith(OURS) and x != named("torch"))
    return [name for name in ours if BY_NAME[name].serves(case) is None]


def small(case: Case) -> Case:
    """A smaller case that launches the same kernels: lengths are not compile-time constants."""
    if case.family == "decode":
        return case  # the number of splits depends on its length
    lengths = None if case.lengths is None else (_SMALL,)
    return replace(case, B=1, T_q=_SMALL, T_k=_SMALL, lengths=lengths, label="")


class Ahead:
    """Compiles each call once, in the order of the requests, for an architecture of TARGETS."""

    def __init__(self, arch: str, pool: Any = None) -> None:
        self._arch = arch
        self._pool = pool or CompilePool(max(1, min(10, (os.cpu_count() or 1) - 4)))
        self._started: dict[Hashable, Future[Any]] = {}
        self._wanted: dict[Hashable, list[Future[Any]]] = {}

    def submit(
        self,
        key: Hashable,
        cases: Iterable[Case],
        implementations: Iterable[str],
        forced: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to compile cases for ours that serve them; `why_not` has the results, by key.

        forced: tiles and shapes, which exclude no implementation.
        """
        wanted, forced = self._wanted.setdefault(key, []), dict(forced or {})
        implementations = list(implementations)
        # Processes that start here must not use the GPU's memory.
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
            for case in cases if self._arch in TARGETS else ():
                for name in implementations if forced else compiled(case, implementations):
                    if "hopper" in name and self._arch != "sm_90":
                        continue
                    key = (small(case), name, repr(forced))
                    if key not in self._started:
                        of = key[0] if name in sets.FP8 or forced else case
                        job = {"case": of, "implementation": name, "forced": forced}
                        self._started[key] = self._pool.submit(JOB, self._arch, **job)
                    wanted.append(self._started[key])

    def why_not(self, key: Hashable, seconds: float) -> str | None:
        """Reason not to launch the calls, or None; waits at most `seconds`."""
        end = time.monotonic() + seconds
        for future in self._wanted.pop(key, []):
            try:
                future.result(timeout=max(0.0, end - time.monotonic()))
            except FutureTimeoutError:  # in Python 3.10 it is not the built-in one
                return "was not compiled in time"
            except BrokenProcessPool:
                continue  # the compiler crashed: other kernels compile at their launch
            except Exception as error:
                return f"does not compile: {' '.join(str(error).split())[:200]}"
        return None

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
