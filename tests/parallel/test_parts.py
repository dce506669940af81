"""Parts of the keys put together: their error, and what a ring holds, without any processes."""

import pytest
import torch
import torch.distributed as dist
from held import Held
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastattn.parallel import ContextPlan, ring
from fastattn.parallel.parts import Whole
from fastattn.testing import make_qkv

pytestmark = pytest.mark.usefixtures("one_thread")


def peak_of_a_ring(T: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a rank of a group without messages holds at most, beside its own q, k and v."""
    plan = ContextPlan.make(T, ranks, block=16)
    plan.around(1, {})  # which keys go where is worked out once
    sizes = {"B": 1, "H_q": 2, "H_k": 2, "T_q": plan.length, "D": 16, "requires_grad": False}
    q, k, v = make_qkv(**sizes)
    # What a kernel holds is its own affair: here parts are computed by nobody.
    for name in ("part_forward", "part_backward"):
        monkeypatch.setattr(ring, name, lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with torch.no_grad(), Held() as held:
            o, lse = ring.ring_forward(q, k, v, {}, plan, dist.group.WORLD)
            whole = Whole(o, None, o, lse)
            ring.ring_backward(q, k, v, {}, [], whole, plan, dist.group.WORLD)
        return held.most
    finally:
        dist.destroy_process_group()


def test_a_ring_holds_as_much_as_its_share_of_the_tokens(on_torch, monkeypatch):
    one = peak_of_a_ring(1024, 8, monkeypatch)
    assert peak_of_a_ring(4096, 32, monkeypatch) == one
    assert peak_of_a_ring(1024, 16, monkeypatch) == one / 2
    own = 2 * 2 * 16 * 128 * 4  # k and v of 128 tokens in fp32
    assert one <= 8 * own
