"""Value heads of another width than those of queries and keys: shapes, terms, and messages."""

import pytest
import torch

from fastattn import CrossGQAttention, GQAttention, KVCache
from fastattn.models.positions import RelativeContent
from fastattn.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SIZES = {"num_heads": 4, "num_kv_heads": 2}


def shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name.removesuffix(".weight"): tuple(x.shape) for name, x in layer.state_dict().items()}


def test_shapes_of_the_parameters():
    """4 heads of 8 for queries, 2 for keys, 2 of 12 or 4 for values."""
    layer = GQAttention(32, **SIZES, v_head_dim=12)
    rows = {"q_proj": (4 * 8, 32), "k_proj": (2 * 8, 32)}
    assert shapes(layer) == {**rows, "v_proj": (2 * 12, 32), "out_proj": (32, 4 * 12)}
    assert layer.new_cache(3, 5).v.shape == (3, 2, 5, 12)
    cross = CrossGQAttention(32, **SIZES, memory_dim=24, v_head_dim=4)
    rows = {"q_proj": (4 * 8, 32), "k_proj": (2 * 8, 24)}
    assert shapes(cross) == {**rows, "v_proj": (2 * 4, 24), "out_proj": (32, 4 * 4)}
    assert "head_dim=8, v_head_dim=4" in cross.extra_repr()
    same = GQAttention(32, **SIZES, v_head_dim=8)
    assert shapes(same) == shapes(GQAttention(32, **SIZES))
    assert "v_head_dim" not in same.extra_repr()


def test_what_does_not_go_with_them_is_named():
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
