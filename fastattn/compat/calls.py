"""Counts of the calls of an attention module, and the module whose forward is running."""

import threading

import torch


class Calls:
    """How often a swapped module was called.

    Under torch.compile a call counts when it is traced, not when the compiled code runs.

    Attributes:
        served: calls computed by `fastattn`.
        passed: calls computed by the module's own code or by torch's own function.
        reason: why the last of these was passed on.
    """

    def __new__(cls) -> "Calls":
        # torch.compile runs functions marked so while it traces, and puts nothing into the graph.
        # Marked here, for copies too, and not at import: this imports torch._dynamo.
        for function in (cls.count_served, cls.count_passed):
            torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(self) -> None:
        self.served = 0
        self.passed = 0
        self.reason = ""

    def count_served(self) -> None:
        self.served += 1

    def count_passed(self, reason: str) -> None:
        self.passed += 1
        self.reason = reason

    @property
    def counted(self) -> int:
        return self.served + self.passed

    def __repr__(self) -> str:
        return f"Calls(served={self.served}, passed={self.passed})"


class Running(threading.local):
    """Swapped modules whose forward runs in this thread, by their counts, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[Calls] = []

    def innermost(self) -> Calls | None:
        return self.modules[-1] if self.modules else None

    def begin(self, calls: Calls) -> None:
        self.modules.append(calls)

    def end(self, calls: Calls) -> None:
        """End a module's forward; those within it that did not end, for an error, end too."""
        for i in range(len(self.modules) - 1, -1, -1):
            if self.modules[i] is calls:
                del self.modules[i:]
                return


running = Running()
