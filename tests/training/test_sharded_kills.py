"""Ranks that are killed while they write a checkpoint together: a whole one is always left."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Two forked ranks save step 2 over step 1; one of them, or both, are killed before their n-th file
# operation there. A rank whose partner has died sees its connection closed, and ends by itself.
KILLS = """
import json, os, shutil, signal, sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastattn.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fastattn.training.sharded import ShardedWriter
from fastattn.training.tokenizers import CharacterTokenizer

torch.set_num_threads(1)
base = Path(sys.argv[1])
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def checkpoint(step, mesh=None):
    weight = torch.arange(16.0).view(8, 2) * step
    if mesh is not None:
        weight = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    model = {"weight": weight, "bias": torch.full((3,), float(step))}
    training = {"moment": weight + 1, "random": torch.arange(4) * step}
    return Checkpoint(step, model, training, CharacterTokenizer("ab"), {"kind": "gpt"}, {})


def arm(run, n):
    # Counts operations in a run's folder, fsync included, and kills before the n-th.
    count, flush = [0], os.fsync

    def operation():
        count[0] += 1
        if count[0] == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event in EVENTS and str(run) in str(args[0]):
            operation()

    os.fsync = lambda descriptor: (operation(), flush(descriptor))
    sys.addaudithook(audit)
    return count


def rank(run, number, n):
    store = dist.FileStore(str(run) + ".store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    writer = ShardedWriter(run)
    count = arm(run, n)
    writer.save(checkpoint(2, mesh))
    if n == 0:
        Path(f"{run}.{number}").write_text(str(count[0]))


def save(run, doomed, n):
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                rank(run, number, n if number in doomed else -1 if doomed else 0)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def same(found, wanted):
    return all(
        torch.equal(getattr(found, part)[name], x)
        for part in ("model", "training")
        for name, x in getattr(wanted, part).items()
    )


# What is imported at a first use is imported once, before the forks.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpoint(1, init_device_mesh("cpu", (1,)))
dist.destroy_process_group()
save_checkpoint(base / "first", checkpoint(1))
shutil.copytree(base / "first", base / "count")
assert save(base / "count", (), 0) == [0, 0]
totals = [int(Path(f"{base}/count.{number}").read_text()) for number in range(2)]
print(json.dumps(totals))
for doomed in ((0,), (1,), (0, 1)):
    total = min(totals[number] for number in doomed)
    for n in sorted({1 + i * (total - 1) // 6 for i in range(7)}):
        run = base / f"{doomed}-{n}"
        shutil.copytree(base / "first", run)
        statuses = save(run, doomed, n)
        left = load_checkpoint(run)
        whole = same(left, checkpoint(left.step))
        save_checkpoint(run, checkpoint(3))
        print(json.dumps([doomed, statuses, left.step, whole, os.listdir(run)]), flush=True)
"""


def test_a_kill_of_one_rank_or_all_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path)],
        env={**os.environ, "FASTATTN_BACKEND": "torch"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    totals, *reports = map(json.loads, done.stdout.splitlines())
    assert min(totals) >= 7 and len(reports) >= 20
    steps = {"[0]": [], "[1]": [], "[0, 1]": []}
    for doomed, statuses, step, whole, after in reports:
        # Of two that are doomed one may see the other's end before its own.
        assert -9 in [statuses[rank] for rank in doomed] and set(statuses) <= {-9, 1}
        assert len(doomed) == 2 or statuses.count(-9) == 1
        assert whole and after == ["step-00000003"]
        steps[str(doomed)].append(step)
    # The first rank renames: before that step 1 is left, and then step 2.
    assert steps["[0]"] == sorted(steps["[0]"]) and set(steps["[0]"]) == {1, 2}
    # Nothing is named that a rank has not written its part of.
    assert set(steps["[1]"]) == {1} == set(steps["[0, 1]"])
