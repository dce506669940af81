"""Call counts of swapped modules, and the modules whose forward is running."""

import threading

import torch


class Calls:
    """Call counts of a swapped module.

    Under torch.compile a call counts when it is traced, not when the compiled code runs.

    Attributes:
        served: calls computed by `fastattn`.
        passed: calls computed by the module's own code or by torch's own function.
        reason: why the last `passed` call was passed on.
    """

    def __new__(cls) -> "Calls":
        # torch.compile runs marked functions while tracing, without a graph node. Marked here and
        # not at import, as marking imports torch._dynamo.
        for function in (cls.count_served, cls.count_passed):
            torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(self) -> None:
        self.served = 0
        self.passed = 0
        self.reason = ""

    def count_served(self) -> None:
        if running.traced is not None:
            running.traced.append((self, None))
            return
        self.served += 1

    def count_passed(self, reason: str) -> None:
        if running.traced is not None:
            running.traced.append((self, reason))
            return
        self.passed += 1
        self.reason = reason

    @property
    def counted(self) -> int:
        return self.served + self.passed

    def __repr__(self) -> str:
        return f"Calls(served={self.served}, passed={self.passed})"


class Running(threading.local):
    """Counts of the swapped modules whose forward runs in this thread, innermost last.

    traced: counts during a capture, added once it succeeds; or None.
    fused: whether a captured graph has computed attention since `begin_capture`.
    """

    def __init__(self) -> None:
        self.modules: list[Calls] = []
        self.traced: list[tuple[Calls, str | None]] | None = None
        self.fused = False

    def innermost(self) -> Calls | None:
        return self.modules[-1] if self.modules else None

    def begin(self, calls: Calls) -> None:
        self.modules.append(calls)

    def begin_capture(self, calls: Calls) -> None:
        """Begin a forward that is to be captured."""
        self.begin(calls)
        self.traced, self.fused = [], False

    def end_capture(self, calls: Calls, *, captured: bool) -> None:
        """End the capture. A failed capture counts nothing."""
        traced, self.traced = self.traced, None
        self.end(calls)
        for other, reason in traced or [] if captured else []:
            if reason is None:
                other.count_served()
            else:
                other.count_passed(reason)

    def end(self, calls: Calls) -> None:
        """End a module's forward, and inner ones that an error left open."""
        for i in range(len(self.modules) - 1, -1, -1):
            if self.modules[i] is calls:
                del self.modules[i:]
                return


running = Running()
