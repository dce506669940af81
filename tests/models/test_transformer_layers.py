"""Feed-forward layers, norms, block orders and sparse patterns of models, by their formulas."""

import copy
from functools import partial

import pytest
import torch
from small_gpt import randomised
from torch import Tensor, nn

from fastattn import reference
from fastattn.models.gpt import GPTConfig
from fastattn.models.layers import MLP, make_block, make_norm, uniform_attention
from fastattn.models.model_config import TransformerConfig
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

C = 16
SIZES = {"num_layers": 2, "num_heads": 4, "embed_dim": C}


def phi(x: Tensor) -> Tensor:
    """The normal distribution's cumulative density."""
    return 0.5 * (1 + torch.erf(x / 2**0.5))


ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: x / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "geglu": lambda x: x * phi(x),
    "swiglu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_is_its_formula(activation):
    layer = randomised(MLP(C, 24, bias=True, activation=activation))
    gated = activation in ("geglu", "swiglu")
    x = torch.randn(3, 5, C)

    def naive(layer: MLP, x: Tensor) -> Tensor:
        h = layer.up_proj(x)
        act = ACTIVATIONS[activation]
        h = act(layer.gate_proj(x)) * h if gated else act(h)
        return layer.down_proj(h)

    assert layer.up_proj.weight.shape == (24, C)
    with torch.no_grad():
        exact = naive(copy.deepcopy(layer).double(), x.double())
        plain = worst_naive(exact, partial(naive, layer, x))
        assert_within_budget("output", layer(x), exact, plain)


def test_norms_are_their_formulas():
    x = torch.randn(5, C).double()
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    for kind, expected in {
        "layernorm": (x - mean) / (variance + 0.1).sqrt(),
        "rmsnorm": x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
    }.items():
        norm = make_norm(kind, C, eps=0.1, bias=True).double()
        torch.testing.assert_close(norm(x), expected)
    assert make_norm("layernorm", C).bias is None
    assert [name for name, _ in make_norm("rmsnorm", C, bias=True).named_parameters()] == ["weight"]


def test_parallel_parts_share_a_norm():
    block = randomised(make_block(TransformerConfig(**SIZES, block="parallel"), 0, cross=True))
    x, memory = torch.randn(2, 5, C), block.cross.project_memory(torch.randn(2, 3, C))
    h = block.attention_norm(x)
    y = x + block.mlp(h) + block.attention(h) + block.cross(h, memory)
    torch.testing.assert_close(block(x, memory=memory), y)
    assert sum(name.endswith("norm.weight") for name, _ in block.named_parameters()) == 1


@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
def test_a_residual_is_projected(order):
    fields = {**SIZES, "block": order, "bias": True}
    block = randomised(make_block(TransformerConfig(**fields, project_residual=True), 0))
    x, W = torch.randn(2, 5, C), block.residual
    attend, first, second = block.attention, block.attention_norm, block.mlp_norm
    kept = x @ W.weight.T + W.bias
    if order == "pre":
        y = kept + attend(first(x))
        y = y + block.mlp(second(y))
    elif order == "post":
        y = first(kept + attend(x))
        y = second(y + block.mlp(y))
    else:
        y = kept + block.mlp(first(x)) + attend(first(x))
    torch.testing.assert_close(block(x), y)


def copied(theirs: nn.Transformer, model: Seq2Seq) -> None:
    """Puts the weights of torch's transformer into ours."""

    def put(ours: nn.Module, weight: Tensor, bias: Tensor) -> None:
        ours.weight.data, ours.bias.data = weight.data.clone(), bias.data.clone()

    def put_parts(ours: nn.Module, names: str, weight: Tensor, bias: Tensor) -> None:
        parts = zip(names, weight.chunk(len(names)), bias.chunk(len(names)), strict=True)
        for name, *part in parts:
            put(ours.get_submodule(f"{name}_proj"), *part)

    def put_all(block, layer, norms):
        qkv = layer.self_attn
        put_parts(block.attention, "qkv", qkv.in_proj_weight, qkv.in_proj_bias)
        for ours, name in {
            "attention.out_proj": qkv.out_proj,
            "mlp.up_proj": layer.linear1,
            "mlp.down_proj": layer.linear2,
            **norms,
        }.items():
            put(block.get_submodule(ours), name.weight, name.bias)

    for block, layer in zip(model.encoder.blocks, theirs.encoder.layers, strict=True):
        put_all(block, layer, {"attention_norm": layer.norm1, "mlp_norm": layer.norm2})
    for block, layer in zip(model.decoder.blocks, theirs.decoder.layers, strict=True):
        norms = {"attention_norm": layer.norm1, "cross_norm": layer.norm2, "mlp_norm": layer.norm3}
        put_all(block, layer, norms)
        cross = layer.multihead_attn
        put_parts(block.cross, "qkv", cross.in_proj_weight, cross.in_proj_bias)
        put(block.cross.out_proj, cross.out_proj.weight, cross.out_proj.bias)
    if model.encoder.norm is not None:
        put(model.encoder.norm, theirs.encoder.norm.weight, theirs.encoder.norm.bias)
        put(model.decoder.norm, theirs.decoder.norm.weight, theirs.decoder.norm.bias)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("order", ["pre", "post"])
