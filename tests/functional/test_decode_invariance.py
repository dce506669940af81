"""Batch-invariant decoding from rings: parts by position, of which a ring holds few."""

from typing import Any

import pytest
import torch

from fastattn import KVCache, decode_attention, reference
from fastattn.functional import call_memo
from fastattn.kernels import decode
from fastattn.kernels.launch import decode_splits, launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import make_qkv


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts there were in calls, of 16 positions each."""
    counts: list[int] = []
    split_keys = decode_splits.split_keys

    def remember(*arguments: Any) -> decode_splits.Split:
        split = split_keys(*arguments)
        counts.append(split.parts)
        assert split.parts < 100, "a ring without end"
        return split

    monkeypatch.setattr(decode_splits, "INVARIANT_SPLIT", 16)
    monkeypatch.setattr(decode, "split_keys", remember)
    call_memo.forget()
    launches.forget()
    return counts


@pytest.mark.parametrize(("window", "keep_first"), [(20, 0), (20, 2), (3, 40), (33, 17)])
def test_rings_give_the_bits_of_whole_caches(
    window: int, keep_first: int, counts: list[int], device: str
) -> None:
    """They have parts for what they hold alone, wherever that is."""
    q, k, v = make_qkv(1, 2, 1, 3, 150, 32, requires_grad=False, device=device)
    slots = keep_first + window + 2
    ring = KVCache(1, 1, slots, 32, window=window, keep_first=keep_first, device=device)
    whole = KVCache(1, 1, 150, 32, device=device)
    how: dict[str, Any] = {"backend": "triton", "batch_invariant": True, "return_lse": True}
    options: dict[str, Any] = {"window": window, "keep_first": keep_first}
    for first in range(0, 150, 3):
        for cache in (ring, whole):
            cache.append(k[:, :, first : first + 3], v[:, :, first : first + 3])
        if first in (0, 33, 63, 66, 147):
            with tiles.forced(decode=TileConfig(16, 16)):
                o, lse = decode_attention(q, ring, **how)
                expected = decode_attention(q, whole, **options, **how)
            assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
            keys = (x[:, :, : first + 3] for x in (k, v))
            exact = reference.attention(q, *keys, causal=True, **options)
            torch.testing.assert_close(o, exact, rtol=1e-5, atol=1e-5)
    assert max(counts) <= -(-keep_first // 16) + -(-(window + 2) // 16) + 1
