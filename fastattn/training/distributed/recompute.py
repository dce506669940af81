"""Activation checkpointing: recompute activations in the backward pass."""

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

# Outputs that selective checkpointing keeps: attention's. Names, as torch's operators differ
# between releases.
_KEPT = {
    "fastattn": (
        *("attention_forward", "hopper_forward", "merge_forward"),
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
    """Apply activation checkpointing to a layer, in place.

    Its output depends only on its inputs and torch's generators. "full" keeps only the layer's
    inputs; "selective" also keeps attention's outputs, the most costly to recompute in long
    sequences.
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
