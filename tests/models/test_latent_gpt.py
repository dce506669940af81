"""`GPT` with a latent for the keys and values of all heads."""

from typing import Any

import pytest
import torch
from small_gpt import called

from fastattn import LatentCache
from fastattn.models.gpt import GPT, GPTConfig

SIZES: dict[str, Any] = {
    "vocab_size": 31, "context_length": 24, "num_layers": 2, "num_heads": 4, "embed_dim": 32,
    "kv_latent_dim": 16,
}  # fmt: skip


def model(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SIZES, **options})).eval()


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generation_by_latents_is_that_without_a_cache(positions: str, device: str) -> None:
    gpt = model(positions=positions, window=9, sinks=True).to(device)
    tokens = torch.arange(14).view(2, 7).to(device)
    cache = gpt.new_cache(2)
    rope = 4 if positions == "rotary" else 0
    assert all(isinstance(x, LatentCache) and x.k.shape[-1] == 16 + rope for x in cache)
    actual, expected = gpt.generate(tokens, 6, top_k=1), tokens
    for _ in range(6):
        best = gpt(expected)[0][:, -1:].argmax(-1)
        expected = torch.cat((expected, best), 1)
    assert torch.equal(actual, expected)
    assert torch.equal(called(gpt).generate(tokens, 6, top_k=1), expected)


def test_it_learns_and_its_layers_start_small() -> None:
    gpt = model(positions="rotary", num_layers=8).train()
    writers = [x for name, x in gpt.named_parameters() if name.endswith("o_proj.weight")]
    assert all(x.std() < 0.01 for x in writers) and len(writers) == 8
    tokens = torch.arange(24).view(2, 12)
    _, loss = gpt(tokens, tokens)
    loss.backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in gpt.parameters())
