"""Training on two ranks: the gradients are those of one process on the whole batch."""

import numpy as np
import pytest
import torch
import torch.distributed
from gloo_ranks import run_ranks
from torch import nn

from fastattn import CausalGQAttention


def layer_and_batch() -> tuple[CausalGQAttention, torch.Tensor]:
    torch.manual_seed(0)
    layer = CausalGQAttention(
        16, num_heads=4, num_kv_heads=2, rotary="half", qk_norm=True, sinks=True, backend="triton"
    )
    return layer, torch.randn(4, 6, 16)


def gradients(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer(x).square().mean().backward()
    return {
        name.removeprefix("module."): parameter.grad for name, parameter in layer.named_parameters()
    }


def distributed_gradients() -> dict[str, dict[str, np.ndarray]]:
    """Compute a rank's gradients for its half of the batch, by parameter, each way."""
    from torch.distributed.fsdp import fully_shard

    layer, x = layer_and_batch()
    mine = x.chunk(2)[torch.distributed.get_rank()]
    copied = gradients(nn.parallel.DistributedDataParallel(layer), mine)
    layer, _ = layer_and_batch()
    rows = layer.q_proj.weight.shape[0]
    sharded = fully_shard(layer)
    assert sharded.q_proj.weight.to_local().shape[0] == rows // 2
    split = {name: grad.full_tensor() for name, grad in gradients(sharded, mine).items()}
    return {
        how: {name: grad.numpy() for name, grad in found.items()}
        for how, found in (("ddp", copied), ("fsdp2", split))
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, np.ndarray]]]:
    return run_ranks(f"{__file__}:distributed_gradients")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one(how: str, by_rank: list) -> None:
    expected = gradients(*layer_and_batch())
    assert len(by_rank) == 2
    for found in (rank[how] for rank in by_rank):
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            assert expected[name].abs().max() > 0
            torch.testing.assert_close(torch.from_numpy(grad), expected[name], rtol=1e-5, atol=1e-7)
