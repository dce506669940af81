"""Ranks that are killed while they write a checkpoint together: a whole one is always left."""

import os
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from file_faults import arm, fork, status_of
from gloo_ranks import run_alone
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastattn.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fastattn.training.sharded import ShardedWriter
from fastattn.training.tokenizers import CharacterTokenizer


def checkpoint(step: int, mesh: DeviceMesh | None = None) -> Checkpoint:
    weight = torch.arange(16.0).view(8, 2) * step
    if mesh is not None:
        weight = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    model = {"weight": weight, "bias": torch.full((3,), float(step))}
    training = {"moment": weight + 1, "random": torch.arange(4) * step}
    return Checkpoint(step, model, training, CharacterTokenizer("ab"), {"kind": "gpt"}, {})


def save(run: Path, rank: int, n: int) -> None:
    """Save step 2 over step 1 as one of two ranks, killed at the n-th file operation there."""
    store = dist.FileStore(f"{run}.store", 2)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    mesh = init_device_mesh("cpu", (2,))
    writer = ShardedWriter(run)
    count = arm(n, under=f"{run}/")
    writer.save(checkpoint(2, mesh))
    Path(f"{run}.{rank}").write_text(str(count[0]))


def saved(run: Path, doomed: tuple[int, ...] = (), n: int = 0) -> list[int]:
    """Exit statuses of two ranks. One whose partner has died sees that, and ends by itself."""
    shutil.copytree(run.parent / "first", run)
    ranks = [fork(partial(save, run, rank, n if rank in doomed else 0)) for rank in range(2)]
    return list(map(status_of, ranks))


def kills(folder: str) -> tuple[list[int], list[tuple[tuple[int, ...], list[int], int, bool]]]:
    """Operations of each rank; and of saves in which some are killed what is left."""
    base = Path(folder)
    # What is imported at a first use is imported once, before the forks.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoint(1, init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()
    save_checkpoint(base / "first", checkpoint(1))
    assert saved(base / "count") == [0, 0]
    totals = [int(Path(f"{base}/count.{rank}").read_text()) for rank in range(2)]
    reports = []
    for doomed in ((0,), (1,), (0, 1)):
        total = min(totals[rank] for rank in doomed)
        for n in sorted({1 + i * (total - 1) // 6 for i in range(7)}):
            run = base / f"{doomed}-{n}"
            statuses = saved(run, doomed, n)
            left = load_checkpoint(run)
            wanted, whole = checkpoint(left.step), True
            for part in ("model", "training"):
                for name, x in getattr(wanted, part).items():
                    whole &= torch.equal(getattr(left, part)[name], x)
            save_checkpoint(run, checkpoint(3))
            whole &= os.listdir(run) == ["step-00000003"]
            reports.append((doomed, statuses, left.step, whole))
    return totals, reports


def test_a_kill_of_one_rank_or_all_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    totals, reports = run_alone(f"{__file__}:kills", folder=str(tmp_path))
    assert min(totals) >= 7 and len(reports) >= 20
    steps: dict[tuple[int, ...], list[int]] = {(0,): [], (1,): [], (0, 1): []}
    for doomed, statuses, step, whole in reports:
        # Of two that are doomed one may see the other's end before its own.
        assert -9 in [statuses[rank] for rank in doomed] and set(statuses) <= {-9, 1}
        assert len(doomed) == 2 or statuses.count(-9) == 1
        assert whole
        steps[doomed].append(step)
    # The first rank renames: before that step 1 is left, and then step 2.
    assert steps[0,] == sorted(steps[0,]) and set(steps[0,]) == {1, 2}
    # Nothing is named that a rank has not written its part of.
    assert set(steps[1,]) == {1} == set(steps[0, 1])
