"""The reference GPT against the same model written naively, and its configuration."""

import copy

import pytest
import torch
import torch.nn.functional as F
from naive_layers import naive_layer
from torch import Tensor

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SMALL = {"vocab_size": 11, "context_length": 12, "num_layers": 2, "num_heads": 4, "embed_dim": 32}
# The fields of a model, and the words of its layers about those that are theirs.
VARIANTS = {
    "learned": ({}, "num_kv_heads=4, head_dim=8"),
    "rotary": ({"positions": "rotary", "rotary_base": 100.0}, "rotary='half', rotary_base=100"),
    "interleaved": ({"positions": "rotary", "rotary_style": "interleaved"}, "rotary='interleaved'"),
    "gqa-bias": ({"num_kv_heads": 2, "bias": True}, "num_kv_heads=2"),
    "mqa-rotary-window": ({"num_kv_heads": 1, "positions": "rotary", "window": 3}, "window=3"),
    "untied, bias of the head": ({"tie_weights": False, "head_bias": True}, ""),
    "alibi-sinks": ({"positions": "alibi", "sinks": True}, "alibi=True, sinks=True"),
    "norm-softcap-first": (
        {
            "positions": "rotary",
            "num_kv_heads": 2,
            "window": 3,
            "keep_first": 2,
            "softcap": 3.0,
            "qk_norm": True,
            "output_gate": "element",
        },
        "window=3, keep_first=2, qk_norm=True, softcap=3.0, output_gate='element'",
    ),
}


def make_model(device="cpu", **changes) -> GPT:
    """A small GPT whose parameters are large enough for every one of them to matter."""
    model = GPT(GPTConfig(**{**SMALL, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def naive_logits(model: GPT, tokens: Tensor) -> Tensor:
    """The model's formula over its parameters, in their dtype, with naive layers of attention."""
    x = model.token_embedding.weight[tokens]
    if model.config.positions == "learned":
        x = x + model.position_embedding.weight[: tokens.shape[1]]
    for block in model.blocks:
        x = x + naive_layer(block.attention, block.attention_norm(x))
        x = x + block.mlp.down_proj(F.gelu(block.mlp.up_proj(block.mlp_norm(x))))
    head = model.token_embedding if model.config.tie_weights else model.head
    return F.linear(model.norm(x), head.weight, dict(model.named_parameters()).get("head_bias"))


def naive_results(model: GPT, tokens: Tensor, targets: Tensor, dtype: torch.dtype):
    """Logits, loss and gradients by name."""
    model = copy.deepcopy(model).to(dtype)
    logits, weights = naive_logits(model, tokens), dict(model.named_parameters())
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return {"logits": logits, "loss": loss, **dict(zip(weights, gradients, strict=True))}


def assert_model_equals_naive(model: GPT, tokens: Tensor, targets: Tensor) -> None:
    logits, loss = model(tokens, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    exact = naive_results(model, tokens, targets, torch.float64)
    naive = worst_naive(exact, lambda: naive_results(model, tokens, targets, torch.float32))
    for name, x in {"logits": logits, "loss": loss, **gradients}.items():
        assert_within_budget(name, x.detach(), exact[name].detach(), naive[name].detach())


@pytest.mark.parametrize(("changes", "words"), VARIANTS.values(), ids=VARIANTS)
def test_logits_loss_and_gradients_equal_the_naive_model(changes, words):
    model = make_model(**changes)
    assert all(words in block.attention.extra_repr() for block in model.blocks)
    tokens, targets = torch.randint(11, (2, 3, 12))
    assert_model_equals_naive(model, tokens, targets)


def test_triton_logits_loss_and_gradients_equal_the_naive_model(monkeypatch, device):
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    model = make_model(device, **VARIANTS["mqa-rotary-window"][0])
    tokens, targets = torch.randint(11, (2, 2, 5), device=device)
    assert_model_equals_naive(model, tokens, targets)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rotary", "alibi", "scalar"])
def test_packed_texts_do_not_see_each_other(positions):
    """Positions by distance alone: a text gives the same result anywhere in a row."""
    model = make_model(positions=positions, window=4).eval()
    tokens = torch.randint(11, (1, 12))
    ids = torch.tensor([[3] * 5 + [0] * 6 + [-1]])
    packed, _ = model(tokens, documents=ids)
    for start, stop in ((0, 5), (5, 11)):
        alone, _ = model(tokens[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed[:, 5:11], model(tokens)[0][:, 5:11], atol=1e-2)
    with pytest.raises(ValueError, match="documents is not supported with"), torch.no_grad():
        model(tokens, documents=ids, cache=model.new_cache(1))


@pytest.mark.parametrize("place", ["embedding", "attention", "weights", "mlp"])
def test_dropout_acts_in_training_alone(place):
    model = make_model(dropout=0.5, attention_dropout=0.5)
    if place != "embedding":
        model.dropout.p = 0.0
    for block in model.blocks:
        if place != "attention":
            block.attention.dropout = 0.0
        if place != "weights":
            block.attention.attention_dropout = 0.0
        if place != "mlp":
            block.mlp.dropout.p = 0.0
    tokens = torch.randint(11, (1, 12))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
