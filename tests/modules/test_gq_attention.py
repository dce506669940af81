"""GQAttention both ways, with strides and scoring functions, and CrossGQAttention."""

import pytest
import torch
from naive_layers import assert_layer_equals_naive, exact_and_naive, make_layer, naive_cross

import fastattn.modules.cross_attention
from fastattn import CrossGQAttention, GQAttention, swap
from fastattn.modules.weights import cross_attention_weights, self_attention_weights
from fastattn.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("one_thread")

C, M, H_q, H_k = 32, 24, 4, 2
LENGTHS = torch.tensor([9, 5])


def make_self(**options) -> GQAttention:
    return make_layer(kind=GQAttention, num_heads=H_q, num_kv_heads=H_k, **options)


def make_cross(**options) -> CrossGQAttention:
    sizes = {"num_heads": H_q, "num_kv_heads": H_k, "memory_dim": M}
    return make_layer(kind=CrossGQAttention, **sizes, **options)


SELF = {
    "both-ways": {"causal": False},
    "both-ways-bias-norm": {"causal": False, "qkv_bias": True, "out_bias": True, "qk_norm": True},
    "both-ways-window": {"causal": False, "window": 3},
    "both-ways-pair": {"causal": False, "window": (1, 4), "keep_first": 2},
    "both-ways-stride-alibi": {"causal": False, "stride": 3, "alibi": True},
    "both-ways-buckets": {"causal": False, "relative_bias": 16},
    "both-ways-cap-sinks": {"causal": False, "softcap": 1.5, "sinks": True, "scale": 0.7},
    "stride": {"stride": 3},
    "stride-window-first": {"stride": 4, "window": 2, "keep_first": 1},
    "dot": {"scoring": "dot"},
    "multiplicative": {"scoring": "multiplicative", "causal": False, "alibi": True},
    "additive": {"scoring": "additive"},
    "narrow-values": {"v_head_dim": 5, "qkv_bias": True},
    "wide-values-additive": {"v_head_dim": 12, "scoring": "additive"},
    "gate-of-a-head": {"output_gate": "head", "qkv_bias": True, "v_head_dim": 5},
    "gate-of-an-element-additive": {"output_gate": "element", "scoring": "additive"},
    "additive-window": {"scoring": "additive", "causal": False, "window": 3, "qk_norm": True},
}


@pytest.mark.parametrize("options", SELF.values(), ids=SELF)
def test_self_attention_and_gradients_equal_the_formula(options):
    assert_layer_equals_naive(make_self(**options), torch.randn(2, 9, C), key_lengths=LENGTHS)


@pytest.mark.parametrize("name", ["both-ways-window", "stride-window-first", "multiplicative"])
@torch.no_grad()
def test_kernels_equal_the_formula(name, device):
    layer = make_self(device=device, backend="triton", **SELF[name])
    x = torch.randn(1, 7, C, device=device)
    assert_within_budget("output", layer(x), *exact_and_naive(layer, x))


@pytest.mark.parametrize("name", ["stride-window-first", "dot", "multiplicative", "additive"])
@torch.no_grad()
def test_cached_steps_equal_the_formula(name):
    layer = make_self(**{**SELF[name], "causal": True})
    x = torch.randn(2, 9, C)
    cache = layer.new_cache(2, 9)
    steps = [layer(part, cache=cache) for part in x.split([4, 1, 1, 3], dim=1)]
    assert_within_budget("steps", torch.cat(steps, dim=1), *exact_and_naive(layer, x))


CROSS = {
    "plain": {},
    "bias-norm": {"qkv_bias": True, "out_bias": True, "qk_norm": True},
    "cap-sinks": {"softcap": 1.5, "sinks": True, "scale": 0.7},
    "multiplicative": {"scoring": "multiplicative"},
    "additive": {"scoring": "additive"},
    "narrow-values": {"v_head_dim": 4, "qkv_bias": True},
    "wide-values-norm-gate": {"v_head_dim": 12, "qk_norm": True, "output_gate": "element"},
}


