"""Sliding-window caches: attention over the ring equals attention over all tokens, masked."""

import pytest
import torch
from torch import Tensor

from fastattn import KVCache

B, H, D, D_V = 3, 2, 8, 4
WINDOW, SINKS = 5, 2


def tokens(T: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, T, D), torch.randn(B, H, T, D_V)


def attend(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Softmax attention under the window and the first positions; fp64."""
    p, j = q_positions[:, None, :, None], k_positions[:, None, None, :]
    seen = (j >= 0) & (j <= p) & ((p - j < WINDOW) | (j < SINKS))
    scores = (q.double() @ k.double().transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v.double()


def test_layout_of_the_docstring():
    cache = KVCache(1, 1, 6, 1, window=3, keep_first=1)
    numbers = torch.arange(9.0).view(1, 1, 9, 1)
    for token in numbers.split(1, dim=2):
        cache.append(token, token)
    assert cache.k.flatten().tolist() == [0, 6, 7, 8, 4, 5]
    assert cache.view().slot_positions().tolist() == [[0, 6, 7, 8, 4, 5]]
    assert cache.uniform_length == cache.length_bound == 9


def test_an_append_longer_than_the_ring_keeps_what_later_tokens_see():
    cache = KVCache(2, 1, 6, 1, window=3, keep_first=1)
    numbers = torch.arange(20.0).view(1, 1, 20, 1).repeat(2, 1, 1, 1)
    cache.append(numbers, -numbers, new_lengths=torch.tensor([20, 4]))
    k, v, positions = cache.view().gather()
    assert positions.tolist() == [[0, 16, 17, 18, 19, 15], [0, 1, 2, 3, -1, -1]]
    assert torch.equal(k[..., 0], positions.clamp(min=0).unsqueeze(1).float())
    assert torch.equal(v, -k)


def test_truncate_takes_back_what_the_ring_still_knows():
    """Rejected tokens of a speculative step: the next query finds its whole window."""
    ring = KVCache(B, H, 10, D, value_dim=D_V, window=WINDOW, keep_first=SINKS)
    full = KVCache(B, H, 60, D, value_dim=D_V)
    for T, kept in ((30, 30), (4, 31), (3, 32), (3, 31)):
        k, v = tokens(T)
        for cache in (ring, full):
            cache.append(k, v)
            cache.truncate(kept)
        q, at = torch.randn(B, H, 1, D), torch.full((B, 1), kept)
        views = [cache.view() for cache in (ring, full)]
        got, wanted = (attend(q, *c.gather()[:2], at, c.slot_positions()) for c in views)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"lengths must be 0 or at least 31: the ring held 35 tok"):
        ring.truncate(30)
    ring.reset()
    ring.append(*tokens(3))
    ring.truncate(1)
    assert ring.lengths.tolist() == [1] * B


def test_left_padding_is_refused_and_repr_names_the_window():
    cache = KVCache(1, 1, 8, 2, window=4, keep_first=1)
    with pytest.raises(ValueError, match="starts: a cache with a window takes no padding on the"):
        cache.set_starts(torch.tensor([1]))
    assert "window=4, keep_first=1, device=cpu" in repr(cache)
