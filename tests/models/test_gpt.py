"""The reference GPT against the same model written naively, and its configuration."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import alibi_slopes, reference
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.rotary import apply_rotary, rotary_tables
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SMALL = {"vocab_size": 11, "context_length": 12, "num_layers": 2, "num_heads": 4, "embed_dim": 32}
VARIANTS = {
    "learned": {},
    "rotary": {"positions": "rotary", "rotary_base": 100.0},
    "interleaved": {"positions": "rotary", "rotary_style": "interleaved"},
    "gqa-bias": {"num_kv_heads": 2, "bias": True},
    "mqa-rotary-window": {"num_kv_heads": 1, "positions": "rotary", "window": 3},
    "untied, bias of the head": {"tie_weights": False, "head_bias": True},
    "alibi-sinks": {"positions": "alibi", "sinks": True},
    "norm-softcap-first": {
        "positions": "rotary",
        "num_kv_heads": 2,
        "window": 3,
        "keep_first": 2,
        "softcap": 3.0,
        "qk_norm": True,
        "output_gate": "element",
    },
}


def make_model(device="cpu", **changes) -> GPT:
    """A small GPT whose parameters are large enough for every one of them to matter."""
    model = GPT(GPTConfig(**{**SMALL, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def naive_logits(config: GPTConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model's formula over its parameters, in their dtype, with the oracle's attention."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        shape = (config.embed_dim,)
        return F.layer_norm(x, shape, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    B, T = tokens.shape
    H_q, H_k = config.num_heads, config.num_kv_heads or config.num_heads
    x = weights["token_embedding.weight"][tokens]
    if config.positions == "learned":
        x = x + weights["position_embedding.weight"][:T]
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.attention_norm")
        q, k, v = (
            linear(h, f"{block}.attention.{name}_proj").view(B, T, heads, -1).transpose(1, 2)
            for name, heads in (("q", H_q), ("k", H_k), ("v", H_k))
        )
        if config.qk_norm:
            q, k = (
                F.rms_norm(part, part.shape[-1:], weights[f"{block}.attention.{name}.weight"], 1e-6)
                for part, name in ((q, "q_norm"), (k, "k_norm"))
            )
        if config.positions == "rotary":
            cos, sin = rotary_tables(
                T, config.head_dim, base=config.rotary_base, device=x.device, dtype=torch.float64
            )
            q, k = (apply_rotary(part, cos, sin, style=config.rotary_style) for part in (q, k))
        o = reference.attention(
            q,
            k,
            v,
            causal=True,
            window=config.window,
            keep_first=config.keep_first,
            softcap=config.softcap,
            alibi_slopes=alibi_slopes(H_q) if config.positions == "alibi" else None,
            sinks=weights.get(f"{block}.attention.sinks"),
        )
        o = o.transpose(1, 2).reshape(B, T, -1)
        if config.output_gate == "element":
            o = o / (1 + torch.exp(-linear(h, f"{block}.attention.output_gate_proj")))
        x = x + linear(o, f"{block}.attention.out_proj")
        hidden = F.gelu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up_proj"))
        x = x + linear(hidden, f"{block}.mlp.down_proj")
    head = "token_embedding" if config.tie_weights else "head"
    return F.linear(norm(x, "norm"), weights[f"{head}.weight"], weights.get("head_bias"))


def naive_results(model: GPT, tokens: Tensor, targets: Tensor, dtype: torch.dtype):
    """Logits, loss and gradients by name."""
    weights = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}
    logits = naive_logits(model.config, weights, tokens)
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


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_loss_and_gradients_equal_the_naive_model(changes):
    model = make_model(**changes)
    tokens, targets = torch.randint(11, (2, 3, 12))
    assert_model_equals_naive(model, tokens, targets)


def test_triton_logits_loss_and_gradients_equal_the_naive_model(monkeypatch, device):
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    model = make_model(device, **VARIANTS["mqa-rotary-window"])
    tokens, targets = torch.randint(11, (2, 2, 5), device=device)
    assert_model_equals_naive(model, tokens, targets)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rotary", "alibi", "scalar"])
def test_packed_texts_do_not_see_each_other(positions):
    """Positions by distance alone: a text gives the same result anywhere in a row."""
    model = make_model(positions=positions, window=4).eval()
    tokens = torch.randint(11, (1, 12))
    ids = torch.tensor([[3] * 5 + [0] * 6 + [-1]])
    packed = model(tokens, documents=ids)
    for start, stop in ((0, 5), (5, 11)):
        alone = model(tokens[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed[:, 5:11], model(tokens)[:, 5:11], atol=1e-2)
    with pytest.raises(ValueError, match="documents cannot go with a cache"), torch.no_grad():
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
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@torch.no_grad()
def test_a_full_cache_is_named_and_left_as_it_was():
    model = make_model()
    tokens = torch.randint(11, (2, 8))
    cache = model.new_cache(2, 10)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="it holds 8 of 10 tokens a row, got T=3 more"):
        model(tokens[:, :3], cache=cache)
    assert [layer.uniform_length for layer in cache] == [8, 8]
