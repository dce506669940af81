"""Distributed training on torchrun's ranks, by DDP or FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.layers import Block
from .data.rows import IGNORED
from .tasks.task import Batch
from .train_config import TrainConfig, resolve_device

_Value = TypeVar("_Value")


@contextmanager
def started() -> Iterator[Ranks]:
    """Make the process group of torchrun's ranks, for the block."""
    if not dist.is_torchelastic_launched():
        yield Ranks()
        return
    # gloo in addition to NCCL, for CPU tensors.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


class Ranks:
    """This process among the ranks of the process group; rank 0 writes and reports."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.first = rank, size, rank == 0

    def device(self, name: str) -> torch.device:
        """Get this rank's device from a name for `resolve_device`.

        Raises:
            ValueError: as `resolve_device`, or several ranks would share one GPU.
        """
        device = resolve_device(name)
        if self.size > 1 and device.type == "cuda":
            if device.index is not None:
                raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' on ranks, got {name!r}")
            device = resolve_device(f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(device)
        return device

    def prepare(
        self, model: nn.Module, config: TrainConfig, dtype: torch.dtype
    ) -> Callable[..., Any]:
        """Return the training forward; a model, equal on every rank, is sharded in place.

        Raises:
            ValueError: config has an option that several ranks do not support.
        """
        if config.activation_checkpointing:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                apply_activation_checkpointing,
            )

            apply_activation_checkpointing(model, check_fn=lambda x: isinstance(x, Block))
        forward: nn.Module = model
        if config.fsdp and self.size > 1:
            self._shard(model, dtype)
        elif self.size > 1:
            forward = nn.parallel.DistributedDataParallel(model)
        return torch.compile(forward) if config.compile else forward

    def _shard(self, model: nn.Module, dtype: torch.dtype) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if dtype == torch.float16:
            raise ValueError("dtype must be 'float32' or 'bfloat16' with fsdp, got 'float16'")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in [x for x in model.modules() if isinstance(x, Block)]:
            # Cross-attention projects its memory before its block runs, so the model owns it.
            for part in [block] if block.cross is None else [block.attention, block.mlp]:
                fully_shard(part, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    def part(self, batch: Batch) -> Batch:
        """Select this rank's rows of a batch, equally many on every rank; padding has no target."""
        if self.size == 1:
            return batch
        B = len(batch.targets)
        each = -(-B // self.size)
        rows = torch.arange(self.rank * each, (self.rank + 1) * each, device="cpu")
        own = rows.clamp(max=B - 1)
        targets = batch.targets[own].masked_fill((rows >= B)[:, None], IGNORED)
        return Batch(
            tuple(x[own] for x in batch.inputs),
            targets,
            {name: x[own] for name, x in batch.lengths.items()},
            None if batch.documents is None else batch.documents[own],
        )

    def loss(self, forward: Callable[..., Any], batch: Batch, device: torch.device) -> Tensor:
        """Compute this rank's share of a batch's mean loss, 0 without targets; shares add up."""
        own, targets = self.part(batch).to(device), batch.num_targets
        count = {} if self.size == 1 and targets else {"target_count": max(1, targets)}
        loss: Tensor = forward(*own.inputs, own.targets, **own.keywords, **count)[1]
        return loss

    def accumulating(
        self, forward: Callable[..., Any], *, last: bool
    ) -> AbstractContextManager[None]:
        """Context of a forward and a backward; the last one of a step reduces the gradients."""
        inner: Any = getattr(forward, "_orig_mod", forward)
        if hasattr(inner, "set_requires_gradient_sync"):
            inner.set_requires_gradient_sync(last)
        elif self.size > 1 and not last:
            no_sync: AbstractContextManager[None] = inner.no_sync()
            return no_sync
        return nullcontext()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Context of calls of a model's methods other than forward, after a forward."""
        sharded: Any = model if hasattr(model, "unshard") else None
        if sharded is not None:
            sharded.unshard()
        try:
            yield
        finally:
            if sharded is not None:
                sharded.reshard()

    def total(self, x: Tensor) -> Tensor:
        """Sum all ranks' values."""
        total = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        # On the CPU, so that no GPU synchronises.
        return bool(self.total(torch.tensor(int(flag), device="cpu")))

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        """Run a function on rank 0; return its result, or raise its error, on every rank."""
        if self.size == 1:
            return decide()
        shared: list[Any] = [None, None]
        if self.first:
            try:
                shared[0] = decide()
            except Exception as problem:
                shared[1] = problem
        dist.broadcast_object_list(shared)
        if shared[1] is not None:
            raise shared[1]
        value: _Value = shared[0]
        return value


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gather the unsharded state of a model and its optimizer on rank 0; others get nothing."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    fresh = not optimizer.state
    weights, moments = state_dict.get_state_dict(model, optimizer, options=options)
    if fresh:
        # torch has filled the state by a step of rate 0, which AdamW would count.
        optimizer.state.clear()
        filled: Any = moments.get("state", {})  # other ranks get nothing
        for held in filled.values():
            held["step"].zero_()
    return weights, moments


def load_full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load `full_state` into the optimizer, on any number of ranks."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_optimizer_state_dict(model, optimizer, dict(state), options=options)
