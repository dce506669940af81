"""Run verification cases in child processes and store the verdicts."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ... import dispatch
from ...ops import call
from ...tuned import choices
from ...tuned.environment import environment, fingerprints, numbered
from ...tuned.families import sources
from ...tuned.findings import KEYS
from ...tuned.store import Store
from ..supervision import ChildProcess, Ended, python, supervise
from .case import Subject
from .cases import BACKENDS, DTYPES, FAMILIES, HEAD_DIMS, Scope
from .verdicts import CRASH, HANG, Finding, Outcome, finding, still_holds

KIND = "verification"
# A child uses one core to compile, and GPU memory for the float64 oracle.
_MOST_CHILDREN = 12
_CHILD_BYTES = 5 << 30

# Called when a subject is done: number done, total, and the verdict or None (not served).
Progress = Callable[[int, int, Finding | None], None]


def verify(
    *,
    backends: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    head_dims: Iterable[int] | None = None,
    quick: bool = False,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Check every kernel's accuracy on this machine, and store failures.

    Every kernel runs compiled, on NaN-filled memory and at odd sizes, in child processes: a hang
    or crash is a verdict. Verdicts are stored at once, and `auto` skips kernels that are not right;
    see `explain`. Without a GPU some cases run in Triton's interpreter, which does not check
    compiled code.

    Args:
        backends: "triton" or "hopper"; default: the device's.
        families: of kernels; default: all, see `fastattn verify --help`.
        dtypes: "bfloat16", "float16", "float32"; default: all.
        head_dims: classes of head dims, 64, 128, 256 and 512; default: all.
        quick: only the most important kernels.
        device: a GPU, or "cpu" for the interpreter; default: the current GPU, if there is one.
        progress: called after each verdict, with the number done, the total, and the verdict.

    Returns:
        A `Finding` for each backend, family, dtype and head dim class.

    Raises:
        ValueError: an unknown name, or an unavailable backend or device.
        ChildProcessError: no case can run here.
    """
    resolved = device_of(device)
    filters: dict[str, Any] = {"backends": backends, "families": families}
    filters |= {"dtypes": dtypes, "head_dims": head_dims}
    return list(run(scope_of(resolved, quick=quick, **filters), resolved, progress=progress))


def scope_of(
    device: torch.device, *, quick: bool = False, **filters: Iterable[Any] | None
) -> Scope:
    """Scope of `verify` with these arguments.

    Raises:
        ValueError: an unknown name, or an unavailable backend.
    """
    backends = available(device)
    known: dict[str, tuple[Any, ...]] = {
        "backends": backends, "families": families(backends), "dtypes": DTYPES,
        "head_dims": HEAD_DIMS,
    }  # fmt: skip
    chosen = {name: _chosen(name, filters.get(name), every) for name, every in known.items()}
    return Scope(**chosen, quick=quick, interpreted=device.type == "cpu")


def run(
    scope: Scope,
    device: torch.device,
    *,
    store: Store | None = None,
    start: Callable[[], ChildProcess] | None = None,
    progress: Progress | None = None,
    again: bool = True,
    left: Callable[[], float] = lambda: math.inf,
) -> Iterator[Finding]:
    """Run a scope, and yield and store its verdicts.

    store: default: the device's. start: starts a child, see `supervise`; default: a process. again:
    also what has a stored verdict. left: returns the seconds left.
    """
    store = Store(environment(device)) if store is None else store
    jobs = [(subject, [case.name for case in scope.cases(subject)]) for subject in scope.subjects()]
    known = [] if again else [[row[key] for key in KEYS[KIND]] for row in store.read(KIND)]
    jobs = [(subject, names) for subject, names in jobs if names and [*subject] not in known]
    children = _children(device)
    start = start or partial(_start, device, children)
    how: dict[str, Any] = {"children": children, "left": left}
    for count, ended in enumerate(supervise(deque(jobs), start, **how), 1):
        subject, outcomes = outcomes_of(ended)
        result = finding(subject, outcomes)
        if result is not None:
            # Unless what is stored of the same kernels says more.
            of_kernels = [*subject]
            same = (x for x in store.read(KIND) if [x[key] for key in KEYS[KIND]] == of_kernels)
            if not any(still_holds(row, outcomes) for row in same):
                code = fingerprints()[sources(result.backend, result.family)]
                store.put(KIND, {**result._asdict(), "code": code})
                choices.forget()
            yield result
        if progress is not None:
            progress(count, len(jobs), result)


def outcomes_of(ended: Ended) -> tuple[Subject, list[Outcome]]:
    """Outcomes of a subject's cases, up to the first that killed its process."""
    outcomes = [Outcome(*message["outcome"]) for message in ended.messages if "outcome" in message]
    # A case that lost the device already has an outcome.
    if ended.why and ended.at not in {x.case for x in outcomes}:
        verdict = HANG if ended.hung else CRASH
        outcomes.append(Outcome(ended.at, verdict, None, ended.why))
    return ended.job[0], outcomes


def device_of(device: torch.device | str | None) -> torch.device:
    """Resolve the device to verify, the CPU if kernels are interpreted; or a ValueError."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and not call.interpreting() else "cpu"
    resolved = torch.device(device)
    if resolved.type not in ("cuda", "cpu"):
        raise ValueError(
            f"device must be a GPU or the CPU, got {resolved}: no kernels exist for others"
        )
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be one that is here, got {resolved}: torch finds no GPU")
    return numbered(resolved)


def available(device: torch.device) -> tuple[str, ...]:
    """List the backends whose kernels can run on a device."""
    return BACKENDS if dispatch.on_hopper(device) else BACKENDS[:1]


def families(backends: Iterable[str]) -> tuple[str, ...]:
    """List all families of kernels of backends."""
    return tuple(dict.fromkeys(family for backend in backends for family in FAMILIES[backend]))


def _chosen(name: str, chosen: Iterable[Any] | None, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    cases = allowed if chosen is None else tuple(chosen)
    for x in cases:
        if x not in allowed:
            names = ", ".join(map(str, allowed))
            raise ValueError(f"{name} must be some of {names} here, got {x!r}")
    return cases


def _children(device: torch.device) -> int:
    """Number of processes, which mostly compile or interpret."""
    cores = len(os.sched_getaffinity(0))
    if device.type == "cpu":
        return min(cores, 4)
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(_MOST_CHILDREN, cores * 3 // 4, free // _CHILD_BYTES))


def _start(device: torch.device, children: int) -> ChildProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // children))}
    # Cases name their backend.
    environment.pop("FASTATTN_BACKEND", None)
    if device.type == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return ChildProcess(python("fastattn.testing.verify.child", str(device)), environment)
