"""Record of a program's accesses to each element of global memory: additions, reads, writes.

An addition, by TMA or by a thread, arrives before or after others: within the program nothing
determines when. So a program must not otherwise access an element that it adds to.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor as TorchTensor

from .errors import RaceError


class Touched(NamedTuple):
    """Which elements of a storage were added to, and which were read or written."""

    added: TorchTensor
    others: TorchTensor


class GlobalMemory:
    """The storages that a program has touched, by address and size of an element."""

    def __init__(self) -> None:
        self._touched: dict[tuple[int, int], Touched] = {}

    def touch(self, what: str, adds: bool, x: TorchTensor, place: Any) -> None:
        """Check an access to x[place], `what` for people, against all before it.

        Raises:
            RaceError: one of the two is an addition, and the other is not.
        """
        storage, size = x.untyped_storage(), x.element_size()
        key = storage.data_ptr(), size
        if key not in self._touched:
            length = storage.nbytes() // size
            self._touched[key] = Touched(*torch.zeros(2, length, dtype=torch.bool).unbind())
        touched = self._touched[key]
        ours, theirs = (touched.added, touched.others) if adds else (touched.others, touched.added)
        if _like(x, theirs)[place].any():
            raise RaceError(
                f"{what} is in no order with {'a load or store' if adds else 'an addition'}"
            )
        _like(x, ours)[place] = True


def _like(x: TorchTensor, marks: TorchTensor) -> TorchTensor:
    """The marks of the elements of x."""
    return marks.as_strided(x.shape, x.stride(), marks.storage_offset() + x.storage_offset())
