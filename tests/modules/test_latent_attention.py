"""`MultiheadLatentAttention`: both forms against sums written out for each head, in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import MultiheadLatentAttention
from fastattn.rotary_scaling import YarnScaling
from fastattn.testing import assert_within_budget
from fastattn.testing.inputs import draw

H, P, R, V, C = 4, 12, 8, 10, 16
WIDTH = 32


def make(**options: Any) -> MultiheadLatentAttention:
    given = {"kv_latent_dim": C, "nope_dim": P, "rope_dim": R, "v_head_dim": V, **options}
    torch.manual_seed(3)
    layer = MultiheadLatentAttention(WIDTH, H, **given)
    for name, x in layer.named_parameters():
        with torch.no_grad():
            x.copy_(1 + 0.3 * torch.randn_like(x) if "norm" in name else 0.3 * torch.randn_like(x))
    return layer


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, style: str) -> Tensor:
    """x [B, T, n] with the pair j of token t turned by t / 10000^(2 j / n)."""
    n = x.shape[-1]
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10000.0 ** (
        -torch.arange(0, n, 2, dtype=x.dtype) / n
    )
    pairs = (
        x.unflatten(-1, (n // 2, 2)) if style == "interleaved" else x.unflatten(-1, (2, n // 2)).mT
    )
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(z)
    return (back if style == "interleaved" else back.mT).flatten(-2)


def expected(layer: MultiheadLatentAttention, x: Tensor, scale: float) -> Tensor:
    """The layer's output, head by head: with sinks and a window, causal."""
    w = dict(layer.named_parameters())
    T = x.shape[1]
    if "q_proj.weight" in w:
        q = x @ w["q_proj.weight"].mT
    else:
        q = norm(x @ w["q_a_proj.weight"].mT, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].mT
    kv = x @ w["kv_a_proj_with_mqa.weight"].mT
    c = norm(kv[..., :C], w["kv_a_layernorm.weight"])
    r = layer.rope_dim
    k_rope = turned(kv[..., C:], layer.rotary) if r else None
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (layer.window or T))
    outputs = []
    for h in range(H):
        own = q[..., h * (P + r) : (h + 1) * (P + r)]
        rows = w["kv_b_proj.weight"][h * (P + V) : (h + 1) * (P + V)]
        s = own[..., :P] @ (c @ rows[:P].mT).mT
        if k_rope is not None:
            s = s + turned(own[..., P:], layer.rotary) @ k_rope.mT
        s = (s * scale).masked_fill(~seen, -math.inf)
        if layer.sinks is not None:
            s = torch.cat((s, layer.sinks[h].expand(*s.shape[:2], 1)), -1)
        outputs.append(s.softmax(-1)[..., :T] @ (c @ rows[P:].mT))
    return torch.cat(outputs, -1) @ w["o_proj.weight"].mT


LAYERS: dict[str, dict[str, Any]] = {
    "low-rank": {"q_latent_dim": 20},
    "halves-window-sinks": {"rotary": "half", "window": 4, "sinks": True},
    "no-rotary": {"rope_dim": 0},
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_and_its_gradients(name: str, device: str) -> None:
    layer, x = make(**LAYERS[name]).to(device), draw(2, 9, WIDTH).to(device)
    scale = (P + layer.rope_dim) ** -0.5
    do = draw(2, 9, WIDTH, seed=1).to(device)

    def results(of: Any, layer: MultiheadLatentAttention, x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = of(layer, leaf)
        return [y, *torch.autograd.grad(y, (leaf, *layer.parameters()), do.to(x.dtype))]

    def oracle(layer: MultiheadLatentAttention, x: Tensor) -> Tensor:
        return expected(layer, x, scale)

    ref = results(oracle, copy.deepcopy(layer).double(), x.double())
    naive = results(oracle, layer, x)
    names = ("out", "dx", *dict(layer.named_parameters()))
    for name, result, exact, rough in zip(
        names, results(lambda layer, x: layer(x), layer, x), ref, naive, strict=True
    ):
        assert_within_budget(name, result, exact, rough)


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_pieces_by_a_cache(name: str, absorbed: bool, device: str) -> None:
    """A prompt, then tokens one by one and two at once, of rows of one length or several."""
    layer, x = make(**LAYERS[name]).to(device), draw(2, 9, WIDTH).to(device)
    scale = (P + layer.rope_dim) ** -0.5
    with torch.no_grad():
        ref = expected(copy.deepcopy(layer).double(), x.double(), scale)
        naive = expected(layer, x, scale)
        cache = layer.new_cache(2, 12)
        cache.k.fill_(torch.nan)
        parts = [layer(part, cache=cache, absorbed=absorbed) for part in x.split([5, 1, 2, 1], 1)]
        assert_within_budget("whole", torch.cat(parts, 1), ref, naive)
        cache = layer.new_cache(2, 12)
        cache.k.fill_(torch.nan)
        lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
        first = layer(x[:, :5], cache=cache, key_lengths=lengths, absorbed=absorbed)
        assert_within_budget("ragged", first[1, :3], ref[1, :3], naive[1, :3])
        step = torch.stack((x[0, 5:6], x[1, 3:4]))
        second = layer(step, cache=cache, absorbed=absorbed)
        places = torch.tensor([5, 3])
        rows = torch.arange(2)
        assert_within_budget("step", second[:, 0], ref[rows, places], naive[rows, places])


def test_the_scale_is_that_of_the_heads() -> None:
    """DeepSeek-V3's: 192^-0.5 (0.1 ln 40 + 1)^2, its cosines not scaled."""
    yarn = YarnScaling(40.0, 4096, attention_factor=1.0)
    sizes = {"kv_latent_dim": 512, "nope_dim": 128, "rope_dim": 64, "device": "meta"}
    layer = MultiheadLatentAttention(64, 2, rotary_scaling=yarn, mscale=1.0, **sizes)
    assert layer.scale == pytest.approx(0.13523378, abs=1e-8)
    assert MultiheadLatentAttention(64, 2, **sizes).scale == 192**-0.5


def test_who_calls_the_absorbed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens beside a cache, without a graph."""
    layer, x = make(), draw(1, 20, WIDTH)
    called: list[int] = []
    absorb = layer._absorbed
    monkeypatch.setattr(
        layer, "_absorbed", lambda q, *x: called.append(q.shape[2]) or absorb(q, *x)
    )
    cache = layer.new_cache(1, 24)
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x[:, :1], cache=cache)
    layer(x)
    assert called == [1]
