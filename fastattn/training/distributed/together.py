"""The ranks of a process group that train one model together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from ...parallel.cost import data_ranks
from .. import sharded
from ..checkpoint import Checkpoint
from ..tasks.prepared import PreparedTask
from ..tasks.task import Batch, Task
from ..train_config import TrainConfig, resolve_device
from .batches import Part, place, plan_rows
from .degrees import NAMES, Degrees, Split, SplitError
from .dropout import SplitDropout
from .gradients import clip_gradients
from .launcher import attempt
from .sharding import shard_model, synchronise

_Value = TypeVar("_Value")


class Together:
    """`Ranks` of the process group, which has been started.

    Args:
        split: how they are arranged.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.first = dist.get_rank() == 0
        self._plans: dict[int, ContextPlan] = {}
        self._window: int | None = None
        self._writer: sharded.ShardedWriter | None = None

    def device(self, name: str) -> torch.device:
        found = resolve_device(name)
        if found.index is not None:
            raise SplitError(f"device must be 'auto', 'cpu' or 'cuda' under torchrun, got {name!r}")
        if found.type == "cuda":
            found = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            torch.cuda.set_device(found)
        return found

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
        if getattr(fields, "sparse", None) is None and getattr(fields, "stride", None) is None:
            self._window = fields.window
        device = next(model.parameters()).device
        self.mesh = init_device_mesh(device.type, tuple(self.split), mesh_dim_names=NAMES)
        for layer in model.modules():
            if isinstance(layer, AttentionLayer):
                layer.first_row = self._part * (config.batch_size // self.split.parts)
        shard_model(model, _parameter_mesh(self.split, device.type), self.split, config, device)
        return model

    def draw(self, task: Task, batch_size: int, generator: torch.Generator) -> Batch:
        each, left = divmod(batch_size, self.split.parts)
        if left or self.split.parts == 1 or not isinstance(task, PreparedTask):
            return task.draw("train", batch_size, generator)
        first = self._part * each
        return task.draw("train", batch_size, generator, slice(first, first + each))

    @contextmanager
    def part(self, batch: Batch, device: torch.device) -> Iterator[Part]:
        rows, T = batch.targets.shape
        plan = self._plan(T)
        own = place(batch.whole_rows or rows, self._part, self.split.parts, plan, self._cp)
        with ExitStack() as stack:
            stack.enter_context(SplitDropout(own))
            if plan is not None:
                stack.enter_context(ContextParallel(self.mesh["cp"], plan))
            yield Part(own.batch(batch).to(device), self._targets(batch))

    def _targets(self, batch: Batch) -> int:
        """Those of all rows, of which each rank may have read its own alone."""
        if batch.whole_rows is None:
            return batch.num_targets
        found = torch.tensor(batch.num_targets)
        dist.all_reduce(found)
        # Ranks of cp and tp have read the same.
        return int(found) // (self.split.cp * self.split.tp)

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

    def loss(self, forward: Callable[..., Any], part: Part) -> Tensor:
        batch = part.batch
        _, loss = forward(*batch.inputs, batch.targets, **batch.keywords, target_count=part.targets)
        found: Tensor = loss
        return found

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        synchronise(model, self.split, last)
        # torch takes the mean over the ranks of the mesh, and these are shares of a sum.
        (loss * (self.split.parts * self.split.cp)).backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float) -> None:
        clip_gradients(model.parameters(), max_norm)

    def total(self, x: Tensor) -> Tensor:
        found = x.detach().clone()
        dist.all_reduce(found)
        return found / self.split.tp

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
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = decide()
            except Exception as problem:
                said[1] = problem
        dist.broadcast_object_list(said)
        found, error = said
        if error is not None:
            raise error
        return cast(_Value, found)

    def _plan(self, T: int) -> ContextPlan | None:
        if self.split.cp == 1:
            return None
        if T not in self._plans:
            self._plans[T] = plan_rows(T, self.split.cp, window=self._window)
        return self._plans[T]


def _parameter_mesh(split: Split, device_type: str) -> DeviceMesh:
    """Dimensions dp, fsdp, tp, of `data_ranks` and `Split.tp`."""
    sizes = (*data_ranks(split), split.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "fsdp", "tp"))


@contextmanager
def started(degrees: Degrees) -> Iterator[Together]:
    """All ranks, as asked for, while the block runs.

    Raises:
        SplitError: the degrees do not multiply to them.
    """
    # gloo beside NCCL, for what is on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives a restart, and so would the addresses of ranks that have ended.
    store = PrefixStore(f"attempt {attempt()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield Together(degrees.split(dist.get_world_size()))
    finally:
        dist.destroy_process_group()
