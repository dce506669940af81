"""A score of one's own, with its gradient: soft-thresholded attention, learned end to end.

python examples/own_score.py --steps 200

The task: one key of each row carries a mark, and every query has to give that key's value. Scores
below a threshold are flattened, so that many small ones do not add up to a blur.
"""

# ruff: noqa: T201 (an example prints)

import argparse

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastattn import attention

KNEE = tl.constexpr(1.0)


@triton.jit
def thresholded(x, b, h, q_pos, k_pos):
    return tl.where(x > KNEE, x, 0.1 * x + 0.9 * KNEE)


@triton.jit
def thresholded_grad(dx, x, b, h, q_pos, k_pos):
    return tl.where(x > KNEE, dx, 0.1 * dx)


class Lookup(nn.Module):
    """Keys and queries are learned; values are what is to be found."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(x), values)
        )
        mods = {"score_mod": thresholded, "score_mod_grad": thresholded_grad}
        return attention(q, k, v, **mods).transpose(1, 2).flatten(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Lookup(32, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        x = torch.randn(16, options.length, 32, device=device)
        marked = torch.randint(options.length, (16,), device=device)
        x[:, :, 0] = 1.0
        x[range(16), marked, 1] = 4.0
        values = torch.randn(16, options.length, 32, device=device)
        wanted = values[range(16), marked][:, None].expand_as(values)
        loss = (model(x, values) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step:4}  mean squared error {loss.item():.3f}")


if __name__ == "__main__":
    main()
