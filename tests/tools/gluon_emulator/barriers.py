"""mbarriers: phases, arrivals and bytes (PTX ISA, "Asynchronous barriers: mbarrier").

A phase ends when its arrivals are in and the bytes that were announced have landed. What the
arriving partitions knew to be over, and the transfers that landed, are known to whoever waits.
"""

from typing import Any

from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout

from .errors import BarrierError, IllegalError
from .machine import Access, current
from .memory import live
from .values import unwrap


class Barrier:
    """The state of one mbarrier."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0  # arrivals a phase; 0 = not initialised
        self.pending = 0
        self.bytes = 0
        self.parity = 0  # of the phase under way
        self._gathering: set[Access] = set()
        self._published: set[Access] = set()

    def __str__(self) -> str:
        return (
            f"{self.name} (phase parity {self.parity}, {self.pending} of {self.count} arrivals "
            f"and {self.bytes} bytes missing)"
        )

    def require_initialized(self) -> None:
        if not self.count:
            raise BarrierError(f"{self.name} is not initialised")

    def arrive(self, count: int) -> None:
        self.require_initialized()
        if count > self.pending:
            raise BarrierError(f"{count} more arrivals at {self}")
        self.pending -= count
        self._gathering |= current().known
        self._end_phase_if_complete()

    def land(self, access: Access, nbytes: int) -> None:
        """A transfer that was announced here is over."""
        self.bytes -= nbytes
        self._gathering.add(access)
        self._end_phase_if_complete()

    def _end_phase_if_complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.parity ^= 1
            self.pending = self.count
            self._published, self._gathering = live(self._gathering), set()

    def wait(self, parity: int) -> None:
        self.require_initialized()
        partition = current()
        partition.pause(lambda: self.parity != parity, f"parity {parity} of {self}")
        partition.known = live(partition.known | self._published)


class BarrierView:
    """An array of barriers in shared memory, or one of them, as `index` gives it."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> "BarrierView":
        number = int(unwrap(i))
        if not 0 <= number < len(self.barriers):
            raise IllegalError(f"there are {len(self.barriers)} barriers, no number {number}")
        return BarrierView([self.barriers[number]])

    @property
    def only(self) -> Barrier:
        if len(self.barriers) != 1:
            raise IllegalError(f"one barrier is needed, got {len(self.barriers)}: use index")
        return self.barriers[0]


def allocate(shape: list[int]) -> BarrierView:
    """`gl.allocate_shared_memory` with an MBarrierLayout; shape [n, 1], or [1]."""
    number = shape[0]
    return BarrierView([Barrier(f"barrier {i} of {number}") for i in range(number)])


class mbarrier:
    """Stands in for gluon.language.nvidia.hopper.mbarrier."""

    MBarrierLayout = MBarrierLayout

    @staticmethod
    def init(view: BarrierView, count: int) -> None:
        barrier = view.only
        barrier.count = barrier.pending = count
        barrier.parity = barrier.bytes = 0

    @staticmethod
    def expect(view: BarrierView, bytes_per_cta: int, pred: Any = True) -> None:
        """Announce bytes, and arrive once."""
        if unwrap(pred):
            view.only.bytes += bytes_per_cta
        mbarrier.arrive(view, pred=pred)

    @staticmethod
    def arrive(view: BarrierView, *, count: int = 1, pred: Any = True) -> None:
        if unwrap(pred):
            view.only.arrive(count)
            current().pause()

    @staticmethod
    def wait(view: BarrierView, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        """Until the phase of this parity is over; a fresh barrier counts as past parity 1."""
        if unwrap(pred):
            view.only.wait(int(unwrap(phase)) & 1)
