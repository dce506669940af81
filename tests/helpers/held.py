"""Memory of what operations return, for tests of what is never held."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Numbers in the largest storage behind a result, those of all results, and bytes held at once,
    at most.
    """

    largest = total = most = 0

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                # A broadcast takes no memory.
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // x.element_size())
                self.total += x.numel()
                ref = StorageWeakRef(storage)
                self.storages[ref.cdata] = ref, storage.nbytes()
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        self.storages = {n: x for n, x in self.storages.items() if not x[0].expired()}
        return sum(size for _, size in self.storages.values())
