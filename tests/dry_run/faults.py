"""Injected faults that the dry run must catch."""

import os
from unittest import mock

import torch
import triton
import triton.language as tl
from calls import SMALL, random, train
from posing import stage
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn import attention
from fastattn.kernels import forward
from fastattn.kernels.launch import descriptors, tiles
from fastattn.options import Options
from fastattn.tracing import record_cuda_graph


@triton.jit
def fill(x, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0)


def planted() -> None:
    batches = [torch.zeros(B, device="cuda") for B in (2, 4)]
    stage.play("batch size", lambda: fill[(1,)](batches[0], 2), [lambda: fill[(1,)](batches[1], 4)])
    stage.play("no launch", lambda: attention(*qkv(), backend="torch"))
    stage.play("grid", lambda: fill[(1, 65536)](batches[0], 2))
    with tiles.forced(**SMALL):
        stage.play("read while captured", lambda: record_cuda_graph(read_a_value))
        stage.play("descriptor's stride", unaligned_stride)
        stage.play("descriptor's address", unaligned_address)
        os.environ["DRY_RUN_SHARED_BYTES"] = "64"
        stage.play("shared memory", lambda: train(2, 64, causal=True))
        del os.environ["DRY_RUN_SHARED_BYTES"]


def qkv() -> list[Tensor]:
    return [random(2, 2, 64, 64) for _ in range(3)]


def read_a_value() -> None:
    """A capture in which the host needs what the GPU computes."""
    q, k, v = qkv()
    if torch.cuda.is_current_stream_capturing():
        attention(q, k, v, causal=True).sum().item()


def unaligned_stride() -> None:
    """Rows 136 bytes apart, without the checks on the host."""
    with (
        mock.patch.object(TensorDescriptor, "__post_init__", lambda descriptor: None),
        mock.patch.object(descriptors, "tma_strides", lambda x: list(x.stride())),
    ):
        without_copies(*(random(2, 2, 64, 68)[..., :64] for _ in range(3)))


def unaligned_address() -> None:
    """Triton's check on the host has seen the launch with other tensors."""
    without_copies(*qkv())
    without_copies(*(random(2 * 2 * 64 * 64 + 1)[1:].view(2, 2, 64, 64) for _ in range(3)))


def without_copies(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A launch without copies of tensors that TMA cannot read."""
    with mock.patch.object(forward, "aligned", lambda x: x):
        forward.launch_forward(q, k, v, Options(causal=True, scale=0.125))
