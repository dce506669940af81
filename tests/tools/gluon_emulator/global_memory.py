"""Record of a program's accesses to each element of global memory: additions, reads, writes.

An addition, by TMA or by a thread, arrives before or after others: within the program nothing
determines when. So a program must not otherwise access an element that it adds to.
"""

from typing import Any

import torch
from torch import Tensor as TorchTensor

from .errors import RaceError


class GlobalMemory:
    """Elements that a program has added to, and that it has otherwise touched, of the storages
    by address and size of an element.
    """

    def __init__(self) -> None:
        self._touched: dict[tuple[int, int], TorchTensor] = {}

    def touch(self, what: str, adds: bool, x: TorchTensor, place: Any) -> None:
        """Check an access to x[place], `what` for people, against all before it.

        Raises:
            RaceError: one of the two is an addition, and the other is not.
        """
        storage, size = x.untyped_storage(), x.element_size()
        key = storage.data_ptr(), size
        if key not in self._touched:
            self._touched[key] = torch.zeros(2, storage.nbytes() // size, dtype=torch.bool)
        theirs, ours = self._touched[key][int(adds)], self._touched[key][int(not adds)]
        if _like(x, theirs)[place].any():
            raise RaceError(
                f"{what} is in no order with {'a load or store' if adds else 'an addition'}"
            )
        _like(x, ours)[place] = True


def _like(x: TorchTensor, marks: TorchTensor) -> TorchTensor:
    """The marks of the elements of x."""
    return marks.as_strided(x.shape, x.stride(), marks.storage_offset() + x.storage_offset())
