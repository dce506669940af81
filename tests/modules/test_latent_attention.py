"""`MultiheadLatentAttention`: its scale, and who calls which form; generated layers judge both."""

from typing import Any

import pytest
import torch

from fastattn import MultiheadLatentAttention
from fastattn.rotary_scaling import YarnScaling
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
