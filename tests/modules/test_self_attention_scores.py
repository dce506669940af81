"""Options of CausalGQAttention that change masks, scores and weights: parameters, state, errors."""

import copy

import pytest
import torch
from naive_layers import (
    WIDTH,
    assert_checkpointing_changes_nothing,
    assert_layer_equals_naive,
    exact_and_naive,
    make_layer,
)

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
}
GROUPS = {
    "plain": {"num_heads": 2},
    "window-first-rotary": {"num_heads": 2, "window": 3, "keep_first": 1, "rotary": "half"},
    "all-scores": ALL_SCORES,
}


@pytest.mark.parametrize("kwargs", GROUPS.values(), ids=GROUPS)
def test_prefixes_and_documents_equal_the_naive_layer(kwargs, device):
    layer = make_layer(device, **kwargs)
    x = torch.randn(3, 9, WIDTH, device=device)
    prefixes = torch.tensor([0, 6, 9], device=device)
    assert_layer_equals_naive(layer, x, prefix_lengths=prefixes)
    ids = torch.tensor([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 2, 2], [3, 3, 3, 3, -1, -1, 7, 7, -1]])
    ids = ids.to(device)
    assert_layer_equals_naive(layer, x, documents=ids)
    y = layer(x, prefix_lengths=4)
    fours = prefixes.new_full((3,), 4)
    assert_within_budget("output", y, *exact_and_naive(layer, x, prefix_lengths=fours))


@torch.no_grad()
def test_nan_in_documents_of_negative_id_reaches_no_other(device):
    layer = make_layer(device, **ALL_SCORES)
    x = torch.randn(1, 6, WIDTH, device=device)
    ids = torch.tensor([[0, 0, -1, 1, 1, -1]], device=device)
    poisoned = x.masked_fill((ids < 0)[..., None], torch.nan)
    real = ids >= 0
    assert torch.equal(layer(poisoned, documents=ids)[real], layer(x, documents=ids)[real])


@pytest.mark.parametrize("kwargs", GROUPS.values(), ids=GROUPS)
@torch.no_grad()
def test_a_prefix_enters_a_cache_whole(kwargs, device):
    layer = make_layer(device, **kwargs)
    x = torch.randn(2, 9, WIDTH, device=device)
    prefixes = torch.tensor([5, 3], device=device)
    exact_naive = exact_and_naive(layer, x, prefix_lengths=prefixes)
    cache = layer.new_cache(2, 9)
    steps = [layer(x[:, :5], prefix_lengths=prefixes, cache=cache)]
    steps += [layer(part, cache=cache) for part in x[:, 5:].split([1, 3], dim=1)]
    assert_within_budget("output", torch.cat(steps, dim=1), *exact_naive)

    cache.reset()
    whole = layer(x[:, :6], prefix_lengths=5, cache=cache)
    after = layer(x[:, 6:], prefix_lengths=5, cache=cache)
    fives = torch.full_like(prefixes, 5)
    found = torch.cat((whole, after), dim=1)
    assert_within_budget("output", found, *exact_and_naive(layer, x, prefix_lengths=fives))


@torch.no_grad()
def test_groups_that_do_not_go_with_a_cache_leave_it_as_it_was():
    layer = make_layer(num_heads=2)
    x = torch.randn(2, 3, WIDTH)
    cache = layer.new_cache(2, 8)
    with pytest.raises(ValueError, match=r"prefix_lengths must be at most 3 here, got 4: .* and 0"):
        layer(x, prefix_lengths=4, cache=cache)
    with pytest.raises(ValueError, match=r"prefix_lengths must have shape \[2\], got \[1\]"):
        layer(x, prefix_lengths=torch.tensor([1]), cache=cache)
    with pytest.raises(ValueError, match=r"documents cannot go with a cache"):
        layer(x, documents=torch.zeros(2, 3, dtype=torch.int32), cache=cache)
    assert cache.uniform_length == 0
    layer(x, prefix_lengths=3, cache=cache)
    with pytest.raises(ValueError, match=r"prefix_lengths must be at most 3 here, got 5: .* and 3"):
        layer(x, prefix_lengths=5, cache=cache)
    assert cache.uniform_length == 3


def recorded_dropout(layer, x, monkeypatch) -> float:
    """The dropout that a call of the layer passes on."""
    calls = []
    attention = fastattn.modules.self_attention.attention

    def recording(q, k, v, **kwargs):
        calls.append(kwargs["dropout"])
        return attention(q, k, v, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fastattn.modules.self_attention, "attention", recording)
        layer(x)
    return calls.pop()


def test_attention_dropout_acts_on_the_weights_in_training_alone(monkeypatch):
    layer = make_layer(num_heads=4, attention_dropout=0.5)
    x = torch.randn(2, 50, WIDTH)
    assert recorded_dropout(layer, x, monkeypatch) == 0.5
    torch.manual_seed(1)
    dropped = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), dropped)
    assert not torch.equal(layer(x), dropped)
    plain = make_layer(num_heads=4)(x)
    assert recorded_dropout(layer.eval(), x, monkeypatch) == 0
    assert torch.equal(layer(x), plain)
    # The first token sees itself alone: in every head its value is dropped, or doubled.
    assert not torch.isclose(dropped[:, 0], plain[:, 0]).all(-1).any()


