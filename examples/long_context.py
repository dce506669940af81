"""Context parallelism: train on one sequence sharded over ranks, with a causal window and GQA.

torchrun --nproc-per-node 2 examples/long_context.py --tokens 4096
"""

# ruff: noqa: T201 (an example prints)

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fastattn import CausalGQAttention
from fastattn.models.context_parallel import ContextParallel
from fastattn.parallel import ContextPlan, roll, shard


class Model(nn.Module):
    def __init__(self, vocab_size: int, width: int, layers: int, window: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            CausalGQAttention(width, num_heads=4, num_kv_heads=2, window=window, rotary="half")
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model = Model(64, 64, 2, options.window).to(device)
    whole = torch.arange(options.tokens, device=device)[None] * 7 % 61

    plan = ContextPlan.make(options.tokens, ranks, causal=True, window=options.window)
    tokens = shard(whole, 1, plan, mesh)
    targets = roll(tokens, 1, plan, mesh)  # the next token, on whichever rank; -100 in padding
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        with ContextParallel(mesh, plan):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (options.tokens - 1)
        loss.backward()
        for p in model.parameters():  # losses and gradients are shares of the whole ones
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(
                f"step {step}  {tokens.shape[1]} of {plan.length * ranks} tokens  loss {total:.4f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
