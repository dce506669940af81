"""Errors of the emulator. Each is a fault of the kernel, named after what went wrong."""


class EmulationError(RuntimeError):
    """A kernel broke a rule of the hardware or of Gluon."""


class DeadlockError(EmulationError):
    """Every partition waits and no transfer is under way that could wake one."""


class RaceError(EmulationError):
    """Two accesses to the same memory, one a write, that nothing puts in order.

    To global memory: an addition, by TMA or by a thread, and something else than one.
    """


class MissingFenceError(EmulationError):
    """The TMA unit or the tensor cores read shared memory that registers wrote, unfenced."""


class InFlightError(EmulationError):
    """An accumulator was used before the product that makes it was waited for."""


class BarrierError(EmulationError):
    """An mbarrier was used uninitialised, or got more arrivals than a phase takes."""


class UninitializedError(EmulationError):
    """Shared memory was read that nothing has written."""


class UnfinishedError(EmulationError):
    """A partition or program ended with products, stores or loads still under way."""


class OutOfBoundsError(EmulationError):
    """A pointer was followed outside of its tensor."""


class ResourceError(EmulationError):
    """More shared memory or registers than a multiprocessor has."""


class IllegalError(EmulationError):
    """Operands that the compiler or the hardware does not take: shapes, layouts, warps."""