def test_checkpoint_draws_the_same_weights_again(device):
    layer = make_layer(device, **ALL_SCORES, attention_dropout=0.4)
    x = torch.randn(2, 7, WIDTH, device=device, requires_grad=True)
    assert_checkpointing_changes_nothing(layer, x)


def test_compiles_without_a_graph_break():
    layer = make_layer(**ALL_SCORES, attention_dropout=0.3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 7, WIDTH, requires_grad=True)
    assert torch.autograd.grad(compiled(x).sum(), x)[0].isfinite().all()
    compiled.eval()
    groups = {"documents": torch.tensor([[0] * 7, [0] * 4 + [1] * 3]), "prefix_lengths": 3}
    results = []
    for forward in (compiled, layer):
        y = forward(x, **groups)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_parameters_become_another_dtype_and_slopes_do_not():
    layer = make_layer(**ALL_SCORES | {"num_heads": 6}, head_dim=8).to(torch.bfloat16)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.alibi_slopes, alibi_slopes(6))
    x = torch.randn(2, 9, WIDTH).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_within_budget("output", y, *exact_and_naive(layer, x))
    assert torch.equal(layer.float().alibi_slopes, alibi_slopes(6))


@torch.no_grad()
def test_autocast_computes_in_its_dtype(device):
    layer = make_layer(device, **ALL_SCORES)
    x = torch.randn(2, 9, WIDTH, device=device).bfloat16()
    rounded = copy.deepcopy(layer).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x.float())
        cache = layer.new_cache(2, 9)
        steps = [layer(part, cache=cache) for part in x.float().split([5, 4], dim=1)]
    assert y.dtype == torch.bfloat16
    ref, naive = exact_and_naive(rounded, x)
    assert_within_budget("output", y, ref, naive)
    assert_within_budget("output", torch.cat(steps, dim=1), ref, naive)


def test_state_dicts_hold_what_is_learned():
    layer = make_layer(**ALL_SCORES)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "q_proj.weight": (32, WIDTH),
        "k_proj.weight": (16, WIDTH),
        "v_proj.weight": (16, WIDTH),
        "out_proj.weight": (WIDTH, WIDTH),
        "q_norm.weight": (8,),
        "k_norm.weight": (8,),
        "sinks": (4,),
        "relative_bias": (6, 4),
    }
    x = torch.randn(2, 9, WIDTH)
    twin = CausalGQAttention(WIDTH, backend="torch", **ALL_SCORES)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


def test_new_layers_start_from_plain_scores():
    layer = CausalGQAttention(WIDTH, **ALL_SCORES)
    assert not layer.sinks.any()
    assert not layer.relative_bias.any()
    for norm in (layer.q_norm, layer.k_norm):
        assert torch.equal(norm.weight, torch.ones(8))
    assert layer.relative_bias.requires_grad and layer.sinks.requires_grad


def test_a_meta_layer_gets_its_slopes_with_its_parameters():
    layer = make_layer(**ALL_SCORES)
    x = torch.randn(2, 5, WIDTH)
    empty = CausalGQAttention(WIDTH, backend="torch", device="meta", **ALL_SCORES)
    assert empty.alibi_slopes.device.type == "meta"
    by_assignment = copy.deepcopy(empty)
    by_assignment.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(by_assignment(x), layer(x))
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


def test_repr_names_what_was_chosen():
    layer = CausalGQAttention(WIDTH, attention_dropout=0.1, **ALL_SCORES)
    assert layer.extra_repr() == (
        "embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, rotary='half', rotary_base=10000, "
        "rotary_dim=8, window=4, keep_first=1, qk_norm=True, alibi=True, relative_bias=6, "
        "relative_max_distance=10, softcap=2.0, sinks=True, attention_dropout=0.1"
    )


@pytest.mark.parametrize(
    ("error", "kwargs", "match"),
    [
        (ValueError, {"keep_first": 2}, "keep_first=2 keeps keys that a window or stride hides"),
        (ValueError, {"keep_first": -1, "window": 2}, "keep_first must be at least 0, got -1"),
        (ValueError, {"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        (ValueError, {"relative_bias": 3}, "relative_bias must be at least 4, got 3"),
        (TypeError, {"relative_bias": True}, "relative_bias must be an int, got bool"),
        (
            ValueError,
            {"relative_bias": 32, "relative_max_distance": 16},
            "relative_max_distance must be at least 17, got 16",
        ),
        (
            ValueError,
            {"relative_max_distance": 64},
            "relative_max_distance needs relative_bias, the number of buckets, got 64 without it",
        ),
        (ValueError, {"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        (ValueError, {"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\)"),
    ],
)
def test_constructor_errors(error, kwargs, match):
    with pytest.raises(error, match=match):
        CausalGQAttention(WIDTH, 4, **kwargs)


def test_forward_errors():
    layer = make_layer(num_heads=2)
    x = torch.randn(2, 5, WIDTH)
    with pytest.raises(ValueError, match=r"prefix_lengths must be at least 0, got -1"):
        layer(x, prefix_lengths=-1)
    with pytest.raises(ValueError, match=r"documents must have shape \[2, 5\], got \[2, 4\]"):
        layer(x, documents=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"documents must be an int32 or int64 tensor"):
        layer(x, documents=torch.zeros(2, 5))
