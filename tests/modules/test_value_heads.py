"""Value heads of another width than those of queries and keys, in layers, caches and models."""

import pytest
import torch
from naive_layers import WIDTH, exact_and_naive, make_layer
from small_gpt import make_gpt

from fastattn import (
    CausalGQAttention,
    CrossGQAttention,
    GQAttention,
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
)
from fastattn.generation import Engine, Sampling, generate_tokens
from fastattn.generation.paged import layers_of
from fastattn.models.gpt2 import UnsupportedModelError, config_to_hf
from fastattn.models.model_config import TransformerConfig
from fastattn.models.positions import RelativeContent
from fastattn.modules.weights import cross_attention_weights, self_attention_weights
from fastattn.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SIZES = {"num_heads": 4, "num_kv_heads": 2}


def shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in layer.state_dict().items()}


def test_shapes_of_the_parameters():
    """4 heads of 8 for queries, 2 for keys, 2 of 12 for values."""
    layer = GQAttention(32, **SIZES, v_head_dim=12, qkv_bias=True)
    assert shapes(layer) == {
        "q_proj.weight": (4 * 8, 32),
        "q_proj.bias": (4 * 8,),
        "k_proj.weight": (2 * 8, 32),
        "k_proj.bias": (2 * 8,),
        "v_proj.weight": (2 * 12, 32),
        "v_proj.bias": (2 * 12,),
        "out_proj.weight": (32, 4 * 12),
    }
    assert layer.new_cache(3, 5).v.shape == (3, 2, 5, 12)
    cross = CrossGQAttention(32, **SIZES, memory_dim=24, v_head_dim=4)
    assert shapes(cross) == {
        "q_proj.weight": (4 * 8, 32),
        "k_proj.weight": (2 * 8, 24),
        "v_proj.weight": (2 * 4, 24),
        "out_proj.weight": (32, 4 * 4),
    }
    assert "head_dim=8, v_head_dim=4" in cross.extra_repr()
    same = GQAttention(32, **SIZES, v_head_dim=8)
    assert shapes(same) == shapes(GQAttention(32, **SIZES))
    assert "v_head_dim" not in same.extra_repr()


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
@torch.no_grad()
def test_every_cache_holds_such_values(quantize):
    layer, x = make_layer(**SIZES, v_head_dim=12, rotary="half"), torch.randn(2, 9, WIDTH)
    sizes = {"value_dim": 12, "quantize": quantize}
    dense = KVCache(2, 2, 9, 8, **sizes)
    ring = KVCache(2, 2, 16, 8, window=9, **sizes)
    pages = PagedKVCache(8, 4, 2, 8, **sizes)
    (paged,) = layers_of(pages, [pages.allocate(), pages.allocate()])
    got = {
        name: torch.cat([layer(part, cache=cache) for part in x.split([6, 1, 2], dim=1)], dim=1)
        for name, cache in (("dense", dense), ("ring", ring), ("paged", paged))
    }
    # All that are quantised read the same codes.
    dense = got["dense"]
    exact, naive = exact_and_naive(layer, x) if quantize is None else (dense.double(), dense)
    for name, y in got.items():
        assert_within_budget(name, y, exact, naive)
    assert isinstance(QuantizedKVCache(1, 1, 1, 8, value_dim=12), KVCache)


def test_it_compiles_and_exports_in_one_graph():
    layer, x = make_layer(**SIZES, v_head_dim=12), torch.randn(1, 5, WIDTH)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_weights_are_those_of_the_layer():
    layer, x = make_layer(**SIZES, v_head_dim=12), torch.randn(1, 5, WIDTH)
    assert self_attention_weights(layer, x).shape == (1, 4, 5, 5)
    cross = CrossGQAttention(WIDTH, **SIZES, v_head_dim=12, scoring="additive")
    assert cross_attention_weights(cross, x, torch.randn(1, 7, WIDTH)).shape == (1, 4, 5, 7)


@pytest.mark.parametrize("positions", ["rotary", "content"])
def test_a_model_generates_with_them(positions):
    model = make_gpt(num_kv_heads=1, v_head_dim=12, positions=positions)
    assert model.blocks[0].attention.out_proj.weight.shape == (16, 24)
    greedy, prompt = Sampling(greedy=True), [3, 1, 4]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(7):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(generate_tokens(model, prompt, 7, sampling=greedy)) == tokens[3:]
    engine = Engine(model, num_pages=8, page_size=4)
    request = engine.submit(prompt, 7, sampling=greedy)
    for _ in engine.run():
        pass
    assert request.tokens == tokens[3:]


def test_what_does_not_go_with_them_is_named():
    with pytest.raises(ValueError, match="v_head_dim must be at least 1, got 0"):
        CausalGQAttention(32, 4, v_head_dim=0)
    with pytest.raises(TypeError, match="v_head_dim must be an int, got float"):
        CrossGQAttention(32, 4, v_head_dim=1.5)
    with pytest.raises(ValueError, match="v_head_dim must be a positive integer, got 0"):
        TransformerConfig(v_head_dim=0)
    with pytest.raises(UnsupportedModelError, match="GPT-2 has no v_head_dim, got 12"):
        config_to_hf(make_gpt(v_head_dim=12).config)
    terms = RelativeContent(8, 3, value_dim=8)
    layer, x = GQAttention(32, 4, v_head_dim=12, relative=terms), torch.randn(1, 5, 32)
    cache = layer.new_cache(1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match="v_head_dim=12 channels, got 8"):
        layer(x, cache=cache)
    assert cache.lengths.tolist() == [0]
    wrong = KVCache(1, 4, 8, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=r"\bv must have shape"):
        GQAttention(32, 4, v_head_dim=12)(x, cache=wrong)
    assert wrong.lengths.tolist() == [0]


def test_relative_terms_on_such_values():
    layer = GQAttention(32, 4, v_head_dim=12, relative=RelativeContent(8, 9, value_dim=12))
    torch.nn.init.zeros_(layer.relative.values.vectors)
    plain = GQAttention(32, 4, v_head_dim=12, relative=RelativeContent(8, 9))
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 5, 32)
    naive = plain(x)
    assert_within_budget("output", layer(x), plain.double()(x.double()), naive)
