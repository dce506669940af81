"""TMA: tiles between global and shared memory, done beside the partitions.

A load lands at a moment that the machine picks after it was issued; a store reads shared memory at
the last legal moment, which is the wait for it. So does an addition, and arrives in global memory
later, before or after others: within the program nothing tells when.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor as TorchTensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .barriers import Barrier, BarrierView
from .errors import IllegalError
from .machine import Access, Machine, current
from .memory import SharedView
from .values import from_torch, unwrap


class Descriptor:
    """A host TensorDescriptor as a kernel sees it."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.layout = host.layout
        self.block_shape = list(host.block_shape)
        self.shape = list(host.shape)
        base: TorchTensor = host.base
        self._global = base.detach().as_strided(host.shape, host.strides)

    @property
    def dtype(self) -> Any:
        return from_torch(self._global.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.block_shape) * self._global.element_size()

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(
            nbytes=self.nbytes, shape=self.block_shape, element_ty=self.dtype, scalar=self.dtype
        )

    def read(self, first: list[int]) -> TorchTensor:
        """The block at these coordinates, 0 where it is outside of the tensor."""
        block = torch.zeros(self.block_shape, dtype=self._global.dtype)
        inside, within = self._intersection(first)
        block[within] = self._global[inside]
        return block

    def write(self, first: list[int], block: TorchTensor, adds: bool) -> None:
        """Write the part of the block that is inside of the tensor, or add it to what is there."""
        inside, within = self._intersection(first)
        self._global[inside] = block[within] + (self._global[inside] if adds else 0)

    def touch(self, kind: str, first: list[int]) -> None:
        """Note an access to the part of a block inside of the tensor: see `GlobalMemory.touch`."""
        inside, _ = self._intersection(first)
        what = f"a TMA {kind} at {first} of a tensor"
        current().machine.global_memory.touch(what, kind == "addition", self._global, inside)

    def _intersection(self, first: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        inside, within = [], []
        for start, size, extent in zip(first, self.block_shape, self.shape, strict=True):
            low = min(max(start, 0), extent)
            high = max(min(start + size, extent), low)
            inside.append(slice(low, high))
            within.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return tuple(inside), tuple(within)


@dataclass(eq=False)
class Load:
    """A tile on its way into shared memory."""

    descriptor: Descriptor
    first: list[int]
    barrier: Barrier
    target: SharedView
    access: Access
    machine: Machine

    def land(self) -> None:
        self.target.data.copy_(self.descriptor.read(self.first))
        self.machine.loads.remove(self)
        self.barrier.land(self.access, self.descriptor.nbytes)


@dataclass(eq=False)
class Store:
    """A tile on its way out of shared memory, perhaps to be added to what is there."""

    descriptor: Descriptor
    first: list[int]
    source: SharedView
    access: Access
    adds: bool

    def complete(self) -> None:
        write = partial(self.descriptor.write, self.first, self.source.data.clone(), self.adds)
        if self.adds:
            current().machine.additions.append(write)
        else:
            write()
        current().known.add(self.access)


def _coordinates(coord: Any, descriptor: Descriptor, view: SharedView) -> list[int]:
    if len(coord) != len(descriptor.shape):
        raise IllegalError(f"{len(coord)} coordinates for a tensor of {len(descriptor.shape)}")
    if view.shape != descriptor.block_shape:
        raise IllegalError(f"TMA block {descriptor.block_shape}, shared memory {view.shape}")
    if view.dtype != descriptor.dtype:
        raise IllegalError(f"TMA of {descriptor.dtype}, shared memory holds {view.dtype}")
    return [int(unwrap(c)) for c in coord]


def _issue(kind: str, descriptor: Descriptor, coord: Any, source: SharedView) -> None:
    first = _coordinates(coord, descriptor, source)
    partition = current()
    descriptor.touch(kind, first)
    access = Access(f"a TMA {kind}", source.span, writes=False, generic=False)
    source.allocation.access(access, partition)
    partition.stores.append(Store(descriptor, first, source, access, kind == "addition"))


class tma:
    """Stands in for gluon.language.nvidia.hopper.tma."""

    @staticmethod
    def async_load(
        tensor_desc: Descriptor, coord: Any, barrier: BarrierView, result: SharedView,
        pred: Any = True, multicast: bool = False,
    ) -> None:  # fmt: skip
        if not unwrap(pred):
            return
        first = _coordinates(coord, tensor_desc, result)
        partition = current()
        barrier.only.require_initialized()
        tensor_desc.touch("load", first)
        access = Access("a TMA load", result.span, writes=True, generic=False)
        result.allocation.access(access, partition)
        load = Load(tensor_desc, first, barrier.only, result, access, partition.machine)
        partition.machine.loads.append(load)
        partition.pause()

    @staticmethod
    def async_store(tensor_desc: Descriptor, coord: Any, src: SharedView) -> None:
        _issue("store", tensor_desc, coord, src)

    # Their names in Triton before 3.8.
    async_copy_global_to_shared = async_load
    async_copy_shared_to_global = async_store

    @staticmethod
    def async_atomic_add(tensor_desc: Descriptor, coord: Any, src: SharedView) -> None:
        _issue("addition", tensor_desc, coord, src)

    @staticmethod
    def store_wait(pendings: int, read_only: bool = True) -> None:
        stores = current().stores
        while len(stores) > pendings:
            stores.popleft().complete()
