"""Llama's calls give what the layer gives as a whole, and with this library's own cache."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import assert_by_oracle
from torch import Tensor

from fastattn import GQAttention
from fastattn.compat.llama import LlamaAttention
from fastattn.rotary import rotary_tables

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

B, T, C, H, H_K, D = 2, 9, 32, 4, 2, 8
FREQS_CIS = torch.complex(*rotary_tables(T, D))


def make(**options) -> LlamaAttention:
    torch.manual_seed(0)
    return LlamaAttention(GQAttention(C, H, H_K, rotary="interleaved", **options))


def in_steps(layer: LlamaAttention, x: Tensor, freqs_cis: Tensor | None) -> Tensor:
    """A prompt, a chunk of two and then token by token, the caches handed on."""
    cache_k = cache_v = None
    outs, n = [], 0
    for part in x.split([4, 2, 1, 1, 1], 1):
        turned = None if freqs_cis is None else freqs_cis[n : n + part.shape[1]]
        out, cache_k, cache_v = layer(part, turned, True, cache_k, cache_v)
        n += part.shape[1]
        assert cache_k.shape == (B, n, H_K, D)
        assert cache_v.shape == (B, n, H_K, layer.attention.v_head_dim)
        outs.append(out)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": True, "v_head_dim": 12}])
@torch.no_grad()
def test_steps_equal_the_whole_and_the_librarys_cache(options):
    layer = make(**options)
    x = torch.randn(B, T, C)
    whole, *caches = layer(x, freqs_cis=FREQS_CIS)
    assert caches == [None, None]
    cache = layer.attention.new_cache(batch_size=B, max_length=T)
    steps = [layer.attention(part, cache=cache) for part in x.split([4, 2, 1, 1, 1], 1)]
    actual = [in_steps(layer, x, FREQS_CIS), in_steps(layer, x, None), torch.cat(steps, 1)]

    def oracle(dtype: torch.dtype) -> list[Tensor]:
        return [make(**options).to(dtype)(x.to(dtype), None)[0]] * 3

    assert_by_oracle(actual, oracle, names="out without cache")
    assert torch.equal(whole, layer.attention(x))


def test_gradients_flow_through_the_caches():
    x = torch.randn(B, T, C)

    def gradient(forward: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        layer = make().to(dtype)
        out = forward(layer, x.to(dtype), FREQS_CIS.to(torch.promote_types(dtype, torch.complex64)))
        return [torch.autograd.grad(out.square().sum(), layer.attention.k_proj.weight)[0]]

    actual = gradient(in_steps, torch.float32)
    assert_by_oracle(actual, partial(gradient, lambda layer, *given: layer(*given)[0]), names="dw")


@torch.no_grad()
def test_caches_are_read_and_come_back_where_none_are_asked_for():
    layer, x = make(), torch.randn(B, T, C)
    _, *caches = layer(x[:, :-2], FREQS_CIS[:-2], True)
    arguments = (x[:, -2:], FREQS_CIS[-2:])
    out, *back = layer(*arguments, False, *caches)
    assert torch.equal(out, layer(*arguments, True, *caches)[0])
    assert all(y is z for y, z in zip(back, caches, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_padding_mask_hides_what_is_padded_with_and_without_caches(causal: bool) -> None:
    layer = make(causal=causal)
    x = torch.randn(B, T, C)
    kept = torch.ones(B, T, dtype=torch.bool)
    kept[1, :3] = False
    expected = layer.attention(x, rotary_tables=FREQS_CIS, key_padding_mask=kept)
    for mask in (kept, torch.zeros(B, T).masked_fill(~kept, float("-inf"))):
        whole, _, _ = layer(x, FREQS_CIS, padding_mask=mask)
        assert torch.equal(whole, expected)
        _, *caches = layer(x[:, :6], FREQS_CIS[:6], True, padding_mask=mask[:, :6])
        last, _, _ = layer(x[:, 6:], FREQS_CIS[6:], False, *caches, padding_mask=mask)
        if causal:
            torch.testing.assert_close(last, expected[:, 6:])
        other = x.clone()
        other[1, :3] = 9.0
        moved, _, _ = layer(other, FREQS_CIS, padding_mask=mask)
        assert torch.equal(moved[kept], whole[kept])
