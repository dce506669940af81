"""Layers that choose key blocks."""

from typing import Any

import pytest
import torch

from fastattn import CausalGQAttention
from fastattn.modules.sparse import MoBAttention, NativeSparseAttention

LAYERS: dict[str, Any] = {
    "moba": lambda n=2, **how: MoBAttention(32, 4, 2, block_k=8, n=n, **how),
    "nsa": lambda n=3, **how: NativeSparseAttention(
        32, 4, 1, block_k=8, n=n, window=6, pool=(4, 2), **how
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_with_every_block_a_layer_is_plain_attention(name: str) -> None:
    layer = LAYERS[name](n=9, rotary="half")
    if name == "nsa":  # the selected branch alone
        layer.gate_proj.weight.data.zero_()
        layer.gate_proj.bias.data = torch.tensor([-100.0, 100.0, -100.0]).repeat(4)
    plain = CausalGQAttention(32, 4, layer.num_kv_heads, rotary="half")
    plain.load_state_dict(layer.state_dict(), strict=name == "moba")
    x, positions = torch.randn(2, 30, 32), torch.arange(0, 60, 2)
    y, expected = (each(x, positions=positions) for each in (layer, plain))
    torch.testing.assert_close(y, expected)
