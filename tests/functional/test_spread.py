"""Calls on a part of a sequence that is spread over ranks: served in their place, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from public_calls import calls
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from fastattn import CausalGQAttention
from fastattn.ops import spread

MIX_NO_TOKENS = {"merge", "KVCache.append", "PagedKVCache.append", "append_paged"}
CALLS = [name for name in calls("cpu") if name not in MIX_NO_TOKENS]
SERVED = {"attention", "gradients", "multiplicative_attention"}


class InItsPlace(Exception):
    """Raised by what serves `attention`."""


def in_its_place(*tensors: torch.Tensor, **options: Any) -> None:
    raise InItsPlace("served")


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_no_call_sees_the_tokens_of_one_rank(name: str, backend: str, device: str) -> None:
    """Known calls too."""
    function, tensors = calls(device)[name]
    function(backend, **tensors)
    refused = TypeError, " is not supported under ContextParallel, where it would see"
    error, message = (InItsPlace, "served") if name in SERVED else refused
    with spread.attending(in_its_place), pytest.raises(error, match=message):
        function(backend, **tensors)
    with spread.attending(in_its_place), spread.attending(None):
        function(backend, **tensors)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_torch_s_own_context_parallel_is_refused(mesh: DeviceMesh, device: str) -> None:
    """It spreads torch's function alone; a layer would attend to a rank's tokens."""
    layer, x = CausalGQAttention(16, 2).to(device), torch.randn(1, 8, 16, device=device)
    expected = layer(x)
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        pytest.raises(TypeError, match="attention is not supported under torch's context_parallel"),
    ):
        layer(x)
    assert torch.equal(layer(x), expected)
