"""Numbers made of codes are exact, for every code; queries and weights are scaled for products."""

import pytest
import torch
import triton
import triton.language as tl
from interpreted_ptx import assembly_interpreted, run

from fastattn.kernels.launch import interpreter
from fastattn.kernels.rules import codes

interpreter.patch_interpreter()
# What assembly makes of the codes of one kind: the numbers, and what is added to them.
ASSEMBLY = {
    "INT8_TO_FP16": (torch.int8, 0.0),
    "INT8_TO_RAISED": (torch.int8, codes.RAISED_BY.value),
    "E4M3_TO_FP16": (torch.float8_e4m3fn, 0.0),
    "E4M3_BITS_TO_FP16": (torch.float8_e4m3fn, 0.0),
}
# As `from_e4m3` reads it; the conversion of sm_89 makes it NaN.
NAN_CODE = 480.0


@pytest.mark.parametrize("name", ASSEMBLY)
def test_every_code_is_exact(name: str) -> None:
    stored, added = ASSEMBLY[name]
    every = torch.arange(256, dtype=torch.uint8)
    # Each code in each of the four places.
    for place in range(4):
        four = every.roll(place).view(-1, 4)
        registers = four.view(torch.uint32).flatten().tolist()
        actual = [run(getattr(codes, name).value, [int(x)], 2) for x in registers]
        numbers = torch.tensor(actual, dtype=torch.uint32).view(torch.float16).float()
        # Even columns of two keys, then odd ones.
        expected = four[:, [0, 2, 1, 3]].view(stored).float() + added
        if name == "E4M3_BITS_TO_FP16":
            signs = 1 - 2 * (four[:, [0, 2, 1, 3]] >> 7).float()
            expected = torch.where(expected.isnan(), NAN_CODE * signs, expected)
        assert torch.equal(numbers.isnan(), expected.isnan())
        assert torch.equal(numbers.nan_to_num(), expected.nan_to_num())


@triton.jit
def numbers_kernel(pairs_ptr, even_ptr, odd_ptr, INT8: tl.constexpr, NVIDIA: tl.constexpr):
    places = tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :]
    even, odd = codes.numbers_of(tl.load(pairs_ptr + places), INT8, False, NVIDIA)
    tl.store(even_ptr + places, even)
    tl.store(odd_ptr + places, odd)


@pytest.mark.parametrize("NVIDIA", [0, 80, 89])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_of_even_and_of_odd_columns(stored: torch.dtype, NVIDIA: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("one device cannot run the assembly of all")
    every = torch.arange(256, dtype=torch.uint8)
    if stored == torch.float8_e4m3fn:
        every[0x7F] = every[0xFF] = 0  # NaN
    even, odd = torch.empty(2, 16, 8, dtype=torch.float16)
    pairs = every.view(torch.int16).view(16, 8)
    with assembly_interpreted():
        numbers_kernel[(1,)](pairs, even, odd, stored == torch.int8, NVIDIA)
    expected = every.view(stored).half().view(16, 8, 2)
    assert torch.equal(torch.stack((even, odd), -1), expected)


@triton.jit
def queries_kernel(q_ptr, out_ptr, start_ptr, unit_ptr, M: tl.constexpr, D: tl.constexpr):
    rows = tl.arange(0, M)
    q = codes.queries_for_codes(q_ptr + rows[:, None] * D, rows < M, D, D, True)
    pairs = rows[:, None] * D + 2 * tl.arange(0, D // 2)[None, :]
    tl.store(out_ptr + pairs, q.even)
    tl.store(out_ptr + pairs + 1, q.odd)
    tl.store(start_ptr + rows, q.start)
    tl.store(unit_ptr, q.unit)


@pytest.mark.parametrize("largest", [2.0**-100, 1e-4, 1.0, 1.999, 3e4, 2.0**100])
def test_queries_are_scaled_to_the_range_of_fp16(largest: float, device: str) -> None:
    """Queries are scaled by a power of two: the largest is at 2^14 to 2^15, and all stay exact."""
    q = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)).to(device) + 0.5
    q = (q * largest).bfloat16()
    actual, start = torch.empty_like(q, dtype=torch.float16), torch.empty(16, device=device)
    unit = torch.empty(1, device=device)
    queries_kernel[(1,)](q, actual, start, unit, 16, 32)
    assert 2**14 <= actual.max() < 2**15
    assert torch.equal(actual.double() * unit.double(), q.double())
    assert torch.equal(start.double(), actual.double().sum(1) * -codes.RAISED_BY.value)


@triton.jit
def lift_kernel(scale_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, codes.lift_of(tl.load(scale_ptr + at)))


def test_lifted_weights_are_near_the_top_of_what_fp16_holds(device: str) -> None:
    """A weight times its scale is 2^12 where the weight is 2^-lift, and 2^0.09 more at most."""
    scale = torch.linspace(-100, 100, 1024, device=device).exp2()
    lift = torch.empty_like(scale)
    lift_kernel[(1,)](scale, lift, 1024)
    product = scale.double().log2() - lift.double()
    assert product.min() > 12 - 1e-4
    assert product.max() < 12.09
