"""Tensors that are spread over devices: refused by name, before anything is computed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from public_calls import calls
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.experimental import local_map

import fastattn
from fastattn.compat import flash_attn
from fastattn.compat.transformers import hf_attention

pytestmark = pytest.mark.usefixtures("on_torch")


@pytest.fixture(scope="module")
def by_head() -> Iterator[Callable[..., DTensor]]:
    """A tensor sharded in a dim over a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def spread(x: torch.Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, [Shard(min(1, x.dim() - 1))], run_check=False)

    yield spread
    dist.destroy_process_group()


def qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(3)]


def cache() -> fastattn.KVCache:
    held = fastattn.KVCache(2, 2, 8, 16)
    held.append(torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16))
    return held


CODES = torch.zeros(2, 2, 8, 64).to(torch.float8_e4m3fn)
LENGTHS = torch.tensor([3, 3], dtype=torch.int32)
# How to call, and with which shapes or tensors.
OTHERS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "explain": (fastattn.explain, qkv(2, 2, 8, 16)),
    "explain_decode": (lambda q: fastattn.explain_decode(q, cache()), qkv(2, 2, 1, 16)[:1]),
    "explain_fp8": (fastattn.explain_fp8, [CODES] * 3),
    "quantize_fp8": (fastattn.quantize_fp8, qkv(2, 2, 8, 16)[:1]),
    "pack_values": (fastattn.pack_values, [CODES]),
    "view_of_tensors": (
        lambda k, v: fastattn.view_of_tensors(k, v, LENGTHS), qkv(2, 2, 8, 16)[:2]
    ),
}  # fmt: skip
# A cache holds the heads of a rank.
SERVED = {("decode_attention", "q"), *(("attention", x) for x in "qkv")}
REFUSED = r"one device, got a DTensor: only fastattn\.attention and .*"

# What these call takes DTensors, though not beside plain tensors.
TAKEN: dict[str, Callable[..., Any]] = {
    "attention": fastattn.attention,
    "flash_attn": flash_attn.flash_attn_func,
    "transformers": lambda *qkv: hf_attention.attention_forward(torch.nn.Module(), *qkv, None),
}


@pytest.mark.parametrize("name", [x for x in calls("cpu") if "gradients" not in x])
def test_each_argument_is_refused(name, by_head):
    call, tensors = calls("cpu")[name]
    for argument, x in tensors.items():
        if (name, argument) not in SERVED:
            with pytest.raises(TypeError, match=REFUSED):
                call("torch", **tensors | {argument: by_head(x)})


@pytest.mark.parametrize("name", OTHERS)
def test_each_argument_of_others_is_refused(name, by_head):
    call, tensors = OTHERS[name]
    call(*tensors)
    for at, x in enumerate(tensors):
        with pytest.raises(TypeError, match=REFUSED):
            call(*tensors[:at], by_head(x), *tensors[at + 1 :])


def test_a_cascade_refuses_before_its_first_part(by_head):
    """Not by what it does with the parts."""
    prefix = cache().view(torch.tensor([0]))
    with pytest.raises(TypeError, match=r"^q must be a tensor of one device, got a DTensor"):
        fastattn.cascade_attention(by_head(torch.randn(2, 2, 1, 16)), prefix, cache())


@pytest.mark.parametrize("name", TAKEN)
def test_one_beside_plain_tensors_is_refused(name, by_head):
    for at in range(3):
        given = qkv(2, 2, 8, 16)
        given[at] = by_head(torch.randn(2, 2, 8, 16))
        # flash-attn's checks raise RuntimeError, and so do those under its names.
        with pytest.raises((TypeError, RuntimeError), match="q, k, v must all be DTensors or none"):
            TAKEN[name](*given)


def test_local_tensors_are_served_as_the_message_says(by_head):
    q, k, v = (by_head(torch.randn(2, 2, 8, 16)) for _ in range(3))
    whole = fastattn.attention(*(x.to_local() for x in (q, k, v)), causal=True)
    mapped = local_map(
        lambda q, k, v: fastattn.attention(q, k, v, causal=True), out_placements=[Shard(1)]
    )(q, k, v)
    assert isinstance(mapped, DTensor) and mapped.placements == (Shard(1),)
    torch.testing.assert_close(mapped.to_local(), whole, rtol=0, atol=0)
