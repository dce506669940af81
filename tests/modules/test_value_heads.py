"""Value heads of another width than those of queries and keys: messages."""

import pytest
import torch

from fastattn import GQAttention, KVCache
from fastattn.models.positions import RelativeContent

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


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
