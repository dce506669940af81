"""Custom score function with learned tensors: the forgetting transformer (FoX).

python examples/own_score.py --attention gates --steps 200

A head forgets keys by a gate a token (Lin et al. 2025, arXiv 2503.02130). "gates" adds their logs
to scores by a `score_mod`, "dense" does it in torch; "plain" has no gates. None has positions.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import attention
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.data.text import standard_library_text

WIDTH, HEADS, T = 64, 4, 128
SHAPE = {"num_layers": 2, "num_heads": HEADS, "embed_dim": WIDTH, "context_length": T}


class Forgetting(nn.Module):
    """Attention with forget gates, in place of `block.attention`."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense, self.out = dense, nn.Linear(WIDTH, WIDTH)
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        forgotten = nn.functional.logsigmoid(self.gates(x)).cumsum(1).mT

        def forgetting(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return x + forgotten[b, h, i] - forgotten[b, h, j]

        if self.dense:
            x = q @ k.mT * q.shape[-1] ** -0.5 + forgotten[..., None] - forgotten[:, :, None]
            o = x.masked_fill(torch.ones_like(x).triu(1) > 0, -torch.inf).softmax(-1) @ v
        else:
            o = attention(q, k, v, causal=True, score_mod=forgetting)
        return self.out(o.transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("plain", "gates", "dense"), default="gates")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else standard_library_text(300_000)
    numbers = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[x] for x in text])
    torch.manual_seed(0)
    model = GPT(GPTConfig(len(numbers), positions="none", **SHAPE))
    for block in model.blocks if options.attention != "plain" else ():
        block.attention = Forgetting(options.attention == "dense")
    model.initialise_weights()
    print(f"{options.attention}: {model.num_parameters()} parameters")  # noqa: T201
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(tokens) - T, (4, 1), generator=generator) + torch.arange(T + 1)
        _, loss = model(tokens[rows[:, :-1]], tokens[rows[:, 1:]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps:
            print(f"step {step:4}  loss {loss.item():.4f}")  # noqa: T201


if __name__ == "__main__":
    main()
