"""Activation checkpointing computes the same gradients, and what it says it keeps is kept."""

from collections import Counter

import pytest
import torch
from nightly import gate_cases
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.distributed.recompute import blocks_of, recompute

SHAPE = {"vocab_size": 11, "context_length": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 16}


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def run(how: str, **options):
    """Gradients, and how often attention and the feed-forward products run."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **options))
    for block in blocks_of(model):
        recompute(block, how)
    tokens = torch.randint(11, (2, 16))
    torch.manual_seed(1)
    with Counting() as mode:
        model(tokens, tokens)[1].backward()
    counts = {
        "attention": sum(
            count
            for name, count in mode.counts.items()
            if "backward" not in name and ("scaled_dot" in name or "attention_forward" in name)
        ),
        "gelu": mode.counts["aten::gelu"],
    }
    return [x.grad for x in model.parameters()], counts, torch.get_rng_state()


DROPPED = {"dropout": 0.2, "attention_dropout": 0.2}


@pytest.mark.parametrize(
    ("backend", "options"),
    gate_cases([("torch", {}), ("torch", DROPPED), ("triton", DROPPED)], [("triton", {})]),
)
def test_gradients_are_the_same_and_attention_is_kept(backend, options, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", backend)
    expected, plain, state = run("none", **options)
    layers = SHAPE["num_layers"]
    # torch's own attention serves no dropout that repeats: there the formula does.
    fused = not (options and backend == "torch")
    assert plain == {"attention": layers * fused, "gelu": layers}
    for how, times in (("full", 2), ("selective", 1)):
        grads, counts, after = run(how, **options)
        assert counts == {"attention": times * layers * fused, "gelu": 2 * layers}, how
        assert torch.equal(after, state)
        for mine, other in zip(grads, expected, strict=True):
            assert torch.equal(mine, other)
