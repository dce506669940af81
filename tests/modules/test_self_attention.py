"""CausalGQAttention: what it passes on, dropout, dtypes, copies, compilation."""

import copy

import pytest
import torch
from naive_layers import (
    WIDTH,
    assert_checkpointing_changes_nothing,
    exact_and_naive,
    make_layer,
)
from nightly import gate_cases
from torch import nn

import fastattn.modules
from fastattn import CausalGQAttention, alibi_slopes
from fastattn.testing import assert_within_budget

ALL_SCORES = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "window": 4,
    "keep_first": 1,
    "rotary": "half",
    "qk_norm": True,
    "alibi": True,
    "relative_bias": 6,
    "relative_max_distance": 10,
    "softcap": 2.0,
    "sinks": True,
    "output_gate": "element",
}


@pytest.fixture
def attention_calls(monkeypatch) -> list:
    """q, k, v and options of every call of `attention` by a layer."""
    calls = []
    attention = fastattn.modules.self_attention.attention

    def recording(q, k, v, **kwargs):
        calls.append((q, k, v, kwargs))
        return attention(q, k, v, **kwargs)

    monkeypatch.setattr(fastattn.modules.self_attention, "attention", recording)
    return calls


def test_attention_gets_views_and_shared_heads(attention_calls, device):
    layer = make_layer(device, num_heads=4, num_kv_heads=2)
    layer(torch.randn(2, 5, WIDTH, device=device))
    q, k, v, kwargs = attention_calls.pop()
    assert kwargs == {"causal": True, "backend": layer.backend}  # each option costs a look-up
    assert [heads.shape[1] for heads in (q, k, v)] == [4, 2, 2]
    for heads in (q, k, v):  # as they were projected
        assert heads.untyped_storage().nbytes() == heads.nbytes
        assert heads.transpose(1, 2).is_contiguous()

    # Steps of so many tokens that decode_attention is not asked.
    x = torch.randn(2, 40, WIDTH, device=device)
    cache = layer.new_cache(2, 120)
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x[:, :35], cache=cache)
        _, k, v, kwargs = attention_calls[-1]
        assert not kwargs.keys() & {"key_lengths", "query_offset"}
        assert k.shape[2] == v.shape[2] == 75
        assert (k.data_ptr(), v.data_ptr()) == (cache.k.data_ptr(), cache.v.data_ptr())
        layer(x, cache=cache, key_lengths=torch.tensor([1, 40], device=device))
    _, k, _, kwargs = attention_calls[-1]
    assert kwargs["key_lengths"].tolist() == [76, 115]
    assert kwargs["query_offset"].tolist() == [75, 75]
    assert k.shape[2] == 115


def test_attention_dropout_acts_on_the_weights_in_training_alone(attention_calls):
    layer = make_layer(num_heads=4, attention_dropout=0.5)
    x = torch.randn(2, 50, WIDTH)
    torch.manual_seed(1)
    dropped = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), dropped)
    assert not torch.equal(layer(x), dropped)
    plain = make_layer(num_heads=4)(x)
    assert torch.equal(layer.eval()(x), plain)
    assert [call[3].get("dropout") for call in attention_calls] == [0.5] * 3 + [None] * 2
    # The first token sees itself alone: in every head its value is dropped, or doubled.
    assert not torch.isclose(dropped[:, 0], plain[:, 0]).all(-1).any()


def test_dropout_acts_on_the_output_in_training_alone():
    layer = make_layer(num_heads=4, dropout=0.5)
    x = torch.randn(2, 50, WIDTH)
    plain = layer.eval()(x)
    assert torch.equal(plain, make_layer(num_heads=4)(x))
    dropped = layer.train()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * plain[kept])
    assert 0.4 < kept.float().mean() < 0.6


