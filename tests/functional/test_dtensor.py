"""Tensors that are spread over devices: refused by name, before anything is computed."""

from collections.abc import Callable, Iterator
from typing import Any

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
CODES = torch.float8_e4m3fn


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


def codes() -> list[torch.Tensor]:
    return [x.to(CODES) for x in qkv(2, 2, 8, 16)]


def results() -> list[torch.Tensor]:
    """do, q, k, v, o and lse."""
    return [torch.randn(2, 2, 8, 16) for _ in range(5)] + [torch.randn(2, 2, 8)]


# How to call, with what, and which of it is refused.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]], tuple[int, ...]]] = {
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
    "explain_decode": (
        lambda q: fastattn.explain_decode(q, cache()),
        lambda: [torch.randn(2, 2, 1, 16)],
        (0,),
    ),
    "weights": (fastattn.attention_weights, lambda: qkv(2, 2, 8, 16)[:2], (0, 1)),
    "merge": (
        fastattn.merge,
        lambda: [torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8)] * 2,
        (0, 1, 2, 3),
    ),
    "statistics": (fastattn.attention_statistics, lambda: qkv(2, 2, 8, 16)[:2], (0, 1)),
    "additive": (
        fastattn.additive_attention,
        lambda: [*qkv(2, 2, 8, 16), torch.randn(2, 16)],
        (0, 1, 2, 3),
    ),
    "multiplicative": (
        fastattn.multiplicative_attention,
        lambda: [*qkv(2, 2, 8, 16), torch.randn(2, 16, 16)],
        (0, 1, 2, 3),
    ),
    "quantize_fp8": (fastattn.quantize_fp8, lambda: qkv(2, 2, 8, 16)[:1], (0,)),
    "pack_values": (fastattn.pack_values, lambda: [torch.zeros(1, 2, 8, 64).to(CODES)], (0,)),
    "fp8": (fastattn.attention_fp8, codes, (0, 1, 2)),
    "explain_fp8": (fastattn.explain_fp8, codes, (0, 1, 2)),
    "block forward": (fastattn.attention_block_forward, lambda: qkv(2, 2, 8, 16), (0, 1, 2)),
    "block backward": (fastattn.attention_block_backward, results, (0, 1, 2, 3, 4, 5)),
    "append": (lambda *given: cache().append(*given), lambda: qkv(2, 2, 3, 16)[:2], (0, 1)),
    "view_of_tensors": (
        lambda k, v: fastattn.view_of_tensors(k, v, torch.tensor([3, 3], dtype=torch.int32)),
        lambda: qkv(2, 2, 8, 16)[:2],
        (0, 1),
    ),
}

# What these call takes DTensors, though not beside plain tensors.
TAKEN: dict[str, Callable[..., Any]] = {
    "attention": fastattn.attention,
    "flash_attn": flash_attn.flash_attn_func,
    "transformers": lambda *qkv: attend.attention_forward(torch.nn.Module(), *qkv, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_is_refused(name, by_head):
    call, arguments, places = CALLS[name]
    call(*arguments())
    for at in places:
        given = arguments()
        given[at] = by_head(*given[at].shape).to(given[at].dtype)
        with pytest.raises(
            TypeError, match=r"one device, got a DTensor: fastattn\.attention and .*"
        ):
            call(*given)


def test_a_cascade_refuses_before_its_first_part(by_head):
    """Not by what it does with the parts."""
    prefix = cache().view(torch.tensor([0]))
    with pytest.raises(TypeError, match=r"^q must be the tensor of one device, got a DTensor"):
        fastattn.cascade_attention(by_head(2, 2, 1, 16), prefix, cache())


@pytest.mark.parametrize("name", TAKEN)
def test_one_beside_plain_tensors_is_refused(name, by_head):
    for at in range(3):
        given = qkv(2, 2, 8, 16)
        given[at] = by_head(2, 2, 8, 16)
        # flash-attn's checks raise RuntimeError, and so do those under its names.
        with pytest.raises((TypeError, RuntimeError), match="q, k, v must all be DTensors or none"):
            TAKEN[name](*given)


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
