"""Call counts of swapped modules, and the modules whose forward is running."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._guards import TracingContext

# Modules whose own forward torch.compile has traced, and their counts then, by what traces them.
_traced: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Calls:
    """Call counts of a swapped module.

    Under torch.compile a call counts when it is traced, not when the compiled code runs.

    Attributes:
        served: calls computed by `fastattn`.
        passed: calls computed by the module's own code or by torch's own function.
        reason: reason of the last `passed` call.
        unseen: forwards in which no call was seen.
        compiled: whether torch.compile traced the last of these.
        kind: class of a module whose own forward may compute attention, if no adapter has it.
        ended: whether the swap is undone.
    """

    def __new__(cls) -> "Calls":
        # torch.compile runs marked functions while tracing, without a graph node. Marked here and
        # not at import, as marking imports torch._dynamo.
        for name in ("count_served", "count_passed", "begin", "end", "trace", "trace_innermost"):
            torch.compiler.assume_constant_result(getattr(cls, name))  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(self) -> None:
        self.served = self.passed = self.unseen = 0
        self.reason = ""
        self.compiled = self.ended = False
        self.kind: type | None = None
        self._before = 0

    def count_served(self) -> None:
        if not running.later(self, self.count_served):
            self.served += 1

    def count_passed(self, reason: str) -> None:
        if not running.later(self, partial(self.count_passed, reason)):
            self.passed += 1
            self.reason = reason

    def begin(self) -> None:
        """Begin a forward of the module."""
        self._before = self.counted
        if self.kind is not None:
            self.trace(self.kind)

    def end(self, compiled: bool) -> None:
        """End a forward of the module, which torch.compile may trace."""
        if self.counted == self._before and not running.later(None, partial(self.end, compiled)):
            self.unseen += 1
            self.compiled = compiled

    def trace(self, kind: type) -> None:
        """Note that the own forward of the module, which is of this class, is traced."""
        if (context := TracingContext.try_get()) is not None:
            _traced.setdefault(context, []).append((self, kind, self.counted))

    @staticmethod
    def trace_innermost() -> None:
        """Note that a call of torch's function is traced for a capture."""
        if (calls := running.innermost()) is not None:
            calls.trace(object)

    @property
    def counted(self) -> int:
        return self.served + self.passed + running.delayed(self)

    def __repr__(self) -> str:
        return f"Calls(served={self.served}, passed={self.passed})"


def traced_modules(softmax: bool) -> list[tuple[Calls, type]]:
    """Modules, with their classes, whose own forward is traced for a backend, but not counted.

    softmax: whether one is in the graph; without, modules that have no adapter do not matter.
    """
    context, alone = TracingContext.try_get(), running.innermost()
    traced = [] if context is None else _traced.pop(context, [])
    if not traced and alone is not None:  # torch.compile was called for it, and traces no hooks
        traced = [(alone, alone.kind, alone.counted)]
    new = [(x, kind) for x, kind, n in traced if kind is object or (kind and x.counted == n)]
    return [(x, kind) for x, kind in new if softmax or x.kind is None]


class Running(threading.local):
    """Counts of the swapped modules whose forward runs in this thread, innermost last.

    fused: whether a captured graph has computed attention since `begin_capture`; refused: reason
    that it left a call of torch's function to torch.
    captures: number of captures since. capturing: whether it began and has not ended.
    """

    def __init__(self) -> None:
        self.modules: list[Calls] = []
        # During a capture: what is to be counted once it succeeds, and whose calls these are.
        self._later: list[tuple[Calls | None, Callable[[], None]]] | None = None
        self.fused = self.capturing = False
        self.captures, self.refused = 0, ""

    def later(self, calls: Calls | None, count: Callable[[], None]) -> bool:
        """Leave a count to the end of a capture; False where there is none."""
        if self._later is not None:
            self._later.append((calls, count))
        return self._later is not None

    def serves(self, calls: Calls) -> bool:
        """Whether a call is to be counted as served at the end of the capture."""
        return (calls, calls.count_served) in (self._later or [])

    def delayed(self, calls: Calls) -> int:
        return sum(of is calls for of, _ in self._later or [])

    def innermost(self) -> Calls | None:
        while self.modules and self.modules[-1].ended:
            self.modules.pop()
        return self.modules[-1] if self.modules else None

    def begin(self, calls: Calls) -> None:
        self.modules.append(calls)

    def begin_capture(self, calls: Calls) -> Any:
        """Begin a forward that is to be captured; return the state for `end_capture`."""
        outer = self._later, self.fused, self.captures, self.capturing, self.refused
        self.begin(calls)
        self._later, self.fused, self.captures, self.capturing = [], False, 0, True
        self.refused = ""
        return outer

    def end_capture(self, calls: Calls, outer: Any, *, captured: bool) -> None:
        """End the capture. A failed capture counts nothing."""
        counts = self._later or []
        self._later, self.fused, self.captures, self.capturing, self.refused = outer
        self.end(calls)
        for _, count in counts if captured else []:
            count()

    def end(self, calls: Calls) -> None:
        """End a module's forward, and inner ones that an error left open."""
        for i in range(len(self.modules) - 1, -1, -1):
            if self.modules[i] is calls:
                del self.modules[i:]
                return


running = Running()
