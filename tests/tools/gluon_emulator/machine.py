"""One program (CTA) at work: its partitions, which of them runs, and what is under way beside them.

Every partition of a warp-specialised kernel is a thread, but one runs at a time: at each call that
synchronises, a seeded generator picks who goes on and which transfers land. A run is therefore
reproducible from its seed, and a deadlock is known the moment it happens: nobody can go on.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import DeadlockError, EmulationError, UnfinishedError
from .global_memory import GlobalMemory


@dataclass(eq=False)
class Access:
    """A read or a write of a stretch of an allocation.

    generic: done by registers (ld/st); otherwise by the TMA unit or the tensor cores, the "async
    proxy", which sees generic writes only after a fence.
    """

    what: str
    span: tuple[int, int]
    writes: bool
    generic: bool
    fenced: bool = False
    live: bool = True

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.what}"


class Load(Protocol):
    """A transfer to shared memory that is under way."""

    def land(self) -> None:
        """Let it be over."""


class _Abandoned(BaseException):
    """Ends the thread of a partition after another one failed."""


class Partition:
    """A group of warps with its own program counter.

    known: the accesses to shared memory that are over as far as this partition can tell, by its
    own program order and by the barriers it waited on. What is not in here may still be going on.
    """

    def __init__(self, machine: "Machine", name: str, warps: int) -> None:
        self.machine = machine
        self.name = name
        self.warps = warps
        self.known: set[Access] = set()
        # Under way, oldest first: of `products.Product`, and what ends a TMA store.
        self.products: deque[Any] = deque()
        self.stores: deque[Any] = deque()
        self.done = False
        self.waits_for = ""
        self._ready: Callable[[], bool] = _always
        self._turn = threading.Semaphore(0)

    def can_run(self) -> bool:
        return not self.done and self._ready()

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run; go on when `ready()` is true and the generator says so."""
        self._ready, self.waits_for = ready or _always, waits_for
        self.machine.hand_over(self)
        self._ready, self.waits_for = _always, ""

    def finish(self) -> None:
        """Check that nothing of this partition is left under way, as hardware would not."""
        if self.products:
            raise UnfinishedError(f"{self.name} ends with {len(self.products)} products in flight")
        if self.stores:
            raise UnfinishedError(f"{self.name} ends with {len(self.stores)} TMA stores in flight")


def _always() -> bool:
    return True


class Machine:
    """A multiprocessor that runs one program of a grid."""

    def __init__(
        self, program: tuple[int, ...], grid: tuple[int, ...], warps: int, seed: int
    ) -> None:
        self.program = program
        self.grid = grid
        self.random = random.Random(seed)
        self.allocations: list[Any] = []  # of `memory.Allocation`
        self.loads: list[Load] = []
        self.additions: list[Callable[[], None]] = []  # of blocks to global memory
        self.global_memory = GlobalMemory()
        self.partitions = [Partition(self, "the default partition", warps)]
        self._failure: BaseException | None = None

    def run(self, body: Callable[[], Any]) -> None:
        """Run the kernel's body in this thread, as the default partition."""
        partition = self.partitions[0]
        _local.partition = partition
        try:
            body()
            partition.finish()
            if self.loads:
                raise UnfinishedError(
                    f"the program ends with {len(self.loads)} TMA loads in flight"
                )
            while self.additions:
                self._add_one()
        finally:
            del _local.partition

    def specialize(self, bodies: list[tuple[Callable[[], Any], int]]) -> None:
        """Run the first body in the calling partition and each other in one of its own."""
        default = self.partitions[0]
        workers = [
            Partition(self, f"partition {number}", warps)
            for number, (_, warps) in enumerate(bodies[1:], 1)
        ]
        for worker in workers:
            worker.known = set(default.known)
        self.partitions += workers
        threads = [
            threading.Thread(target=self._run_worker, args=(worker, body), daemon=True)
            for worker, (body, _) in zip(workers, bodies[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            bodies[0][0]()
            default.finish()
            default.pause(
                lambda: all(worker.done for worker in workers), "the end of the other partitions"
            )
        except _Abandoned:
            pass
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        self.partitions = [default]
        if self._failure is not None:
            raise self._failure
        for worker in workers:
            default.known |= worker.known

    def _run_worker(self, worker: Partition, body: Callable[[], Any]) -> None:
        _local.partition = worker
        try:
            worker._turn.acquire()
            if self._failure is None:
                body()
                worker.finish()
                worker.done = True
                self.hand_over(worker)
        except _Abandoned:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Remember the first failure and let every thread run to its end."""
        self._failure = self._failure or error
        for partition in self.partitions:
            partition._turn.release()

    def hand_over(self, current: Partition) -> None:
        """Pick who runs next, the caller included, and return when it is the caller's turn."""
        chosen = self._choose()
        if chosen is current:
            return
        chosen._turn.release()
        if current.done:
            return
        current._turn.acquire()
        if self._failure is not None:
            raise _Abandoned

    def _add_one(self) -> None:
        self.additions.pop(self.random.randrange(len(self.additions)))()

    def _choose(self) -> Partition:
        if self.additions and self.random.random() < 0.1:
            self._add_one()
        for load in list(self.loads):
            if self.random.random() < 0.3:
                load.land()
        while True:
            able = [partition for partition in self.partitions if partition.can_run()]
            if able:
                return self.random.choice(able)
            if not self.loads:
                waiting = [p for p in self.partitions if not p.done]
                raise DeadlockError("; ".join(f"{p.name} waits for {p.waits_for}" for p in waiting))
            self.random.choice(self.loads).land()


_local = threading.local()


def current() -> Partition:
    """The partition that the calling thread runs."""
    partition: Partition | None = getattr(_local, "partition", None)
    if partition is None:
        raise EmulationError("Gluon functions run inside gluon_emulator.launch only")
    return partition
