"""Attention in 8 bits: codes and scales, packed values, backends that dequantise, and the bound."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import dispatch, quantize_fp8
from fastattn.functional.fp8 import PackedValues
from fastattn.functional.fp8 import codes as codes_of_heads
from fastattn.functional.fp8 import fp8_attention as attend8
from fastattn.functional.fp8.codes import E4M3
from fastattn.kernels.fp8.values import launch_pack_values
from fastattn.ops import fp8 as fp8_ops
from fastattn.testing import make_qkv
from fastattn.testing.calls import quantized
from fastattn.testing.fp8 import assert_within_fp8_bounds, dequantized

# Tensors are too small to share between threads.
pytestmark = pytest.mark.usefixtures("one_thread")

# Each head has a size of its own; the scores of all are moderate.
SIZES = {4: (1.0, 1.5, 200.0, 300.0), 2: (1.0, 1 / 250)}


def drawn(B: int = 2, H_q: int = 4, H_k: int = 2, T_q: int = 20, T_k: int = 30, D: int = 64) -> Any:
    """(codes, scales) of random q, k and v whose heads differ in size."""
    tensors = make_qkv(B, H_q, H_k, T_q, T_k, D, requires_grad=False)
    made = quantized(*(x * torch.tensor(SIZES[x.shape[1]])[:, None, None] for x in tensors))
    return made.qkv, tuple(made.alone[f"{name}_scale"] for name in "qkv")


def named(scales: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))


def test_codes_and_scales_of_a_head():
    x = torch.randn(2, 3, 50, 16) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    codes, scale = quantize_fp8(x)
    assert codes.dtype == E4M3 and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == (2, 3)
    assert torch.equal(scale, x.abs().amax((2, 3)) / 448)
    allowed = torch.maximum(x.abs() / 16, scale[..., None, None] / 1024)
    error = (dequantized(codes, scale) - x).abs()
    assert (error <= allowed * (1 + 2.0**-16)).all()
    assert (error > allowed / 2).any()


def test_rows_that_do_not_count_reach_no_scale():
    x = torch.randn(2, 1, 10, 4)
    spoilt = x.clone()
    spoilt[0, :, 6:] = math.nan
    spoilt[1] = math.inf
    codes, scale = quantize_fp8(spoilt, torch.tensor([6, 0]))
    expected, expected_scale = quantize_fp8(x[:1, :, :6])
    assert torch.equal(codes[:1, :, :6].float(), expected.float())
    assert torch.equal(scale[:1], expected_scale)
    assert not codes[0, :, 6:].float().any() and not codes[1].float().any()
    assert quantize_fp8(spoilt)[1].isnan().tolist() == [[True], [True]]
    codes, scale = quantize_fp8(x[:, :, :0])
    assert codes.shape == (2, 1, 0, 4) and codes.dtype == E4M3 and scale.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("D", "T", "dtype"),
    [
        (64, 300, torch.bfloat16),
        (96, 70, torch.float32),
        (128, 17, torch.float16),
        (16, 1, torch.float32),
    ],
)
@pytest.mark.parametrize("short", [False, True], ids=["whole", "lengths"])
def test_the_kernel_gives_the_bits_of_torch(
    D: int, T: int, dtype: torch.dtype, short: bool, device: str
):
    sizes = torch.tensor([1.0, 1e-6, 1e3])[:, None]
    x = (torch.randn(2, T, 3, D) * sizes).to(dtype).transpose(1, 2)
    if dtype == torch.float32:
        x[1, 2, 0, 3] = math.inf
        x[0, 1, 0, 9] = math.nan
    lengths = torch.tensor([T, T // 3]) if short else None
    codes, scale = codes_of_heads.quantize_by_torch(x, lengths)
    on_device = (x.to(device), None if lengths is None else lengths.to(device))
    actual, found_scale = fp8_ops.quantize(*on_device, None, False)
    fine = ~scale.isnan()
    torch.testing.assert_close(found_scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.cpu()[fine].float(), codes[fine].float())
    assert actual.stride() == codes.stride() == x.stride()
    if D in (64, 128):
        packed, _ = fp8_ops.quantize(*on_device, None, True)
        expected = fastattn.pack_values(codes).codes
        assert torch.equal(packed.cpu()[fine].float(), expected[fine].float())


def test_a_head_of_more_tiles_than_are_compared_at_once(device: str):
    """Tiles of 16 rows; the largest number is in the last of 129."""
    x = torch.randn(1, 1, 16 * 129, 512, dtype=torch.bfloat16)
    x[..., -3, 7] = 50.0
    _, scale = fp8_ops.quantize(x.to(device), None, None, False)
    assert torch.equal(scale.cpu(), torch.tensor([[50.0]]) / 448)


def test_codes_can_be_packed_at_once():
    x = torch.randn(2, 3, 50, 64)
    codes, scale = quantize_fp8(x)
    packed, same = quantize_fp8(x, packed=True)
    assert isinstance(packed, PackedValues) and packed.length == 50
    assert torch.equal(packed.codes.float(), fastattn.pack_values(codes).codes.float())
    assert torch.equal(scale, same)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "sequences"])
def test_fake_codes_are_like_real_ones(packed: bool, layout: str, device: str):
    sequences = layout == "sequences"
    sizes = {"B": 1 if sequences else 2, "layout": "bhtd" if layout == "bhtd" else "bthd"}
    x = make_qkv(H_q=4, H_k=2, T_q=20, D=64, requires_grad=False, device=device, **sizes)[0]
    offsets = torch.tensor([0, 5, 5, 20], device=device) if sequences else None
    real = fp8_ops.quantize_heads.op(x, None, offsets, packed)
    fake = fp8_ops.quantize_heads.op(
        x.to("meta"), None, None if offsets is None else offsets.to("meta"), packed
    )
    for ours, theirs in zip(fake, real, strict=True):
        described = (ours.shape, ours.stride(), ours.dtype)
        assert described == (theirs.shape, theirs.stride(), theirs.dtype)


@pytest.mark.parametrize(
    ("x", "served"),
    [
        (torch.zeros(1, 2, 3, 64), True),
        (torch.zeros(1, 2, 3, 64).double(), False),
        (torch.zeros(1, 2, 3, 24), False),
        (torch.zeros(1, 2, 3, 1024), False),
        (torch.zeros(1, 2, 0, 64), False),
    ],
)
def test_what_the_kernel_serves(x: Tensor, served: bool, monkeypatch: pytest.MonkeyPatch):
    assert not dispatch.quantizes(x)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert dispatch.quantizes(x) == served


def test_tensors_without_memory_are_served_as_by_attention():
    q = torch.empty(2, 4, 20, 64, device="meta").to(E4M3)
    o, lse = fastattn.attention_fp8(q, q, q, causal=True, return_lse=True)
    assert o.is_meta and o.shape == q.shape and lse.shape == (2, 4, 20)


@pytest.mark.parametrize("T", [1, 16, 100, 300])
@pytest.mark.parametrize("D", [64, 128])
def test_packed_values(T: int, D: int, device: str):
    """The kernel, the formula, and the order as `PackedValues` tells it."""
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    v = torch.randn(2, T, 3, D).to(E4M3).transpose(1, 2)
    packed = fastattn.pack_values(v)
    padded = torch.zeros(2, 3, -(-T // 16) * 16, D)
    padded[:, :, :T] = v.float()
    keys = [first + key for first in range(0, padded.shape[2], 16) for key in order]
    expected = padded[:, :, keys].mT
    assert packed.length == T and packed.codes.dtype == E4M3
    assert torch.equal(packed.codes.float(), expected)
    assert torch.equal(codes_of_heads.unpacked(packed).float(), v.float())
    assert torch.equal(fp8_ops.pack(v.to(device)).float().cpu(), expected)
    assert launch_pack_values(v[:, :, :0].to(device)).shape == (2, 3, D, 0)


def test_scales_default_to_one():
    codes, scales = drawn()
    ones = named(tuple(torch.ones_like(x) for x in scales))
    given = fastattn.attention_fp8(*codes, **ones, scale=1e-4, backend="torch")
    assert torch.equal(given, fastattn.attention_fp8(*codes, scale=1e-4, backend="torch"))


def test_autocast_leaves_out_dtype_alone():
    codes, scales = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        o = fastattn.attention_fp8(*codes, **named(scales), out_dtype=torch.float32)
    assert o.dtype == torch.float32


def test_explains_why_it_is_not_faster(monkeypatch: pytest.MonkeyPatch):
    codes, _ = drawn()
    told = fastattn.explain_fp8(*codes, causal=True)
    assert told.reasons["hopper"] == (
        "its kernels are written for GPUs of compute capability 9.0; "
        "all others dequantise to bfloat16 first"
    )
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    few = fastattn.explain_fp8(*codes).reasons["hopper"]
    assert few.startswith("20 queries fill less than half of a tile of 128; all others")
    many, _ = drawn(T_q=64)
    told = fastattn.explain_fp8(*many, softcap=3.0)
    assert (told.backend, told.reasons) == ("hopper", {})
    assert [x.split(" ran right")[0] for x in told.findings] == [
        "fp8 bfloat16 64", "fp8+softcap bfloat16 64"
    ]  # fmt: skip
    told = fastattn.explain_fp8(*many, prefix_lengths=3, causal=True)
    assert told.backend != "hopper" and "(fp8+prefix_lengths)" in told.reasons["hopper"]
    wide, _ = drawn(T_q=64, D=256)
    assert "head dim 256 was not timed" in fastattn.explain_fp8(*wide).reasons["hopper"]
    told = fastattn.explain_fp8(*codes, backend="hopper")
    assert told.backend == "hopper" and told.forced and not told.reasons
    monkeypatch.setenv("FASTATTN_BACKEND", "hopper")
    assert fastattn.explain_fp8(*codes).backend == "hopper"
    told = fastattn.explain_fp8(*codes, backend="torch")
    assert told.backend == "torch" and told.forced
    assert told.reasons["hopper"].startswith('backend "torch" was requested')
    with pytest.raises(ValueError, match="cannot serve this call: out_dtype is float32; they"):
        fastattn.explain_fp8(*codes, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot serve this call: head dim 32 is none of 64"):
        fastattn.explain_fp8(*drawn(D=32)[0])
    with pytest.raises(ValueError, match=r"head dims of q and v differ \(64 and 32\)"):
        fastattn.explain_fp8(*codes[:2], codes[2][..., :32])


def test_a_gpu_that_dequantises_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    choice = fastattn.Explanation("triton", {"hopper": "there is no such unit"})
    with pytest.warns(UserWarning, match="does not multiply in fp8: there is no such unit"):
        attend8._say_once(choice, torch.device("cuda"))
    attend8._say_once(choice, torch.device("cuda"))
    attend8._say_once(choice._replace(reasons={"hopper": "new"}), torch.device("cpu"))


def rounded_weights(codes: Any, scales: Any, fault: str | None) -> tuple[Tensor, Tensor]:
    """o in bf16 and lse of causal attention whose weights are rounded as the kernel rounds them."""
    q, k, v = (dequantized(x, scale).float() for x, scale in zip(codes, scales, strict=True))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    T_q, T_k = q.shape[2], k.shape[2]
    hidden = torch.ones(T_q, T_k, dtype=torch.bool).triu(T_k - T_q + 1)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    shift = 0.0 if fault == "no shift" else 8.0
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * 2**shift
    sums = weights.sum(-1, keepdim=True)
    if fault == "fewer bits":
        weights = weights.to(torch.float8_e5m2).float()
    weights = weights.to(E4M3).float()
    if fault == "keys in another order":
        weights = weights.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)
    if fault == "another head's scale":
        v = v * 1.25
    return (weights @ v / sums).bfloat16(), lse + 0.01 * (fault == "lse")


@pytest.mark.parametrize(
    "fault",
    ["no shift", "fewer bits", "keys in another order", "another head's scale", "lse", "NaN"],
)
def test_planted_faults_exceed_the_bound(fault: str):
    codes, scales = drawn(T_k=320, T_q=40)
    # Scores spread over a range in which weights without a shift are subnormal or 0.
    scales = (scales[0] * 3, *scales[1:])
    o, lse = rounded_weights(codes, scales, fault)
    if fault == "NaN":
        scales = (*scales[:2], scales[2] * math.nan)
    message = {"lse": "lse: error", "NaN": "the reference has NaN"}.get(fault, "o: error")
    with pytest.raises(AssertionError, match=message):
        assert_within_fp8_bounds(o, lse, codes, scales, causal=True)
