"""State dicts of layers that had their projections in one parameter are read."""

import pytest
import torch
from torch import Tensor, nn

from fastattn import CrossGQAttention, GQAttention
from fastattn.models.layers import MLP
from fastattn.modules.fused_weights import SeparateProjections, separated

SIZES = {"num_heads": 4, "num_kv_heads": 2, "v_head_dim": 6, "qkv_bias": True}


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "attention": GQAttention(16, **SIZES),
            "cross": CrossGQAttention(16, **SIZES),
            "gated": MLP(16, 12, activation="swiglu", bias=True),
            "plain": MLP(16, 12, activation="gelu"),
        }
    )


def fused(layers: nn.Module, tensors: dict[str, Tensor], behind: str = "") -> dict[str, Tensor]:
    """Fuse the tensors as layers stored them before: the rows of fused projections concatenated."""
    results = dict(tensors)
    for owner, module in layers.named_modules():
        if not isinstance(module, SeparateProjections):
            continue
        for name, parts in module.fused_projections.items():
            for kind in ("weight", "bias"):
                names = [f"{owner}.{part}.{kind}{behind}" for part in parts]
                if all(part in results for part in names):
                    pieces = [results.pop(part) for part in names]
                    whole = torch.cat(pieces) if pieces[0].dim() else pieces[0]
                    results[f"{owner}.{name}.{kind}{behind}"] = whole
    return results


def test_a_fused_state_dict_is_loaded():
    source, target = model(), model()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    state = source.state_dict()
    before = fused(source, state)
    assert before["attention.qkv_proj.weight"].shape == (16 + 8 + 12, 16)
    assert before["cross.kv_proj.bias"].shape == (8 + 12,)
    assert before["gated.up_proj.weight"].shape == (24, 16)
    assert "attention.q_proj.weight" not in before and "gated.gate_proj.bias" not in before
    target.load_state_dict(before)
    for name, value in target.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert before.keys() == fused(source, state).keys(), "the caller's own is left as it was"
    target.load_state_dict(state)


@pytest.mark.parametrize("name", ["gated.up_proj.weight", "attention.qkv_proj.bias"])
def test_a_shape_that_is_of_neither_kind_is_refused(name):
    layers = model()
    state = fused(layers, layers.state_dict())
    state[name] = state[name][1:]
    with pytest.raises(RuntimeError, match=name):
        layers.load_state_dict(state)


def test_an_optimizers_tensors_are_separated_too():
    layers = model()
    moments = {f"{name}.exp_avg": torch.randn_like(x) for name, x in layers.state_dict().items()}
    steps = {f"{name}.step": torch.tensor(3.0) for name in layers.state_dict()}
    before = fused(layers, fused(layers, moments | steps, ".exp_avg"), ".step")
    assert "cross.k_proj.weight.step" not in before
    saved = {f"optimizer.{name}": x for name, x in before.items()} | {"loss_sum": torch.zeros(())}
    results = separated(layers, saved, "optimizer.")
    assert results.keys() == {f"optimizer.{name}" for name in moments | steps} | {"loss_sum"}
    for name, x in (moments | steps).items():
        assert torch.equal(results[f"optimizer.{name}"], x), name
