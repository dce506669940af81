"""The kernels against the oracle: every mask, dtype, head dim and shape, forward and backward.

Runs in Triton's interpreter without a GPU and compiled on one.
"""

import math
from typing import Any

import pytest
import torch

import fastattn
from fastattn import reference
from fastattn.testing import assert_matches_reference, assert_within_budget, make_qkv, worst_naive

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def triton_attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, backend="triton", **arguments)


def padding_with_holes(B: int, T_k: int, device: str) -> torch.Tensor:
    """Row 0 scattered with a wide hole, row 1 padded on both sides, rows after that all padded."""
    mask = torch.rand(B, T_k, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[0, T_k // 4 : 3 * T_k // 4] = False
    mask[1] = True
    mask[1, :3] = False
    mask[1, -5:] = False
    mask[2:] = False
    return mask.to(device)


MASKS: dict[str, Any] = {
    "full": lambda B, T_k, device: {},
    "causal": lambda B, T_k, device: {"causal": True},
    "window-int": lambda B, T_k, device: {"window": 9},
    "window-both": lambda B, T_k, device: {"window": (37, 5)},
    "window-left": lambda B, T_k, device: {"window": (40, None)},
    "window-right": lambda B, T_k, device: {"window": (None, 7)},
    "window-wide-causal": lambda B, T_k, device: {"window": (50, 50), "causal": True},
    "padding": lambda B, T_k, device: {"key_padding_mask": padding_with_holes(B, T_k, device)},
    "padding-causal": lambda B, T_k, device: {
        "key_padding_mask": padding_with_holes(B, T_k, device),
        "causal": True,
    },
    "lengths": lambda B, T_k, device: {
        "key_lengths": torch.tensor([T_k - 11, 0, 1][:B], device=device)
    },
    "lengths-out-of-range": lambda B, T_k, device: {
        "key_lengths": torch.tensor([T_k + 9, T_k, -4][:B], device=device)
    },
    "lengths-causal-window": lambda B, T_k, device: {
        "key_lengths": torch.tensor([T_k - 30, T_k + 9, -4][:B], device=device, dtype=torch.int32),
        "window": 33,
    },
    "all-combined": lambda B, T_k, device: {
        "key_padding_mask": padding_with_holes(B, T_k, device),
        "key_lengths": torch.tensor([T_k - 3, T_k - 9, 5][:B], device=device),
        "window": (45, 3),
        "query_offset": torch.tensor([0, T_k // 3, 2][:B], device=device),
    },
    "offset-top-left": lambda B, T_k, device: {"causal": True, "query_offset": 0},
    "offset-beyond": lambda B, T_k, device: {"window": 20, "query_offset": T_k - 8},
    "scale": lambda B, T_k, device: {"causal": True, "scale": 0.7},
}


# fp32 with every mask, fp16 and bf16 with every other one: masks are made of integers alone.
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param(mask, dtype, id=f"{mask}-{dtype}")
        for i, mask in enumerate(MASKS)
        for dtype in FLOATS
        if dtype == torch.float32 or (dtype == torch.float16) == i % 2
    ],
)
def test_masks(mask: str, dtype: torch.dtype, device: str) -> None:
    B, T_q, T_k = 3, 45, 75
    q, k, v = make_qkv(B, 2, 1, T_q, T_k, 16, dtype=dtype, device=device)
    assert_matches_reference(triton_attention, q, k, v, **MASKS[mask](B, T_k, device))


SHAPES = {
    "mha": {"H_q": 3, "H_k": 3, "T_q": 40},
    "gqa-3": {"H_q": 6, "H_k": 2, "T_q": 40},
    "mqa-8": {"H_q": 8, "H_k": 1, "T_q": 20},
    "more-queries-than-keys": {"T_q": 70, "T_k": 37},
    "one-query": {"T_q": 1, "T_k": 67},
    "one-key": {"T_q": 35, "T_k": 1},
    "one-of-each": {"T_q": 1, "T_k": 1},
    "exact-tiles": {"T_q": 64, "T_k": 64},
    "values-wider": {"T_q": 33, "D": 16, "D_v": 48},
    "values-narrower": {"T_q": 33, "D": 40, "D_v": 8},
    "bthd-memory": {"T_q": 50, "layout": "bthd"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, device: str) -> None:
    arguments = {"B": 2, "H_q": 2, "H_k": 1, "D": 32, "device": device, **SHAPES[shape]}
    assert_matches_reference(triton_attention, *make_qkv(**arguments), causal=True)


@pytest.mark.parametrize("D", [1, 8, 16, 40, 64, 80, 96, 111, 128, 160, 256])
def test_head_dims(D: int, device: str) -> None:
    dtype = FLOATS[D % 3]
    q, k, v = make_qkv(1, 2, 1, 37, D=D, dtype=dtype, device=device)
    assert_matches_reference(triton_attention, q, k, v, causal=True)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(sizes: tuple[int, int], device: str) -> None:
    q, k, v = make_qkv(2, 2, 1, *sizes, D=16, device=device)
    assert_matches_reference(triton_attention, q, k, v)


def test_empty_batch(device: str) -> None:
    q, k, v = make_qkv(0, 2, 1, 4, D=16, device=device)
    assert triton_attention(q, k, v, causal=True).shape == (0, 2, 4, 16)


def test_invisible_rows_are_zero(device: str) -> None:
    """T_q > T_k under a bottom-right causal mask: the first queries stand before every key."""
    q, k, v = make_qkv(1, 2, 1, 10, 4, 16, device=device)
    o, lse = triton_attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == -math.inf).all()
    assert lse[:, :, 6:].isfinite().all()
    (dq,) = torch.autograd.grad(o.sum() + lse[:, :, 6:].sum(), q)
    assert (dq[:, :, :6] == 0).all()
    assert (dq[:, :, 6:] != 0).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("by", ["padding", "lengths"])
def test_padded_keys_reach_nothing(by: str, poison: float, device: str) -> None:
    B, T_k = 2, 70
    clean = make_qkv(B, 2, 1, 40, T_k, 16, device=device)
    mask = padding_with_holes(B, T_k, device)
    lengths = torch.tensor([33, 64], device=device)
    if by == "padding":
        arguments, hidden = {"key_padding_mask": mask}, ~mask
    else:
        arguments = {"key_lengths": lengths}
        hidden = torch.arange(T_k, device=device) >= lengths[:, None]
    k, v = (x.detach().masked_fill(hidden[:, None, :, None], poison) for x in clean[1:])
    assert_matches_reference(
        triton_attention, clean[0], k, v, clean=clean, causal=True, **arguments
    )


@pytest.mark.parametrize("lengths", [None, (300, 170)])
def test_holes_in_many_blocks(lengths: tuple[int, ...] | None, device: str) -> None:
    """Every block of keys has bits of its own; poison shows one that takes another's."""
    B, T_k = 2, 300
    clean = make_qkv(B, 2, 1, 20, T_k, 16, device=device)
    mask = torch.rand(B, T_k, generator=torch.Generator().manual_seed(5)).to(device) < 0.7
    arguments = {"key_padding_mask": mask}
    hidden = ~mask
    if lengths is not None:
        arguments["key_lengths"] = torch.tensor(lengths, device=device)
        hidden |= torch.arange(T_k, device=device) >= arguments["key_lengths"][:, None]
    k, v = (x.detach().masked_fill(hidden[:, None, :, None], math.nan) for x in clean[1:])
    assert_matches_reference(triton_attention, clean[0], k, v, clean=clean, **arguments)


def test_window_of_one_returns_the_values(device: str) -> None:
    q, k, v = make_qkv(2, 4, 2, 45, D=16, device=device)
    o = triton_attention(q, k, v, window=1)
    torch.testing.assert_close(o, v.repeat_interleave(2, 1), rtol=0, atol=0)


def test_a_shift_of_the_scores_changes_nothing_but_lse(device: str) -> None:
    """Scores near the top of fp32's exponent range must not overflow."""
    q, k, v = make_qkv(1, 1, 1, 33, D=16, device=device)
    k = k.detach().clone()
    k[..., 0] = 40.0
    q = q.detach().clone()
    q[..., 0] = 400.0
    assert_matches_reference(triton_attention, q, k, v, causal=True)


VIEWS = {
    "packed-qkv": lambda x: x,
    "last-dim-strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "rows-not-16-bytes": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "shifted-start": lambda x: torch.nn.functional.pad(x, (1, 15))[..., 1:-15],
    "broadcast-batch": lambda x: x[:1].expand_as(x),
    "broadcast-head": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides(view: str, device: str) -> None:
    q, k, v = make_qkv(2, 2, 2, 35, D=16, dtype=torch.float16, device=device)
    if view == "packed-qkv":
        packed = torch.stack((q, k, v), 3).permute(0, 2, 1, 3, 4).contiguous()
        views = tuple(packed[:, :, :, i].transpose(1, 2) for i in range(3))
    else:
        views = tuple(VIEWS[view](x.detach()) for x in (q, k, v))
    assert_matches_reference(triton_attention, *views, causal=True)


def test_gradient_of_any_strides(device: str) -> None:
    """o.sum() sends a gradient with stride 0 everywhere."""
    q, k, v = make_qkv(1, 2, 1, 20, D=16, device=device)
    expected = torch.autograd.grad(
        triton_attention(q, k, v), (q, k, v), torch.ones(1, 2, 20, 16, device=device)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            torch.autograd.grad(triton_attention(q, k, v).sum(), (q, k, v)), expected, strict=True
        )
    )


@pytest.mark.parametrize("only", [0, 1, 2], ids=["q", "k", "v"])
def test_gradient_of_one_input_alone(only: int, device: str) -> None:
    inputs = make_qkv(1, 2, 1, 20, D=16, device=device)
    all_grads = torch.autograd.grad(triton_attention(*inputs).sum(), inputs)
    alone = [x.detach() for x in inputs]
    alone[only].requires_grad_()
    (grad,) = torch.autograd.grad(triton_attention(*alone).sum(), alone[only])
    assert torch.equal(grad, all_grads[only])


def test_gradient_of_lse_alone(device: str) -> None:
    inputs = make_qkv(1, 2, 1, 20, D=16, device=device)

    def gradients(attention, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        _, lse = attention(*inputs, causal=True, return_lse=True)
        return torch.autograd.grad(lse.sum(), inputs, allow_unused=True)

    dq, dk, dv = gradients(triton_attention, *inputs)
    exact = gradients(reference.attention, *(x.double() for x in inputs))
    naive = worst_naive(exact, lambda: gradients(reference.attention, *inputs))
    assert (dv == 0).all()
    assert_within_budget("dq", dq, exact[0], naive[0])
    assert_within_budget("dk", dk, exact[1], naive[1])
    assert (dq != 0).any()


def test_bitwise_repeatable(device: str) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        q, k, v = make_qkv(2, 4, 2, 70, D=16, dtype=torch.float16, device=device)
        o = triton_attention(q, k, v, causal=True)
        return (o, *torch.autograd.grad(o.float().square().sum(), (q, k, v)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_output_keeps_the_memory_order_of_q(device: str) -> None:
    for layout in ("bhtd", "bthd"):
        q, k, v = make_qkv(2, 4, 2, 20, D=16, device=device, layout=layout)
        o = triton_attention(q, k, v)
        assert o.stride() == q.stride()
        for x, grad in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
            assert grad.stride() == x.stride()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(device: str) -> None:
    """Rows of k and v further apart than int32 counts elements."""
    T, D, rows = 40, 64, 2**26
    q = torch.randn(1, 1, T, D, device=device, dtype=torch.float16)
    wide = torch.empty(T * rows, device=device, dtype=torch.float16)
    k = wide.as_strided((1, 1, T, D), (0, 0, rows, 1))
    k.copy_(torch.randn(1, 1, T, D, device=device))
    assert_matches_reference(triton_attention, q, k, k, causal=True)
