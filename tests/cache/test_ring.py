"""Sliding-window caches: layout; generated histories judge what they keep."""

import torch

from fastattn import KVCache, decode_attention, view_of_tensors


def test_layout_of_the_docstring():
    cache = KVCache(1, 1, 6, 1, window=3, keep_first=1)
    numbers = torch.arange(9.0).view(1, 1, 9, 1)
    for token in numbers.split(1, dim=2):
        cache.append(token, token)
    assert cache.k.flatten().tolist() == [0, 6, 7, 8, 4, 5]
    assert cache.view().slot_positions().tolist() == [[0, 6, 7, 8, 4, 5]]
    assert cache.uniform_length == cache.length_bound == 9
    view = view_of_tensors(cache.k, cache.v, cache.lengths, window=3, keep_first=1)
    q, how = torch.ones(1, 1, 1, 1), {"alibi_slopes": torch.ones(1), "backend": "torch"}
    o, expected = (decode_attention(q, x, **how) for x in (view, cache))
    assert torch.equal(o, expected)
    assert "window=3, keep_first=1, device=cpu" in repr(cache)
