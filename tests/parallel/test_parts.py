"""Parts of the keys put together: their error, and what a ring holds, without any processes."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.parallel import ContextPlan, ring
from fastattn.parallel.parts import Whole
from fastattn.testing import make_qkv

pytestmark = pytest.mark.usefixtures("one_thread")


class Live(TorchDispatchMode):
    """The bytes of tensors that are made in this mode and live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.tensors: Counter[int] = Counter()  # by where their memory is

    def _end(self, memory: int, count: int) -> None:
        self.tensors[memory] -= 1
        if not self.tensors[memory]:
            self.bytes -= count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        for x in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(x, torch.Tensor) and x.numel():
                memory, count = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
                self.bytes += 0 if self.tensors[memory] else count
                self.tensors[memory] += 1
                weakref.finalize(x, self._end, memory, count)
        self.peak = max(self.peak, self.bytes)
        return actual


def peak_of_a_ring(T: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a rank of a group without messages holds at most, beside its own q, k and v."""
    plan = ContextPlan.make(T, ranks, block=16)
    plan.around(1, {})  # which keys go where is worked out once
    sizes = {"B": 1, "H_q": 2, "H_k": 2, "T_q": plan.length, "D": 16, "requires_grad": False}
    q, k, v = make_qkv(**sizes)
    # What a kernel holds is its own affair: here parts are computed by nobody.
    for name in ("part_forward", "part_backward"):
        monkeypatch.setattr(ring.parts, name, lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with torch.no_grad(), Live() as live:
            o, lse = ring.ring_forward(q, k, v, {}, plan, dist.group.WORLD)
            whole = Whole(o, None, o, lse)
            ring.ring_backward(q, k, v, {}, [], whole, plan, dist.group.WORLD)
        return live.peak
    finally:
        dist.destroy_process_group()


def test_a_ring_holds_as_much_as_its_share_of_the_tokens(on_torch, monkeypatch):
    one = peak_of_a_ring(1024, 8, monkeypatch)
    assert peak_of_a_ring(4096, 32, monkeypatch) == one
    assert peak_of_a_ring(1024, 16, monkeypatch) == one / 2
    own = 2 * 2 * 16 * 128 * 4  # k and v of 128 tokens in fp32
    assert one <= 8 * own
