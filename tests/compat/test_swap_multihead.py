"""`fastattn.swap` on models of `torch.nn.MultiheadAttention`."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fastattn
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

C, H, T = 32, 4, 7


def test_multihead_layers_are_the_same_objects():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(C, H, dropout=0.3), "b": nn.Linear(C, C)})
    model["c"] = model["a"]
    layer = model["a"].eval().to(torch.bfloat16)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    parameters = dict(layer.named_parameters())
    done = fastattn.swap(model)
    assert done.replaced == {"a": "fastattn.MultiheadAttention"}
    assert model["a"] is model["c"] is layer
    assert isinstance(layer, fastattn.MultiheadAttention)
    assert all(x is parameters[name] for name, x in layer.named_parameters())
    assert not layer.training
    x = torch.randn(T, 2, C, dtype=torch.bfloat16)
    padding = torch.ones(2, T, dtype=torch.bool)
    o, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.equal(o, layer.out_proj.bias.expand_as(o))
    assert seen == [1]
    done.undo()
    assert type(layer) is nn.MultiheadAttention
    assert len(layer._forward_pre_hooks) == len(layer.out_proj._forward_pre_hooks) == 0
    done.undo()
    assert type(layer) is nn.MultiheadAttention


def test_a_model_that_is_itself_attention():
    layer = nn.MultiheadAttention(C, H)
    assert list(fastattn.swap(layer).replaced) == [""]
    again = fastattn.swap(layer)
    assert again.replaced == {}
    assert again.left == {"": "it is fastattn's already"}
    assert str(again) == "left the model: it is fastattn's already"


def test_swapped_encoder_equals_torchs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, H, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, T, C)
    ref = copy.deepcopy(model).double()(x.double())
    naive = worst_naive(ref, lambda: model(x))
    done = fastattn.swap(model)
    assert list(done.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        assert_within_budget("o", model(x), ref, naive)


def test_compiled_code_follows_swap_and_undo():
    torch._dynamo.reset()
    layer = nn.MultiheadAttention(C, H, batch_first=True).train()
    x = torch.randn(2, T, C)
    padding = torch.ones(2, T, dtype=torch.bool)

    @torch.compile(backend="eager")
    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=padding)[0]

    assert attend(x).isnan().any()
    done = fastattn.swap(layer)
    assert attend(x).isfinite().all()
    done.undo()
    assert attend(x).isnan().any()


def test_swapped_multihead_pickles():
    layer = nn.MultiheadAttention(C, H)
    fastattn.swap(layer)
    assert type(pickle.loads(pickle.dumps(layer))) is fastattn.MultiheadAttention
