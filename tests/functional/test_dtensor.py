"""Tensors that are spread over devices: refused by name, before anything is computed."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import local_map

import fastattn
from fastattn.compat import flash_attn
from fastattn.compat.transformers import attend

pytestmark = pytest.mark.usefixtures("on_torch")

OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)
MASK = torch.ones(8, 8, dtype=torch.bool).tril()


@pytest.fixture(scope="module")
def by_head() -> Iterator[Callable[..., DTensor]]:
    """A tensor sharded in its dim 1 over a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda *shape: distribute_tensor(torch.randn(shape), mesh, [Shard(1)])
    dist.destroy_process_group()


def qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(3)]


def cache() -> fastattn.KVCache:
    held = fastattn.KVCache(2, 2, 8, 16)
    held.append(torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16))
    return held


CALLS = {
    "attention": (fastattn.attention, lambda: qkv(2, 2, 8, 16), (0, 1, 2)),
    "explain": (fastattn.explain, lambda: qkv(2, 2, 8, 16), (0, 1, 2)),
    "attn_mask": (
        lambda q, k, v, attn_mask: fastattn.attention(q, k, v, attn_mask=attn_mask),
        lambda: [*qkv(2, 2, 8, 16), MASK],
        (3,),
    ),
    "attention_varlen": (
        lambda q, k, v: fastattn.attention_varlen(q, k, v, OFFSETS),
        lambda: qkv(8, 2, 16),
        (0, 1, 2),
    ),
    "decode_attention": (
        lambda q: fastattn.decode_attention(q, cache()),
        lambda: [torch.randn(2, 2, 1, 16)],
        (0,),
    ),
    "weights": (fastattn.attention_weights, lambda: qkv(2, 2, 8, 16)[:2], (0, 1)),
    "merge": (
        fastattn.merge,
        lambda: [torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8)] * 2,
        (0, 1, 2, 3),
    ),
    "flash_attn": (flash_attn.flash_attn_func, lambda: qkv(2, 8, 2, 16), (0, 1, 2)),
    "transformers": (
        lambda q, k, v: attend.attention_forward(torch.nn.Module(), q, k, v, None),
        lambda: qkv(2, 2, 8, 16),
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_is_refused(name, by_head):
    call, arguments, places = CALLS[name]
    call(*arguments())
    for at in places:
        given = arguments()
        given[at] = by_head(*given[at].shape).to(given[at].dtype)
        # flash-attn's checks raise RuntimeError, and so do those under its names.
        with pytest.raises((TypeError, RuntimeError), match=r"one device, got a DTensor: .*local_"):
            call(*given)


def test_local_tensors_are_served_as_the_message_says(by_head):
    q, k, v = (by_head(2, 2, 8, 16) for _ in range(3))
    whole = fastattn.attention(*(x.to_local() for x in (q, k, v)), causal=True)
    mapped = local_map(
        lambda q, k, v: fastattn.attention(q, k, v, causal=True),
        out_placements=[Shard(1)],
    )(q, k, v)
    assert isinstance(mapped, DTensor) and mapped.placements == (Shard(1),)
    torch.testing.assert_close(mapped.to_local(), whole, rtol=0, atol=0)


def test_parameters_are_plain_tensors():
    q, k, v = map(torch.nn.Parameter, qkv(2, 2, 8, 16))
    assert fastattn.attention(q, k, v).requires_grad
