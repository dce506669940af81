"""Train the reference GPT with another attention in its blocks, at the same number of parameters.

python examples/sparse_gpt.py --attention nsa --steps 200

"plain" sees all keys; "latent", an option of the GPT, makes them of one latent a token (MLA). "nsa"
and "moba" choose blocks of keys: their layer takes the place of `block.attention`, without a cache.
"""

# ruff: noqa: T201 (an example prints)

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import MoBAttention, NativeSparseAttention
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.data.text import standard_library_text

WIDTH, HEADS, T = 64, 4, 256
SIZES = {"num_layers": 3, "num_heads": HEADS, "embed_dim": WIDTH, "num_kv_heads": 1}
LATENT: dict[str, Any] = {"num_kv_heads": None, "kv_latent_dim": 24}
NSA: dict[str, Any] = {"block_k": 16, "n": 4, "window": 32, "pool": (8, 4)}
LAYERS: dict[str, Any] = {
    "nsa": lambda: NativeSparseAttention(WIDTH, HEADS, 1, rotary="half", **NSA),
    "moba": lambda: MoBAttention(WIDTH, HEADS, 1, rotary="half", block_k=32, n=3),
}


class InBlock(nn.Sequential):
    """A layer that a block of the GPT calls without masks and caches."""

    def forward(self, x: Tensor, *, rotary_tables: Any = None, **_: Any) -> Any:
        return self[0](x, rotary_tables=rotary_tables)


def make(attention: str, vocab_size: int, seed: int, hidden_dim: int = 4 * WIDTH) -> GPT:
    """A GPT with this attention in every block; equal shapes have equal weights."""
    fields = SIZES | {"hidden_dim": hidden_dim} | (LATENT if attention == "latent" else {})
    model = GPT(GPTConfig(vocab_size, T, positions="rotary", **fields))
    for block in model.blocks if attention in LAYERS else ():
        block.attention = InBlock(LAYERS[attention]())
    torch.manual_seed(seed)
    model.initialise_weights()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("plain", "latent", *LAYERS), default="nsa")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else standard_library_text(300_000)
    numbers = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[x] for x in text])
    # MLPs make up for what the attention has more or less.
    plain, other = (make(x, len(numbers), 0).num_parameters() for x in ("plain", options.attention))
    wider = round((plain - other) / (2 * WIDTH * SIZES["num_layers"]))
    model = make(options.attention, len(numbers), options.seed, 4 * WIDTH + wider)
    print(f"{options.attention}: {model.num_parameters()} parameters")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    generator = torch.Generator().manual_seed(0)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(tokens) - T, (4, 1), generator=generator)
        batch = tokens[starts + torch.arange(T + 1)]
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps:
            print(f"step {step:4}  loss {sum(losses[-10:]) / len(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
