"""The ranks of a process group that train one model together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...models.context_parallel import ContextParallel
from ...models.tensor_parallel import tp_plan
from ...modules.layer import AttentionLayer
from ...parallel import ContextPlan
from .. import sharded
from ..checkpoint import Checkpoint
from ..tasks.task import Batch, LanguageTask, Task
from ..train_config import TrainConfig, resolve_device
from .batches import Part, SplitDropout, batch_slice, plan_rows
from .degrees import NAMES, TIMEOUT, Degrees, Split, SplitError
from .launcher import attempt
from .ranks import Ranks
from .recompute import blocks_of, recompute

_Value = TypeVar("_Value")


class Together(Ranks):
    """`Ranks` of an initialised process group, which wait `timeout` seconds for each other."""

    def __init__(self, split: Split, timeout: float = TIMEOUT) -> None:
        self.split = split
        self._patience = timedelta(seconds=timeout)
        self.first = dist.get_rank() == 0
        self._plans: dict[int, ContextPlan] = {}
        # Model fields that a plan depends on.
        self._attention: dict[str, Any] = {}
        self._writer: sharded.ShardedWriter | None = None

    def device(self, name: str) -> torch.device:
        device = resolve_device(name)
        if device.index is not None:
            raise SplitError(f"device must be 'auto', 'cpu' or 'cuda' under torchrun, got {name!r}")
        if device.type == "cuda":
            device = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            torch.cuda.set_device(device)
        return device

    @property
    def _part(self) -> int:
        """Number of this rank's part of a batch's rows."""
        dp, fsdp, *_ = self.mesh.get_coordinate() or (0, 0)
        return dp * self.split.fsdp + fsdp

    def prepare(self, model: nn.Module, config: TrainConfig) -> Callable[..., Any]:
        fields: Any = model.config
        if getattr(fields, "sparse", None) is None and getattr(fields, "stride", None) is None:
            self._attention["window"] = fields.window
        device = next(model.parameters()).device
        self.mesh = self._started(device.type, tuple(self.split), NAMES)
        for layer in model.modules():
            if isinstance(layer, AttentionLayer):
                layer.first_row = self._part * (config.batch_size // self.split.parts)
        # Dimensions of `Split.data_ranks` and `Split.tp`.
        sizes = (*self.split.data_ranks, self.split.tp)
        mesh = self._started(device.type, sizes, ("dp", "fsdp", "tp"))
        shard_model(model, mesh, self.split, config, device)
        return model

    def _started(
        self, device_type: str, sizes: tuple[int, ...], names: tuple[str, ...]
    ) -> DeviceMesh:
        """Mesh whose groups have this run's timeout in place of torch's default."""
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            group.set_timeout(self._patience)
        return mesh

    def draw(self, task: Task, batch_size: int, generator: torch.Generator) -> Batch:
        each, left = divmod(batch_size, self.split.parts)
        if left == 0 and self.split.parts > 1 and isinstance(task, LanguageTask) and task.by_rows:
            first = self._part * each
            return task.draw("train", batch_size, generator, slice(first, first + each))
        return task.draw("train", batch_size, generator)

    @contextmanager
    def part(self, batch: Batch, device: torch.device) -> Iterator[Part]:
        rows, T = batch.targets.shape
        own = batch_slice(batch.whole_rows or rows, self._part, self.split.parts)
        if self.split.cp > 1:
            plan = self._plan(T, own.batch(batch).documents)
            own = own._replace(plan=plan, rank=self.mesh["cp"].get_local_rank())
        with ExitStack() as stack:
            stack.enter_context(SplitDropout(own))
            if own.plan is not None:
                stack.enter_context(ContextParallel(self.mesh["cp"], own.plan))
            part = Part(own.batch(batch).to(device), self._targets(batch))
            if own.plan is not None and part.batch.documents is not None:
                own.plan.mark(part.batch.documents)
            yield part

    def _targets(self, batch: Batch) -> int:
        """Count the targets in all rows, as a rank may hold only its own."""
        if batch.whole_rows is None:
            return batch.num_targets
        count = torch.tensor(batch.num_targets, device="cpu")
        dist.all_reduce(count)
        # Ranks of cp and tp hold the same rows.
        return int(count) // (self.split.cp * self.split.tp)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        # Each layer gathers its parameters when called. Only the model's forward gathers the
        # others, and they stay gathered without a backward pass.
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        # Every pass reduces gradients over the shards, as unsharded ones might not fit in memory.
        # Replicas reduce once a step.
        if isinstance(model, FSDPModule) and self.split.fsdp > 1:
            model.set_requires_all_reduce(last)
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        # torch averages over the mesh, but these losses are shares of a sum.
        (loss * (self.split.parts * self.split.cp)).backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float) -> None:
        clip_gradients(model.parameters(), max_norm)

    def total(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / self.split.tp

    def share(self, total: Tensor) -> Tensor:
        return total * self.split.tp if self.first else torch.zeros_like(total)

    def model_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return sharded.model_tensors(model)

    def optimizer_tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        return sharded.optimizer_tensors(model, optimizer)

    def save(self, run_dir: Path, checkpoint: Checkpoint, *, background: bool) -> Path:
        if self._writer is None:
            self._writer = sharded.ShardedWriter(run_dir, background=background)
        return self._writer.save(checkpoint)

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def restore(
        self, source: Checkpoint | Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        assert isinstance(source, Path), "each rank reads its part of the file"
        return sharded.restore_sharded(source, model, optimizer)

    def agree(self, flag: bool) -> bool:
        # On the CPU, so that no GPU synchronises.
        flags = torch.tensor(int(flag), device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        shared: list[Any] = [None, None]
        if self.first:
            try:
                shared[0] = decide()
            except Exception as problem:
                shared[1] = problem
        dist.broadcast_object_list(shared)
        value, error = shared
        if error is not None:
            raise error
        return cast(_Value, value)

    def _plan(self, T: int, documents: Tensor | None) -> ContextPlan:
        """Context-parallel plan for rows of T tokens with documents [rows, T]."""
        if documents is not None:
            return plan_rows(T, self.split.cp, documents=documents, **self._attention)
        if T not in self._plans:
            self._plans[T] = plan_rows(T, self.split.cp, **self._attention)
        return self._plans[T]


@contextmanager
def started(degrees: Degrees) -> Iterator[Together]:
    """Start the process group for these degrees, while the block runs."""
    # gloo in addition to NCCL, for CPU tensors.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives a restart, and with it the addresses of ended ranks.
    store = PrefixStore(f"attempt {attempt()}", store)
    wait = timedelta(seconds=degrees.timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    try:
        yield Together(degrees.split(dist.get_world_size()), degrees.timeout)
    finally:
        dist.destroy_process_group()


def shard_model(
    model: nn.Module, mesh: DeviceMesh, split: Split, config: TrainConfig, device: torch.device
) -> None:
    """Shards a model in place, equal on every rank; its parameters become DTensors on the mesh.

    mesh: dimensions dp, fsdp, tp. config: its compile and dtype.
    """
    if split.tp > 1:
        try:
            parallelize_module(model, mesh["tp"], tp_plan(model))
        except ValueError as error:  # nothing has been changed yet
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
        # Cross-attention projects its memory before its block runs, so the root module owns it.
        for part in [block] if block.cross is None else [block.attention, block.mlp]:
            fully_shard(part, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """`nn.utils.clip_grad_norm_` for sharded gradients; all ranks call it.

    Each rank scales its own shards: with DTensors, torch's sharding propagation would take seconds.

    Returns:
        The norm before clipping, the same on every rank.
    """
    held = [_held(x.grad) for x in parameters if x.grad is not None]
    square = torch.stack([x.float().square().sum() * share for x, share in held]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([x for x, _ in held], scale)
    return norm


def _held(gradient: Any) -> tuple[Tensor, float]:
    """This rank's shard of a gradient, and its share of the weight in the norm's global sum."""
    if not isinstance(gradient, DTensor):
        return gradient, 1 / dist.get_world_size()
    mesh, parts = gradient.device_mesh, 1
    for dim, placement in enumerate(gradient.placements):
        parts *= 1 if placement.is_replicate() else mesh.size(dim)
    return gradient.to_local(), parts / dist.get_world_size()