@torch.no_grad()
def test_encoder_and_decoder_are_those_of_torch(order, activation):
    options = {"dropout": 0.0, "activation": activation, "batch_first": True}
    options["norm_first"] = order == "pre"
    layer = nn.TransformerEncoderLayer(C, 4, 24, **options)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(C), enable_nested_tensor=False)
    theirs = nn.Transformer(C, 4, 2, 2, 24, custom_encoder=encoder, **options)
    randomised(theirs)
    if order == "post":
        # Theirs has one more norm behind the last layer's.
        theirs.encoder.norm = theirs.decoder.norm = None
    ours = {"positions": "none", "block": order, "activation": activation, "hidden_dim": 24}
    model = randomised(Seq2Seq(Seq2SeqConfig(11, 13, 9, 9, **SIZES, **ours, bias=True)))
    copied(theirs, model)
    source, inputs = torch.randint(11, (2, 9)), torch.randint(13, (2, 7))
    lengths = torch.tensor([9, 4])
    padding = torch.arange(9) >= lengths[:, None]

    def expected(dtype: torch.dtype) -> Tensor:
        theirs.to(dtype)
        embed = [part.token_embedding.weight.to(dtype) for part in (model.encoder, model.decoder)]
        out = theirs(
            embed[0][source],
            embed[1][inputs],
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(7, dtype=dtype),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return out @ embed[1].T

    exact = expected(torch.float64)
    naive = worst_naive(exact, lambda: expected(torch.float32))
    logits, _ = model(source, inputs, source_lengths=lengths)
    assert_within_budget("logits", logits, exact, naive)


def seen_by(config: GPTConfig, layer: int) -> Tensor:
    """bool [T, T]: which keys a layer's queries see, found by changing one token at a time."""
    block = randomised(make_block(config, layer, causal=True)).attention
    T = 9
    seen = torch.zeros(T, T, dtype=torch.bool)
    x = torch.randn(1, T, C)
    with torch.no_grad():
        for j in range(T):
            changed = x.clone()
            changed[:, j] += 1
            seen[:, j] = (block(changed) != block(x))[0].any(-1)
    return seen


@pytest.mark.parametrize("sparse", ["alternate", "merge"])
def test_sparse_layers_see_what_the_reference_mask_says(sparse):
    config = GPTConfig(5, 9, **SIZES, sparse=sparse, window=3, stride=4, positions="none")
    local = reference.visible_mask(9, 9, causal=True, window=3)[0]
    strided = reference.visible_mask(9, 9, causal=True, stride=4)[0]
    both = local | strided
    expected = [both, both, both] if sparse == "merge" else [local, strided, local]
    for layer, mask in enumerate(expected):
        assert torch.equal(seen_by(config, layer), mask.view(9, 9)), layer


def test_uniform_attention_is_the_average_of_what_is_seen():
    v = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(uniform_attention(v), v.mean(2, keepdim=True).expand_as(v))
    counts = torch.arange(1.0, 6)[:, None]
    torch.testing.assert_close(uniform_attention(v, causal=True), v.cumsum(2) / counts)
    lengths = torch.tensor([2, 0])
    got = uniform_attention(v, queries=1, key_lengths=lengths)
    torch.testing.assert_close(got[0], v[0, :, :2].mean(1, keepdim=True))
    assert not got[1].any()
