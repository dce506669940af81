"""Layers and the caches they read: by the decode kernel for few queries, else in order."""

import pytest
import torch
from engine import packed_layers
from naive_layers import WIDTH, exact_and_naive, make_layer

from fastattn import KVCache, PagedKVCache
from fastattn.modules import layer_cache, projection, self_attention
from fastattn.testing import assert_within_budget


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of decode_attention by a layer had."""
    counts: list[int] = []

    def counted(q: torch.Tensor, *arguments, **options) -> torch.Tensor:
        counts.append(q.shape[2])
        return original(q, *arguments, **options)

    original = self_attention.decode_attention
    monkeypatch.setattr(self_attention, "decode_attention", counted)
    return counts


class Turned(KVCache):
    """A cache that is given rotated keys."""

    rotates = False

    def append(self, k, v, new_lengths=None):
        return super().append(k, v, new_lengths)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["plain", "ring", "paged", "turned before"])
def test_steps_equal_the_layer_without_a_cache(
    kind: str, backend: str, decoded: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain cache rotates queries and keys as it writes them, in one call."""
    window = 4 if kind == "ring" else None
    style = "interleaved" if kind == "plain" else "half"
    sizes = {"num_heads": 4, "num_kv_heads": 2, "rotary": style, "window": window}
    layer = make_layer(device, backend, **sizes)
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    exact, naive = exact_and_naive(layer, x)
    if kind == "paged":
        pages = PagedKVCache(10, 3, 2, layer.head_dim, device=device)
        rows = [pages.allocate(), pages.allocate()]
    else:
        made = Turned if kind == "turned before" else KVCache
        cache = made(2, 2, 9, layer.head_dim, window=window, device=device)
    if kind == "plain":
        monkeypatch.delattr(projection, "rotated")
    if kind == "ring":  # however many rows
        monkeypatch.setattr(layer_cache, "_FEW_ROWS", 0)
    steps = []
    with torch.no_grad():
        for part in x.split([3, 1, 2, 1], dim=1):
            if kind == "paged":
                T = part.shape[1]
                (cache,) = packed_layers(pages, rows, [T, T])
                part = part.reshape(2 * T, 1, WIDTH)
            steps.append(layer(part, cache=cache).view(2, -1, WIDTH))
    assert_within_budget("steps", torch.cat(steps, 1), exact, naive)
    assert decoded == ([] if kind == "paged" else [3, 1, 2, 1])


def test_what_is_not_kept_in_order_is_not_read_in_order(device: str) -> None:
    layer = make_layer(device, num_heads=2)
    ring = KVCache(1, 2, 9, layer.head_dim, window=4, device=device)
    x = torch.zeros(1, 1, WIDTH, device=device)
    with pytest.raises(ValueError, match="cache must keep every token as it is"):
        layer(x, cache=ring)
    with torch.no_grad(), pytest.raises(ValueError, match="cache must keep every token as it is"):
        layer(x, cache=ring, key_padding_mask=torch.ones(1, 1, dtype=torch.bool, device=device))
    assert ring.length_bound == 0