@pytest.mark.parametrize("options", CROSS.values(), ids=CROSS)
def test_cross_attention_and_gradients_equal_the_formula(options):
    seen = torch.arange(9) < LENGTHS[:, None]

    def forward(layer, x, memory):
        return layer(x, memory, memory_lengths=LENGTHS)

    def naive(layer, x, memory):
        return naive_cross(layer, x, memory, seen)

    inputs = torch.randn(2, 4, C), torch.randn(2, 9, M)
    assert_layer_equals_naive(make_cross(**options), *inputs, forward=forward, naive=naive)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 5, 2])], ids=["", "lengths"])
@torch.no_grad()
def test_a_memory_projected_once_serves_every_step(lengths, backend, device, monkeypatch):
    decoded = []
    original = fastattn.modules.cross_attention.decode_attention

    def counted(q, *arguments, **options):
        decoded.append(q.shape[2])
        return original(q, *arguments, **options)

    monkeypatch.setattr(fastattn.modules.cross_attention, "decode_attention", counted)
    layer = make_cross(backend=backend, sinks=True).to(device)
    x, memory = torch.randn(3, 4, C), torch.randn(3, 9, M)
    on_device = None if lengths is None else lengths.to(device)
    projected = layer.project_memory(memory.to(device), on_device)
    steps = [layer(part.to(device), projected) for part in x.split([2, 1, 1], dim=1)]
    assert decoded == [1, 1]
    seen = torch.arange(9) < (torch.tensor([9] * 3) if lengths is None else lengths)[:, None]
    expected = exact_and_naive(layer.cpu(), x, memory, naive=naive_cross, seen=seen)
    assert_within_budget("steps", torch.cat(steps, dim=1).cpu(), *expected)


@torch.no_grad()
def test_padding_of_a_memory_reaches_nothing():
    layer, x, memory = make_cross(), torch.randn(2, 1, C), torch.randn(2, 9, M)
    mask = torch.rand(2, 9) < 0.6
    poisoned = memory.masked_fill(~mask[..., None], torch.nan)
    got = layer(x, poisoned, memory_padding_mask=mask)
    expected = exact_and_naive(layer, x, memory, naive=naive_cross, seen=mask)
    assert_within_budget("output", got, *expected)
    nothing = layer(x, memory, memory_lengths=torch.tensor([0, 9]))
    assert not nothing[0].any()
    assert nothing[1].any()


def test_dropout_of_weights_and_outputs_acts_in_training_alone():
    for options in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        layer, x, memory = make_cross(**options), torch.randn(2, 4, C), torch.randn(2, 9, M)
        assert not torch.equal(layer(x, memory), layer(x, memory))
        layer.eval()
        assert torch.equal(layer(x, memory), layer(x, memory))


def test_a_swap_leaves_them_alone():
    model = torch.nn.ModuleList([make_self(), make_cross()])
    assert set(swap(model).left.values()) == {"it is fastattn's already"}


@pytest.mark.parametrize("scoring", ["scaled_dot", "multiplicative", "additive"])
@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 4), (2, 0, 4), (2, 1, 0), (2, 3, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_no_rows_tokens_or_memory(B, T, S, scoring, training):
    """A query that sees nothing gives the bias of the output."""
    options = {"scoring": scoring, "qk_norm": True, "out_bias": True}
    layer, cross = make_self(**options), make_cross(**options)
    x, memory = torch.randn(B, T, C), torch.randn(B, S, M)
    with torch.set_grad_enabled(training):
        y, z = layer(x), cross(x, memory)
    assert y.shape == z.shape == x.shape
    assert S or torch.equal(z, cross.out_proj.bias.expand(B, T, C))
    assert self_attention_weights(layer, x).shape == (B, H_q, T, T)
    assert cross_attention_weights(cross, x, memory).shape == (B, H_q, T, S)
    if training:
        (y.sum() + z.sum()).backward()
        assert all(p.grad.isfinite().all() for p in cross.parameters() if p.grad is not None)
