"""The ranks of a process group that train one model together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous

from ...models.context_parallel import ContextParallel
from ...modules.layer import AttentionLayer
from ...parallel import ContextPlan
from .. import sharded
from ..checkpoint import Checkpoint
from ..tasks.task import Batch, LanguageTask, Task
from ..train_config import TrainConfig, resolve_device
from .batches import Part, place, plan_rows
from .degrees import NAMES, TIMEOUT, Degrees, Split, SplitError
from .dropout import SplitDropout
from .gradients import clip_gradients
from .launcher import attempt
from .ranks import Ranks
from .sharding import shard_model, synchronise

_Value = TypeVar("_Value")


class Together(Ranks):
    """`Ranks` of the process group, which has been started.

    Args:
        split: how they are arranged.
        timeout: seconds that they wait for each other.
    """

    def __init__(self, split: Split, timeout: float = TIMEOUT) -> None:
        self.split = split
        self._patience = timedelta(seconds=timeout)
        self.first = dist.get_rank() == 0
        self._plans: dict[int, ContextPlan] = {}
        # What plans go by, of the model.
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
        """Which part of a batch's rows this rank has."""
        dp, fsdp, *_ = self.mesh.get_coordinate() or (0, 0)
        return dp * self.split.fsdp + fsdp

    @property
    def _cp(self) -> int:
        return self.mesh["cp"].get_local_rank()

    def prepare(self, model: nn.Module, config: TrainConfig) -> Callable[..., Any]:
        fields: Any = model.config
        heads = fields.num_heads
        own = heads, getattr(fields, "num_kv_heads", None) or heads
        self._attention = {
            "heads": tuple(max(1, n // self.split.tp) for n in own),
            "head_dim": fields.embed_dim // heads,
        }
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
        """A mesh whose groups, which torch gives a timeout of its own, wait as long as all do."""
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
        own = place(batch.whole_rows or rows, self._part, self.split.parts)
        if self.split.cp > 1:
            plan = self._plan(T, own.batch(batch).documents)
            own = own._replace(plan=plan, rank=self._cp)
        with ExitStack() as stack:
            stack.enter_context(SplitDropout(own))
            if own.plan is not None:
                stack.enter_context(ContextParallel(self.mesh["cp"], own.plan))
            part = Part(own.batch(batch).to(device), self._targets(batch))
            if own.plan is not None and part.batch.documents is not None:
                own.plan.mark(part.batch.documents)
            yield part

    def _targets(self, batch: Batch) -> int:
        """Count the targets in all rows; a rank may have read only its own."""
        if batch.whole_rows is None:
            return batch.num_targets
        count = torch.tensor(batch.num_targets)
        dist.all_reduce(count)
        # Ranks of cp and tp have read the same.
        return int(count) // (self.split.cp * self.split.tp)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        # Layers gather their own as they are called. What belongs to none is gathered by the
        # model's forward, which other methods pass by, and stays whole without a backward pass.
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        synchronise(model, self.split, last)
        # torch takes the mean over the ranks of the mesh, and these are shares of a sum.
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
        self, found: Checkpoint | Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        assert isinstance(found, Path), "each rank reads its part of the file"
        return sharded.restore_sharded(found, model, optimizer)

    def agree(self, flag: bool) -> bool:
        # On the CPU, where nobody waits for a GPU.
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = decide()
            except Exception as problem:
                said[1] = problem
        dist.broadcast_object_list(said)
        value, error = said
        if error is not None:
            raise error
        return cast(_Value, value)

    def _plan(self, T: int, documents: Tensor | None) -> ContextPlan:
        """Plan rows of T tokens that the ranks of cp share, and the documents [rows, T] in them."""
        if documents is not None:
            return plan_rows(T, self.split.cp, documents=documents, **self._attention)
        if T not in self._plans:
            self._plans[T] = plan_rows(T, self.split.cp, **self._attention)
        return self._plans[T]


@contextmanager
def started(degrees: Degrees) -> Iterator[Together]:
    """All ranks, as asked for, while the block runs."""
    # gloo beside NCCL, for what is on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives a restart, and so would the addresses of ranks that have ended.
    store = PrefixStore(f"attempt {attempt()}", store)
    wait = timedelta(seconds=degrees.timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    try:
        yield Together(degrees.split(dist.get_world_size()), degrees.timeout)
    finally:
        dist.destroy_process_group()
