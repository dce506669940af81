"""CausalGQAttention with a KVCache: what it refuses, and what an error leaves."""

import pytest
import torch
from naive_layers import (
    WIDTH,
    exact_and_naive,
    make_layer,
)

from fastattn import KVCache
from fastattn.testing import assert_within_budget


def test_cache_needs_grad_mode_off(device):
    layer = make_layer(device, num_heads=2)
    cache = layer.new_cache(1, 4)
    with pytest.raises(RuntimeError, match=r"append under torch.no_grad\(\)"):
        layer(torch.randn(1, 2, WIDTH, device=device), cache=cache)
    assert cache.uniform_length == 0
    frozen = layer.requires_grad_(False)
    frozen(torch.randn(1, 2, WIDTH, device=device), cache=cache)
    assert cache.uniform_length == 2


@torch.no_grad()
def test_cache_errors_leave_the_cache_as_it_was():
    layer = make_layer(num_heads=4, rotary="half")
    x = torch.randn(2, 8, WIDTH)
    cache = layer.new_cache(2, 8)
    layer(x[:, :3], cache=cache)
    ones, both = torch.ones(2, 6), {"key_lengths": torch.tensor([1, 1])}
    before = cache.k.clone()
    for error, match, given in (
        (ValueError, "needs 9 slots, but max_length is 8 .* room for 5", {"x": x[:, :6]}),
        (ValueError, "cache must have 3 rows to match x, got 2", {"x": torch.randn(3, 3, WIDTH)}),
        (TypeError, "key_lengths must be an int32 or int64", {"key_lengths": torch.ones(2)}),
        (
            ValueError,
            r"key_lengths must have shape \[B\] = \[2\]",
            {"key_lengths": torch.tensor([1])},
        ),
        (ValueError, "on the left .* or pad on", {**both, "key_padding_mask": ones.bool()}),
        (TypeError, "key_padding_mask must be a bool", {"key_padding_mask": ones}),
        (TypeError, "key_padding_mask must be a bool .* got list", {"key_padding_mask": [True]}),
        (ValueError, r"\[B, cached\+T\] = \[2, 6\], got", {"key_padding_mask": ones[:, :3].bool()}),
        (ValueError, "cpu, got meta", {"key_padding_mask": ones.to("meta").bool()}),
        (ValueError, "must be at most 3 here, got 7: .* and 3", {"prefix_lengths": 7}),
        (ValueError, r"have shape \[B\] = \[2\], got \[1\]", {"prefix_lengths": torch.tensor([1])}),
        (ValueError, "documents is not supported with a", {"documents": ones[:, :3].int()}),
        (ValueError, r"k must have shape .* \[2, 2, T, 8\]", {"cache": KVCache(2, 2, 8, 8)}),
    ):
        with pytest.raises(error, match=match):
            layer(**{"x": x[:, 3:6], "cache": cache, **given})
        assert cache.uniform_length == 3
        assert cache.lengths.tolist() == [3, 3]
        torch.testing.assert_close(cache.k, before, rtol=0, atol=0, equal_nan=True)
    y = layer(x[:, 3:6], cache=cache)
    assert_within_budget("y", y, *(full[:, 3:] for full in exact_and_naive(layer, x[:, :6])))
    layer(x[:, :2], key_lengths=torch.tensor([2, 1]), cache=cache)
    with pytest.raises(ValueError, match=r"needs rows of one length"):
        layer(x[:, :1], key_padding_mask=torch.ones(2, 9).bool(), cache=cache)


@pytest.mark.parametrize("kind", ["window", "quantize", "starts"])
def test_caches_whose_slots_are_no_plain_tokens_are_refused_in_grad_mode(kind):
    """They would be read as if slot j held the token at position j; decoding has no gradients."""
    layer = make_layer(num_heads=4, rotary="half")
    options = {"window": {"window": 4}, "quantize": {"quantize": "int8"}, "starts": {}}[kind]
    cache = KVCache(2, layer.num_kv_heads, 8, layer.head_dim, **options)
    if kind == "starts":
        cache.set_starts(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"except under torch.no_grad"):
        layer(torch.randn(2, 3, WIDTH), cache=cache)
    assert cache.lengths.tolist() == [0, 0]
