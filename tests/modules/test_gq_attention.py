"""GQAttention and CrossGQAttention: no tokens, dropout, and a memory that is projected once."""

import pytest
import torch
from naive_layers import exact_and_naive, make_layer, naive_cross

import fastattn.modules.cross_attention
from fastattn import CrossGQAttention, GQAttention, swap
from fastattn.modules.weights import cross_attention_weights, self_attention_weights
from fastattn.rotary import RotaryPositions
from fastattn.rotary_scaling import LinearScaling
from fastattn.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("one_thread")

C, M, H_q, H_k = 32, 24, 4, 2


def make_self(**options) -> GQAttention:
    return make_layer(kind=GQAttention, num_heads=H_q, num_kv_heads=H_k, **options)


def make_cross(**options) -> CrossGQAttention:
    sizes = {"num_heads": H_q, "num_kv_heads": H_k, "memory_dim": M}
    return make_layer(kind=CrossGQAttention, **sizes, **options)


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


def test_dropout_of_weights_and_outputs_acts_in_training_alone():
    for options in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        layer, x, memory = make_cross(**options), torch.randn(2, 4, C), torch.randn(2, 9, M)
        assert not torch.equal(layer(x, memory), layer(x, memory))
        layer.eval()
        assert torch.equal(layer(x, memory), layer(x, memory))


def test_a_swap_leaves_them_alone():
    model = torch.nn.ModuleList([make_self(), make_cross()])
    assert set(swap(model).left.values()) == {"it is fastattn's already"}


def test_a_score_vector_begins_with_length_1():
    vectors = GQAttention(C, num_heads=H_q, scoring="additive").score_vector
    assert 0.5 < vectors.norm(dim=-1).mean() < 1.5


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


def test_a_layer_has_one_rotation() -> None:
    """Given positions are rotated as those from 0, and the base of that is fixed."""
    layer, x = GQAttention(16, 2, rotary="half"), torch.randn(1, 5, 16)
    with pytest.raises(AttributeError, match="rotary_base"):
        layer.rotary_base = 5.0
    layer.rotary_positions = RotaryPositions(8, base=5.0, scaling=LinearScaling(3.0))
    assert layer.rotary_base == 5.0
    torch.testing.assert_close(layer(x, positions=torch.arange(5)), layer(x))
