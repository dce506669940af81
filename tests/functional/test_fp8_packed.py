"""Packed sequences in 8 bits: codes and scales of each, places of their values, and the calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import quantize_fp8
from fastattn.functional.fp8 import PackedValues
from fastattn.functional.fp8.codes import E4M3, quantize_by_torch, unpacked
from fastattn.ops import fp8 as fp8_ops
from fastattn.ops.gradients import as_batch, as_packed

pytestmark = pytest.mark.usefixtures("one_thread")

# One is empty, one ends with a 16 and one with a tile.
LENGTHS = [5, 0, 43, 128, 130]


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def numbers(lengths: list[int], H: int, D: int = 64) -> Tensor:
    """[total, H, D], of which every sequence and head has a size of its own."""
    x = torch.randn(sum(lengths), H, D)
    sizes = [torch.full((length,), 7.0**n) for n, length in enumerate(lengths)]
    return x * torch.cat(sizes)[:, None, None] * 2.0 ** torch.arange(H)[:, None]


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequences_are_quantised_as_batches_of_one(dtype: torch.dtype):
    x, offsets = numbers(LENGTHS, 3), offsets_of(LENGTHS, dtype)
    codes, scale = quantize_fp8(x, cu_seqlens=offsets)
    assert codes.shape == x.shape and scale.shape == (len(LENGTHS), 3)
    for n, rows in enumerate(torch.split(x, LENGTHS)):
        own, own_scale = quantize_fp8(as_batch(rows))
        places = slice(int(offsets[n]), int(offsets[n + 1]))
        assert same(codes[places], as_packed(own))
        if len(rows):
            assert torch.equal(scale[n], own_scale[0])


@pytest.mark.parametrize(
    ("D", "dtype"), [(64, torch.bfloat16), (96, torch.float32), (256, torch.float16)]
)
@pytest.mark.parametrize("short", [False, True], ids=["whole", "lengths"])
def test_the_kernel_gives_the_bits_of_torch(D: int, dtype: torch.dtype, short: bool, device: str):
    x, offsets = numbers(LENGTHS, 2, D).to(dtype), offsets_of(LENGTHS)
    lengths = torch.tensor([9, 0, 20, 128, 0]) if short else None
    codes, scale = quantize_by_torch(x, lengths, offsets)
    given = (None if lengths is None else lengths.to(device), offsets.to(device))
    actual, found_scale = fp8_ops.quantize(as_batch(x.to(device)), *given, False)
    assert torch.equal(found_scale.cpu(), scale)
    assert same(as_packed(actual), codes) and as_packed(actual).stride() == x.stride()
    if D in (64, 256):
        values, _ = fp8_ops.quantize(as_batch(x.to(device)), *given, True)
        values = PackedValues(values.cpu(), len(x))
        assert same(unpacked(values, offsets), codes)


@pytest.mark.parametrize("D", [64, 128])
def test_packed_values_begin_with_a_sixteen(D: int, device: str):
    v, offsets = numbers(LENGTHS, 2, D).to(E4M3), offsets_of(LENGTHS)
    packed = fastattn.pack_values(v, offsets)
    assert packed.length == len(v) and packed.codes.shape == (1, 2, D, 16 * (306 // 16 + 5))
    assert same(unpacked(packed, offsets), v)
    for n, rows in enumerate(torch.split(v, LENGTHS)):
        alone = fastattn.pack_values(as_batch(rows)).codes
        first = 16 * (int(offsets[n]) // 16 + n)
        assert same(packed.codes[..., first : first + alone.shape[3]].contiguous(), alone)
    by_kernel = fp8_ops.pack(as_batch(v.to(device)), offsets.to(device)).cpu()
    assert same(unpacked(PackedValues(by_kernel, len(v)), offsets), v)


def drawn() -> tuple[tuple[Tensor, ...], dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Codes, scales by name, and offsets."""
    q_lengths, k_lengths = [4, 0, 9], [7, 3, 30]
    offsets = (offsets_of(q_lengths), offsets_of(k_lengths))
    codes, scales = [], {}
    for name, lengths, cu, H in (
        ("q", q_lengths, offsets[0], 4), ("k", k_lengths, offsets[1], 2),
        ("v", k_lengths, offsets[1], 2),
    ):  # fmt: skip
        code, scales[f"{name}_scale"] = quantize_fp8(numbers(lengths, H), cu_seqlens=cu)
        codes.append(code)
    scales["q_scale"] = 1 / scales["q_scale"]
    return tuple(codes), scales, offsets


def test_keys_have_the_offsets_of_queries_by_default():
    x = numbers([4, 9], 2).to(E4M3)
    offsets = offsets_of([4, 9])
    call: dict[str, Any] = {"causal": True, "backend": "torch"}
    o = fastattn.attention_varlen_fp8(x, x, x, offsets, **call)
    assert torch.equal(o, fastattn.attention_varlen_fp8(x, x, x, offsets, offsets, **call))
    ones = {f"{name}_scale": torch.ones(2, 2) for name in "qkv"}
    assert torch.equal(o, fastattn.attention_varlen_fp8(x, x, x, offsets, **ones, **call))


def test_compiled_calls_give_the_same():
    (q, k, v), scales, offsets = drawn()

    def call(q: Tensor, k: Tensor, v: Tensor, *offsets: Tensor) -> Tensor:
        given = {"causal": True, "backend": "torch", "out_dtype": torch.float32}
        return fastattn.attention_varlen_fp8(q, k, v, *offsets, **scales, **given)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, *offsets), call(q, k, v, *offsets))


def test_nothing_to_attend_with():
    none, offsets = torch.zeros(0, 2, 64), torch.zeros(1, dtype=torch.int32)
    codes, scale = quantize_fp8(none, cu_seqlens=offsets)
    assert codes.shape == (0, 2, 64) and scale.shape == (0, 2)
    assert fastattn.pack_values(codes, offsets).codes.shape == (1, 2, 64, 0)
    o, lse = fastattn.attention_varlen_fp8(codes, codes, codes, offsets, return_lse=True)
    assert o.shape == (0, 2, 64) and lse.shape == (2, 0)
