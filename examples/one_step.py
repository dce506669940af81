"""Train a one-step generator by forward-mode AD: MeanFlow (Geng et al. 2025, arXiv 2505.13447).

python examples/one_step.py --attention fastattn --steps 300

The model is the mean velocity u from noise at time t to time r. The loss has du/dt on the way, a
tangent by forward mode: "fastattn" pushes it through its kernels, "dense" through torch's softmax.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from fastattn import attention

WIDTH, HEADS, T, POINTS, BATCH = 64, 4, 16, 4, 64


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def wave(phase: Tensor) -> Tensor:
    return torch.sin(phase + torch.arange(T * POINTS).view(T, POINTS) / 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(self.norm, up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(KINDS[options.attention](q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class MeanVelocity(nn.Module):
    """u of z [B, T, POINTS] at times t, down to times r [B, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(T, WIDTH) / 8)
        self.inner, self.outer = nn.Linear(POINTS + 2, WIDTH), nn.Linear(WIDTH, POINTS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        given = torch.cat((z, *(x.expand(len(z), T, 1) for x in (r, t))), -1)
        return self.outer(self.blocks(self.inner(given) + self.places))


KINDS = {"fastattn": attention, "dense": dense}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--attention", choices=KINDS, default="fastattn")
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()
torch.manual_seed(0)
model = MeanVelocity()
print(f"{options.attention}: {sum(x.numel() for x in model.parameters())} parameters")  # noqa: T201
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, options.steps + 1):
    data = wave(2 * math.pi * torch.rand(BATCH, 1, 1))
    noise, (r, t) = torch.randn_like(data), torch.rand(2, BATCH, 1, 1).sort(0).values
    r[: BATCH // 2] = t[: BATCH // 2]  # u is the velocity itself
    z, velocity = (1 - t) * data + t * noise, noise - data
    u, change = torch.func.jvp(model, (z, r, t), (velocity, 0 * r, 0 * t + 1))
    error = (u - (velocity - (t - r) * change).detach()).square().mean((1, 2))
    (error / (error.detach() + 1e-3)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps:
        with torch.no_grad():
            samples = noise - model(noise, 0 * t, 0 * t + 1)  # in one step
        waves = wave(torch.linspace(0, 2 * math.pi, 64)[:, None, None])
        far = (samples[:, None] - waves).square().mean((2, 3)).amin(1).mean()
        print(f"step {step:4}  square distance of samples from waves {far:.4f}")  # noqa: T201
