"""The Hopper forward in 8 bits on the GPU it is written for, against its bound.

The emulator's tests cover more cases; these say whether the hardware agrees.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.functional.fp8.codes import E4M3, unpacked
from fastattn.ops import attend
from fastattn.testing import assert_within_budget, make_qkv
from fastattn.testing.fp8 import (
    assert_packed_within_fp8_bounds,
    assert_within_fp8_bounds,
    dequantized,
)

pytestmark = pytest.mark.gpu

LENGTHS = [2500, 301]


@pytest.fixture(autouse=True)
def on_hopper(device: str) -> None:
    if not attend.on_hopper(torch.device(device)):
        pytest.skip("this GPU is not of compute capability 9.0")


def drawn(T_q: int, T_k: int, D: int, device: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Codes of 2 rows, 4 heads of queries and 2 of keys, with scales that differ by head."""
    tensors = make_qkv(2, 4, 2, T_q, T_k, D, device=device, layout="bthd", requires_grad=False)
    codes, scales = {}, {}
    for name, x, grow in zip("qkv", tensors, (3.0, 1 / 9, 5.0), strict=True):
        sizes = grow ** torch.arange(x.shape[1], device=device)
        codes[name], scales[f"{name}_scale"] = fastattn.quantize_fp8(x * sizes[:, None, None])
    return tuple(codes.values()), scales


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, id="causal"),
        pytest.param({}, id="full"),
        pytest.param({"causal": True, "window": (200, 0), "keep_first": 3}, id="window"),
        pytest.param({"causal": True, "key_lengths": LENGTHS}, id="lengths"),
        pytest.param({"causal": True, "softcap": 5.0, "sinks": [0.5, -1.0, 3.0, 0.0]}, id="score"),
    ],
)
def test_hopper_in_8_bits_is_within_its_bound(options: dict[str, Any], D: int, device: str) -> None:
    """There are 144 tiles, more than multiprocessors; the last tile of each head is not whole."""
    codes, scales = drawn(2300, 2500, D, device)
    tensors = {
        name: torch.tensor(x, device=device) if isinstance(x, list) else x
        for name, x in options.items()
    }
    if "key_lengths" in options:
        for x in codes[1:]:
            x[1, :, LENGTHS[1] :] = torch.full((), math.nan, device=device).to(E4M3)
    o, lse = fastattn.attention_fp8(*codes, **scales, **tensors, return_lse=True, backend="hopper")
    assert_within_fp8_bounds(o, lse, codes, tuple(scales.values()), tensor_cores=True, **tensors)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_hopper_in_8_bits_gives_each_value_its_place(D: int, device: str) -> None:
    """A query that sees its own key alone has that key's value, which costs no accuracy."""
    codes, scales = drawn(1000, 1000, D, device)
    o = fastattn.attention_fp8(*codes, **scales, window=(0, 0), backend="hopper")
    expected = dequantized(codes[2], scales["v_scale"]).repeat_interleave(2, 1)
    assert_within_budget("o", o, expected, expected.bfloat16())


def test_hopper_in_8_bits_repeats_bit_for_bit(device: str) -> None:
    codes, scales = drawn(1000, 1100, 128, device)
    packed = (*codes[:2], fastattn.pack_values(codes[2]))
    once, again = (
        fastattn.attention_fp8(*given, **scales, causal=True, backend="hopper")
        for given in (codes, packed)
    )
    assert torch.equal(once, again)


@pytest.mark.parametrize("T", [1, 100, 1000])
def test_hopper_packs_values(T: int, device: str) -> None:
    codes, _ = drawn(1, T, 128, device)
    packed = fastattn.pack_values(codes[2])
    on_cpu = fastattn.pack_values(codes[2].cpu())
    assert torch.equal(packed.codes.view(torch.uint8).cpu(), on_cpu.codes.view(torch.uint8))
    assert torch.equal(unpacked(packed).float(), codes[2].float())


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_hopper_in_8_bits_keeps_sequences_apart(packed: bool, D: int, device: str) -> None:
    """Each has a size and so a scale of its own, and keys that begin between sixteens."""
    lengths = [1, 700, 0, 129, 1301]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    codes, scales = {}, {}
    for name, H, grow in (("q", 4, 1 / 3), ("k", 2, 3.0), ("v", 2, 5.0)):
        x = torch.randn(sum(lengths), H, D, device=device)
        sizes = [torch.full((n,), grow**i, device=device) for i, n in enumerate(lengths)]
        codes[name], scales[f"{name}_scale"] = fastattn.quantize_fp8(
            x * torch.cat(sizes)[:, None, None], cu_seqlens=offsets
        )
    q, k, v = codes.values()
    values = fastattn.pack_values(v, offsets) if packed else v
    options: dict[str, Any] = {"causal": True, "window": (500, 0)}
    o, lse = fastattn.attention_varlen_fp8(
        q, k, values, offsets, **scales, **options, return_lse=True, backend="hopper"
    )
    assert_packed_within_fp8_bounds(
        o, lse, (q, k, v), tuple(scales.values()), (offsets, offsets), tensor_cores=True, **options
    )
