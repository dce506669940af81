"""Keys and values in 8 bits, with one fp32 scale per row.

A row x of D numbers is stored as codes c with x ~ scale * c; scale is the row's largest magnitude
over the largest code. With deq = scale * c:

    int8   |x - deq| <= scale / 2                            codes -127..127, scale = absmax / 127
    fp8    |x - deq| <= max(|x| / 16, scale / 1024)          e4m3 codes, scale = absmax / 448

The first fp8 term is the rounding to 3 mantissa bits, the second the rounding of subnormals. fp32
rounding adds a relative 2**-16 to both bounds.
"""

from typing import Literal

import torch
from torch import Tensor

Quantize = Literal["int8", "fp8"]

_STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
# Keeps the scale out of subnormal numbers, which GPUs may flush to 0.
_SMALLEST_SCALE = 2.0**-100


def check_quantize(quantize: str | None) -> None:
    """Raise ValueError unless `quantize` is None or names a storage format."""
    if quantize is not None and quantize not in _STORAGE:
        raise ValueError(f"quantize must be None, 'int8' or 'fp8', got {quantize!r}")


def storage_dtype(quantize: Quantize) -> torch.dtype:
    """The dtype that codes are stored in."""
    return _STORAGE[quantize]


def quantize_rows(x: Tensor, quantize: Quantize) -> tuple[Tensor, Tensor]:
    """Codes [..., D], rounded to nearest, ties to even, and scales fp32 [...] of rows x [..., D].

    A row with inf or NaN gets the scale NaN.
    """
    scale = scale_of(sizes_of(x), quantize)
    return codes_of(x, scale.unsqueeze(-1), quantize), scale


def sizes_of(x: Tensor) -> Tensor:
    """The largest magnitude of each row of x [..., D], fp32; NaN if a number is not finite."""
    x = x.to(torch.float32)
    # Non-finite numbers times 0 are NaN; finite ones add 0.
    return x.abs().amax(-1) + (x * 0).sum(-1)


def scale_of(sizes: Tensor, quantize: Quantize) -> Tensor:
    """The scales of numbers up to `sizes`."""
    # On a GPU torch divides by a number via its reciprocal, which rounds twice.
    largest = torch.full_like(sizes, _LARGEST_CODE[quantize])
    return torch.clamp(sizes / largest, min=_SMALLEST_SCALE)


def codes_of(x: Tensor, scale: Tensor, quantize: Quantize) -> Tensor:
    """The nearest codes of x / scale, which broadcasts to x."""
    ratio = x.to(torch.float32) / scale
    if quantize == "int8":
        return ratio.nan_to_num().round().to(torch.int8)
    return ratio.to(torch.float8_e4m3fn)


def codes_within(x: Tensor, scale: Tensor, quantize: Quantize) -> Tensor:
    """`codes_of` that saturates: x too large for the scale becomes the largest code."""
    largest = _LARGEST_CODE[quantize]
    ratio = (x.to(torch.float32) / scale).clamp(-largest, largest)
    return codes_of(ratio, torch.ones_like(scale), quantize)


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * codes, computed in fp32 and rounded once to `dtype`: [..., D] from scale [...].

    With a scale for each of some equal parts of a row, scale is [..., parts].
    """
    if scale.dim() < codes.dim():
        scale = scale.unsqueeze(-1)
    parts = torch.unflatten(codes.to(torch.float32), -1, (scale.shape[-1], -1))
    return (parts * scale.unsqueeze(-1)).flatten(-2).to(dtype)
