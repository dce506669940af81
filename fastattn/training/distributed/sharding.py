"""A model made ready for its mesh: tensor parallel, recomputed, compiled, then sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from ...models.tensor_parallel import tp_plan
from ..train_config import TrainConfig
from .degrees import Split, SplitError
from .recompute import blocks_of, recompute


def shard_model(
    model: nn.Module, mesh: DeviceMesh, split: Split, config: TrainConfig, device: torch.device
) -> None:
    """Shards a model in place; its parameters become DTensors on the mesh.

    Args:
        model: alike on every rank.
        mesh: dimensions dp, fsdp, tp.
        split: of the run.
        config: its compile and dtype.
        device: of the model.
    """
    if split.tp > 1:
        try:
            parallelize_module(model, mesh["tp"], tp_plan(model))
        except ValueError as error:  # before it has changed anything
            raise SplitError(str(error)) from None
    for block in blocks_of(model):
        recompute(block, config.activation_checkpointing)
        if config.compile:
            block.compile()
    if split.parts * split.cp == 1:
        return
    dtype = config.resolve_dtype(device)
    policy = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    data = mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"]
    for block in blocks_of(model):
        # Cross-attention projects its memory before its block runs: it stays with the whole model.
        for part in [block] if block.cross is None else [block.attention, block.mlp]:
            fully_shard(part, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)


def synchronise(model: nn.Module, split: Split, last: bool) -> None:
    """Says whether the backward passes that follow are a step's last.

    Gradients that stay sharded are summed up among their shards by every pass: whole ones might not
    fit. Among replicas they are summed up once a step.
    """
    if not isinstance(model, FSDPModule):
        return
    if split.fsdp > 1:
        model.set_requires_all_reduce(last)
    else:
        model.set_requires_gradient_sync(last)
