"""Train a GPT by tensor and data parallelism, and save it by torch's own checkpoints.

torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2    # 2 x 2: rows by heads
torchrun --nproc-per-node 2 examples/tensor_parallel.py --resume      # continue, on other ranks
"""

# ruff: noqa: T201 (an example prints)

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.tensor_parallel import tp_plan


def state(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share out the heads")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default="runs/tensor_parallel")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    shape = (ranks // options.tensor, options.tensor)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("rows", "heads"))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model = GPT(GPTConfig(61, context_length=64, num_layers=2, num_heads=4, embed_dim=64)).to(
        device
    )
    parallelize_module(model, mesh["heads"], tp_plan(model))
    fully_shard(model, mesh=mesh["rows"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.resume:
        saved = state(model, optimizer)
        dcp.load(saved, checkpoint_id=options.folder)
        parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(model, optimizer, **parts)
    whole = torch.arange(8 * 65, device=device).view(8, 65) * 7 % 61
    rows = whole.chunk(shape[0])[mesh["rows"].get_local_rank()]
    for step in range(options.steps):
        _, loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}  loss {total:.4f}")
    dcp.save(state(model, optimizer), checkpoint_id=options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
