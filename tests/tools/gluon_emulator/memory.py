"""Shared memory, and the order of its accesses.

An allocation remembers the accesses that a later one could still collide with. A new access is
compared with those that overlap it: unless the accessing partition knows that they are over (see
`Partition.known`), the two race, whatever the order in which this run happened to do them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as TorchTensor

from .errors import IllegalError, MissingFenceError, RaceError, ResourceError, UninitializedError
from .machine import Access, Partition, current
from .values import Tensor, from_torch, to_torch, unwrap

SHARED_BYTES = 227 * 1024  # that one program may use on sm_90


class Allocation:
    """Backing store of one `allocate_shared_memory`, NaN until written."""

    def __init__(self, dtype: torch.dtype, shape: list[int], name: str) -> None:
        if any(size & (size - 1) or size <= 0 for size in shape):
            raise IllegalError(f"shared memory dimensions must be powers of 2, got {shape}")
        self.name = name
        self.data = torch.zeros(shape, dtype=dtype)
        if dtype.is_floating_point:
            self.data.fill_(math.nan)
        self.accesses: list[Access] = []

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def access(self, access: Access, by: Partition) -> None:
        """Check a new access that starts now against those that may still be going on."""
        overlapping = [a for a in self.accesses if _overlap(a.span, access.span)]
        for earlier in overlapping:
            if (earlier.writes or access.writes) and earlier not in by.known:
                raise RaceError(f"{access} of {self.name} is not ordered after the {earlier}")
        if not access.writes:
            writes = [a for a in overlapping if a.writes]
            if not writes:
                raise UninitializedError(f"{access} of {self.name}, which nothing has written")
            for earlier in writes:
                if earlier.generic and not access.generic and not earlier.fenced:
                    raise MissingFenceError(
                        f"{access} of {self.name} after the {earlier}, without fence_async_shared"
                    )
        for earlier in overlapping:
            if _replaces(access, earlier):
                earlier.live = False
        self.accesses = [a for a in self.accesses if a.live]
        self.accesses.append(access)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _replaces(new: Access, old: Access) -> bool:
    """Whether who knows that `new` is over knows the same of `old`."""
    covers = new.span[0] <= old.span[0] and old.span[1] <= new.span[1]
    return covers and (new.writes or (not old.writes and new.what == old.what))


@dataclass(eq=False)
class SharedView:
    """Shared memory descriptor of Gluon: an allocation, or a part of one."""

    allocation: Allocation
    data: TorchTensor
    layout: Any

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return from_torch(self.data.dtype)

    @property
    def span(self) -> tuple[int, int]:
        """First element of the allocation that belongs to the view, and one past the last."""
        steps = zip(self.data.shape, self.data.stride(), strict=True)
        first = int(self.data.storage_offset())
        return first, first + sum((size - 1) * stride for size, stride in steps) + 1

    def _with(self, data: TorchTensor) -> "SharedView":
        return SharedView(self.allocation, data, self.layout)

    def index(self, i: Any) -> "SharedView":
        number = int(unwrap(i))
        if not 0 <= number < self.data.shape[0]:
            raise IllegalError(f"{self.allocation.name} has no index {number}, shape {self.shape}")
        return self._with(self.data[number])

    def slice(self, start: int, length: int, dim: int = 0) -> "SharedView":
        return self._with(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "SharedView":
        return self._with(self.data.permute(*order))

    def reshape(self, shape: list[int]) -> "SharedView":
        return self._with(self.data.view(shape))

    def _access(self, writes: bool) -> None:
        """Access by registers: over when the next instruction starts."""
        partition = current()
        access = Access(partition.name, self.span, writes, generic=True)
        self.allocation.access(access, partition)
        partition.known.add(access)

    def load(self, layout: Any) -> Tensor:
        self._access(writes=False)
        return Tensor(self.data.clone(), layout)

    def store(self, value: Tensor) -> None:
        stored = unwrap(value)
        if list(stored.shape) != self.shape or stored.dtype != self.data.dtype:
            raise IllegalError(
                f"store of {list(stored.shape)} {stored.dtype} into {self.allocation.name}, "
                f"{self.shape} {self.data.dtype}"
            )
        self._access(writes=True)
        self.data.copy_(stored)

    def _keep_alive(self) -> None:
        """Tells the compiler how long the allocation lives; nothing happens at run time."""


def allocate(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> SharedView:
    """`gl.allocate_shared_memory` for data; barriers are allocated by `barriers.allocate`."""
    machine = current().machine
    name = f"shared memory {len(machine.allocations)} {list(shape)}"
    allocation = Allocation(to_torch(element_ty), list(shape), name)
    machine.allocations.append(allocation)
    used = sum(a.nbytes for a in machine.allocations)
    if used > SHARED_BYTES:
        raise ResourceError(f"{used} bytes of shared memory, a program has {SHARED_BYTES}")
    view = SharedView(allocation, allocation.data, layout)
    if value is not None:
        view.store(value)
    return view


def fence_async_shared(cluster: bool = False) -> None:
    """Let the async proxy read what registers wrote, as far as this partition knows of it."""
    for access in current().known:
        if access.writes and access.generic:
            access.fenced = True


def live(accesses: set[Access]) -> set[Access]:
    """Select the accesses that a later one can still collide with."""
    return {access for access in accesses if access.live}