def test_checkpoint_recomputes_the_same_gradients(device):
    layer = make_layer(device, **ALL_SCORES, attention_dropout=0.4, dropout=0.3)
    x = torch.randn(2, 7, WIDTH, device=device, requires_grad=True)
    assert_checkpointing_changes_nothing(layer, x)


@pytest.mark.parametrize("backend", gate_cases(["eager"], ["aot_eager"]))
def test_compiles_without_a_graph_break(backend):
    layer = make_layer(**ALL_SCORES, attention_dropout=0.3)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    groups = {"documents": torch.tensor([[0] * 9, [0] * 4 + [1] * 5]), "prefix_lengths": 3}
    assert torch.autograd.grad(compiled(x, **groups).sum(), x)[0].isfinite().all()
    results = []
    for forward in (compiled.eval(), layer):
        y = forward(x, key_lengths=torch.tensor([7, 3]))
        results.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_autocast_computes_and_caches_in_its_dtype(device):
    layer = make_layer(device, **ALL_SCORES)
    rounded = copy.deepcopy(layer).bfloat16()
    x = torch.randn(2, 9, WIDTH, device=device).bfloat16()
    ref, naive = exact_and_naive(rounded, x)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x.float())
        cache = layer.new_cache(2, 9)
        steps = [layer(part, cache=cache) for part in x.float().split([5, 4], dim=1)]
        wide = layer.new_cache(2, 9, dtype=torch.float32)
        with pytest.raises(ValueError, match="k must have the cache's dtype"):
            layer(x.float(), cache=wide)
    assert y.dtype == cache.k.dtype == torch.bfloat16
    assert_within_budget("output", y, ref, naive)
    assert_within_budget("output", torch.cat(steps, dim=1), ref, naive)


@torch.no_grad()
def test_parameters_become_another_dtype_and_slopes_do_not(device):
    layer = make_layer(device, **ALL_SCORES | {"num_heads": 6}, head_dim=8, qkv_bias=True)
    layer.to(torch.bfloat16)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.alibi_slopes.cpu(), alibi_slopes(6))
    x = torch.randn(2, 9, WIDTH, device=device).bfloat16()
    y = layer(x)
    assert y.dtype == layer.new_cache(1, 4).k.dtype == torch.bfloat16
    assert_within_budget("output", y, *exact_and_naive(layer, x))
    assert torch.equal(layer.float().alibi_slopes.cpu(), alibi_slopes(6))


def test_parameters_start_as_those_of_linear_layers_and_plain_scores():
    torch.manual_seed(0)
    layer = CausalGQAttention(WIDTH, qkv_bias=True, out_bias=True, **ALL_SCORES)
    torch.manual_seed(0)
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "out_proj": WIDTH, "output_gate_proj": 32}
    twins = {name: nn.Linear(WIDTH, count) for name, count in rows.items()}
    expected = {
        f"{name}.{part}": value
        for name, twin in twins.items()
        for part, value in twin.state_dict().items()
    }
    expected |= {"q_norm.weight": torch.ones(8), "k_norm.weight": torch.ones(8)}
    expected |= {"sinks": torch.zeros(4), "relative_bias": torch.zeros(6, 4)}
    assert layer.state_dict().keys() == expected.keys()
    for name, value in layer.named_parameters():
        assert torch.equal(value, expected[name]) and value.requires_grad


def test_a_meta_layer_is_materialised_and_copies_are_independent():
    layer = make_layer(**ALL_SCORES)
    x = torch.randn(2, 5, WIDTH)
    empty = CausalGQAttention(WIDTH, backend="torch", device="meta", **ALL_SCORES)
    assert empty(x.to("meta")).shape == (2, 5, WIDTH)
    assert empty.new_cache(1, 3).k.device.type == empty.alibi_slopes.device.type == "meta"
    assigned = copy.deepcopy(empty)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.out_proj.weight.zero_()
    assert torch.equal(assigned(x), layer(x)) and torch.equal(empty(x), layer(x))
    assert not twin(x).any()
