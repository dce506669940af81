"""The kernels where generated calls do not go: wide heads, many blocks, one gradient alone."""

import math
from functools import partial

import pytest
import torch
from nightly import gate_cases

import fastattn
from fastattn.testing import assert_matches_reference, make_qkv

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


triton_attention = partial(fastattn.attention, backend="triton")


# Generated calls have smaller ones.
@pytest.mark.parametrize("D", [1, *gate_cases([80, 111, 256], [96, 128, 160])])
def test_head_dims(D: int, device: str) -> None:
    dtype = FLOATS[D % 3]
    q, k, v = make_qkv(1, 2, 1, 37, D=D, dtype=dtype, device=device)
    assert_matches_reference(triton_attention, q, k, v, causal=True)


def test_holes_in_many_blocks(device: str) -> None:
    """Every block of keys has bits of its own; poison shows one that takes another's."""
    B, T_k = 2, 300
    clean = make_qkv(B, 2, 1, 20, T_k, 16, device=device)
    mask = torch.rand(B, T_k, generator=torch.Generator().manual_seed(5)).to(device) < 0.7
    lengths = torch.tensor([300, 170], device=device)
    hidden = ~mask | (torch.arange(T_k, device=device) >= lengths[:, None])
    k, v = (x.detach().masked_fill(hidden[:, None, :, None], math.nan) for x in clean[1:])
    how = {"key_padding_mask": mask, "key_lengths": lengths}
    assert_matches_reference(triton_attention, clean[0], k, v, clean=clean, **how)


def test_bitwise_repeatable(device: str) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        q, k, v = make_qkv(2, 4, 2, 70, D=16, dtype=torch.float16, device=device)
        o = triton_attention(q, k, v, causal=True)
        return (o, *torch.autograd.grad(o.float().square().sum(), (q, k, v)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(device: str) -> None:
    """Rows of k and v further apart than int32 counts elements."""
    T, D, rows = 40, 64, 2**26
    q = torch.randn(1, 1, T, D, device=device, dtype=torch.float16)
    wide = torch.empty(T * rows, device=device, dtype=torch.float16)
    k = wide.as_strided((1, 1, T, D), (0, 0, rows, 1))
    k.copy_(torch.randn(1, 1, T, D, device=device))
    assert_matches_reference(triton_attention, q, k, k, causal=True)
