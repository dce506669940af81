"""Activation checkpointing: what a backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...models.layers import Block
from ..train_config import Recompute

# What selective checkpointing keeps: attention's outputs, by whatever computes it. Names, since
# torch's differ from release to release.
_KEPT = {
    "fastattn": (
        *("attention_forward", "hopper_forward", "additive_forward", "merge_forward"),
        *("torch_varlen_forward", "torch_varlen_forward_lse"),
    ),
    "aten": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}


def blocks_of(model: nn.Module) -> Iterator[Block]:
    """The layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, Block))


def recompute(block: nn.Module, how: Recompute) -> None:
    """Makes a layer forget activations, in place.

    Args:
        block: its forward's output depends on its inputs and torch's generators alone.
        how: "none"; "full" keeps the layer's inputs alone; "selective" keeps attention's outputs
            too, which cost most to compute and least to keep in long sequences.
    """
    if how == "none":
        return
    inner = block.forward
    context: dict[str, Any] = {}
    if how == "selective":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **context, **kwargs)

    setattr(block, "forward", forward)  # noqa: B010


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, _, name = op.name().partition("::")
    if name in _KEPT.get(namespace, ()):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
