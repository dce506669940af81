"""Parts of the keys put together: their error, and what a ring holds, without any processes."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import reference
from fastattn.parallel import ContextPlan, ring
from fastattn.parallel.parts import Gradients, Whole, part_backward, part_forward
from fastattn.parallel.pieces import blank
from fastattn.testing import error_budget, make_qkv, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("o", "lse", "dq", "dk", "dv")
RANKS = 32


def by_ranks(ranks: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """o, lse, dq, dk, dv by a ring whose ranks are computed one after the other."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor):
        T = q.shape[2]
        plan = ContextPlan.make(T, ranks, block=T // ranks, balance="contiguous")
        o, lse = q.new_zeros(q.shape), torch.zeros(q.shape[:3])
        grads = [torch.zeros(x.shape) for x in (q, k, v)]
        runs = [plan.runs(r) for r in range(ranks)]
        for rank in range(ranks):
            rows = slice(*runs[rank][0])
            part = blank(q[:, :, rows], v, torch.float32)
            for step in range(ranks):
                source = (rank - step) % ranks
                keys = slice(*runs[source][0])
                call = q[:, :, rows], k[:, :, keys], v[:, :, keys], runs[rank], runs[source], {}
                part_forward(*part, *call)
            o[:, :, rows], lse[:, :, rows] = part[0].to(q.dtype), part[1]
            whole = Whole(do[:, :, rows], None, o[:, :, rows], lse[:, :, rows])
            for source in range(ranks):
                keys = slice(*runs[source][0])
                call = q[:, :, rows], k[:, :, keys], v[:, :, keys], runs[rank], runs[source], {}
                at = zip(grads, (rows, keys, keys), strict=True)
                total = Gradients(*(x[:, :, part] for x, part in at), [])
                part_backward(total, *call, [], whole)
        return (o, lse, *(x.to(q.dtype) for x in grads))

    return run


def test_the_error_does_not_grow_with_the_ranks(on_torch):
    q, k, v = make_qkv(B=1, H_q=2, H_k=1, T_q=256, D=16, dtype=torch.bfloat16, requires_grad=False)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)

    def oracle(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, lse = reference.attention(*leaves, return_lse=True)
        grads = torch.autograd.grad(o, leaves, do.to(o.dtype))
        return (o.detach(), lse.detach(), *grads)

    exact = oracle(*(x.double() for x in (q, k, v)))
    naive = worst_naive(exact, lambda: oracle(q, k, v))
    one, many = by_ranks(1)(q, k, v, do), by_ranks(RANKS)(q, k, v, do)
    for name, ref, plain, alone, parted in zip(NAMES, exact, naive, one, many, strict=True):
        errors = [float((x.double() - ref).abs().max()) for x in (alone, parted)]
        assert errors[1] <= error_budget(ref, plain, parted.dtype), name
        mean = [float((x.double() - ref).abs().mean()) for x in (alone, parted)]
        # Merging rounds in fp32, which shows in lse alone: the others end in bf16.
        merging = torch.finfo(torch.float32).eps * float(ref.abs().mean())
        assert mean[1] <= 1.05 * mean[0] + merging, name


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
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, torch.Tensor) and x.numel():
                memory, count = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
                self.bytes += 0 if self.tensors[memory] else count
                self.tensors[memory] += 1
                weakref.finalize(x, self._end, memory, count)
        self.peak = max(self.peak, self.bytes)
        return found


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
