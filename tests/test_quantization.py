"""8-bit codes: the stated error bounds, exact values, rows that are not finite, and the kernel."""

import pytest
import torch

from fastattn import KVCache, QuantizedKVCache
from fastattn.quantization import dequantize_rows, quantize_rows, storage_dtype

FP32_ROUNDING = 1 + 2.0**-16
FORMATS = ["int8", "fp8"]


def rows_of_all_sizes() -> torch.Tensor:
    """Rows whose numbers span 12 powers of two, scaled from 1e-30 to 1e30."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator)
    x *= 2.0 ** torch.randint(-12, 1, x.shape, generator=generator)
    return x * 10.0 ** torch.linspace(-30, 30, 400).unsqueeze(1)


def stored_error(x: torch.Tensor, quantize: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantize_rows(x, quantize)
    assert codes.dtype == storage_dtype(quantize)
    assert scale.dtype == torch.float32
    numbers = codes.double() * scale.double().unsqueeze(-1)
    return (numbers - x.double()).abs(), scale.double().unsqueeze(-1)


def test_int8_error_is_at_most_half_a_scale():
    error, scale = stored_error(rows_of_all_sizes(), "int8")
    assert (error <= scale / 2 * FP32_ROUNDING).all()
    assert (error > scale * 0.49).any(), "the bound could be smaller"


def test_fp8_error_is_relative_down_to_its_smallest_step():
    x = rows_of_all_sizes()
    error, scale = stored_error(x, "fp8")
    relative = x.double().abs() / 16
    bound = torch.maximum(relative, scale / 1024) * FP32_ROUNDING
    assert (error <= bound).all()
    assert (error > bound * 0.9)[relative > scale / 1024].any()
    assert (error > bound * 0.9)[relative < scale / 1024].any()


@pytest.mark.parametrize(("quantize", "largest"), [("int8", 127), ("fp8", 448)])
def test_every_code_is_its_own_number(quantize, largest):
    dtype = storage_dtype(quantize)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    numbers = codes.float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= largest)]
    assert numbers.numel() >= 254
    again, scale = quantize_rows(numbers / 8, quantize)
    assert float(scale) == 1 / 8
    assert torch.equal(dequantize_rows(again, scale, torch.float32), numbers / 8)


@pytest.mark.parametrize("quantize", FORMATS)
def test_rows_of_zeros_and_of_the_tiniest_numbers(quantize):
    x = torch.zeros(2, 16)
    x[1] = 1e-44
    codes, scale = quantize_rows(x, quantize)
    assert (dequantize_rows(codes, scale, torch.float32) == 0).all()


@pytest.mark.parametrize("quantize", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_reads_back_as_nan_and_spoils_no_other(quantize, bad):
    x = torch.ones(3, 16)
    x[1, 5] = bad
    codes, scale = quantize_rows(x, quantize)
    numbers = dequantize_rows(codes, scale, torch.float32)
    assert numbers[1].isnan().all()
    assert torch.equal(numbers[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("quantize", FORMATS)
def test_kernel_makes_the_codes_that_torch_makes(quantize, device):
    """Halfway cases of every size, subnormal codes, zeros, and a row that is not finite."""
    x = rows_of_all_sizes().to(device)
    x[0], x[1, 3] = 0, torch.nan
    halfway = torch.arange(64, device=device) / 2
    for row, step in enumerate((1.0, 2.0**-9, 2.0**-6), start=2):
        x[row] = halfway * step
        x[row, -1] = 127 if quantize == "int8" else 448
    caches = []
    for backend in ("triton", "torch"):
        cache = KVCache(1, 1, 400, 64, quantize=quantize, device=device)
        cache.append(x.view(1, 1, 400, 64), x.view(1, 1, 400, 64), backend=backend)
        caches.append(cache)
    ours, expected = caches
    finite = torch.arange(400, device=device) != 1
    torch.testing.assert_close(ours.k_scale, expected.k_scale, rtol=0, atol=0, equal_nan=True)
    assert ours.k_scale[0, 0, 1].isnan()
    for got, wanted in ((ours.k, expected.k), (ours.v, expected.v)):
        got, wanted = (y.view(torch.uint8)[0, 0, finite] for y in (got, wanted))
        assert torch.equal(got, wanted)


def test_quantized_cache_is_a_cache_with_codes():
    cache = QuantizedKVCache(2, 1, 8, 16, window=4, keep_first=2, dtype=torch.bfloat16)
    assert isinstance(cache, KVCache)
    assert (cache.k.dtype, cache.dtype) == (torch.int8, torch.bfloat16)
    assert repr(cache).startswith("QuantizedKVCache(batch_size=2, num_kv_heads=1, max_length=8,")
    assert (cache.window, cache.keep_first) == (4, 2)
    assert cache.nbytes == 2 * 2 * 8 * 16 + 2 * 2 * 8 * 4 + 2 * 4
    assert QuantizedKVCache(1, 1, 2, 16, quantize="fp8").k.dtype == torch.float8_e4m3fn
