"""8-bit codes of fp32 numbers and back, in arithmetic that every GPU has.

Rounding is to the nearest code, ties to even, bit for bit as torch's casts round. The conversion
instructions for e4m3 exist from sm_89 on only, and elsewhere round in other ways.
"""

import triton
import triton.language as tl

# Adding 1.5 * 2**23 leaves a number below 2**22 rounded to an integer in the lowest bits.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDING_BITS = tl.constexpr(0x4B400000)
# 2**14 has 2**-9, the step of e4m3's subnormal numbers, as its unit in the last place.
_SUBNORMAL = tl.constexpr(16384.0)
_SUBNORMAL_BITS = tl.constexpr(0x46800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def row_scale(x, LARGEST: tl.constexpr):
    """Scale of every row of x [R, C], fp32: absmax / LARGEST; NaN where a number is not finite."""
    # tl.max drops NaN; times zero, what is not finite is NaN, and all else adds nothing.
    absmax = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32))
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
def to_int8(x):
    """The nearest integer of every number in [-127, 127], int8."""
    return ((x + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """The e4m3 code of every number in [-448, 448], as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round the mantissa to 3 bits, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) + _SUBNORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    code = tl.where(tl.abs(x) < 2.0**-6, subnormal, tl.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """fp16 from uint8 codes, exact; the code of NaN reads as 480."""
    bits = code.to(tl.uint16)
    # The code's bits as those of an fp16 number: its exponent's bias is 8 too large.
    half = (((bits << 8) & 0x8000) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half * 256.0


@triton.jit
def key_at(place):
    """Which key's weight, and value, stands at a place of a product over keys in 8 bits on sm_90.

    After Q K^T a thread holds the scores of keys 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16, and as
    operand of the next product it gives four that stand side by side. Any order of keys will do
    that weights and values share. In this one those four stand side by side: no weight moves.
    """
    return (place & -16) | ((place & 12) >> 1) | ((place & 2) << 2) | (place & 1)
