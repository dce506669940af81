"""8-bit codes: int8, or e4m3 as uint8. Of fp32 numbers, and as the numbers that products take.

A number becomes the nearest code, ties to even, bit for bit as torch's casts round, in arithmetic
that every GPU has: the conversion instructions for e4m3 exist from sm_89 on only, and elsewhere
round in other ways. A code becomes a number exactly.

Of a cache in 8 bits, decoding reads half the bytes, so that the instructions a code takes decide
its speed. Codes are loaded two side by side as one 16-bit number: as such matrix loads bring them
to where a product wants them, values transposed, and a register holds four, columns 2c and 2c + 1
of two keys. They become numbers there, in two registers: one for the product with the even columns
and one for that with the odd ones. Numbers of either kind fit into fp16, in fewer instructions than
into bf16, so that is what products take where queries have 16 bits: the queries are scaled to its
range, and weights with the scales of values in them by `lift_of`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .product import add_weighted_rows, rows_by_rows
from .tile import load_at

# Adding 1.5 * 2**23 leaves a number below 2**22 rounded to an integer in the lowest bits.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDING_BITS = tl.constexpr(0x4B400000)
# 2**14 has 2**-9, the step of e4m3's subnormal numbers, as its unit in the last place.
_SUBNORMAL = tl.constexpr(16384.0)
_SUBNORMAL_BITS = tl.constexpr(0x46800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
# Four codes in; those of even columns out, and those of odd ones.
_FOUR = tl.constexpr("=r,=r,r")
# A byte below 0x64 is 1024 + u in fp16, and u = c + 128 is the code with its top bit turned.
INT8_TO_RAISED = tl.constexpr("""{
    .reg .b32 upper, offset;
    mov.b32 offset, 0x64806480;
    lop3.b32 $0, $2, 0x00ff00ff, offset, 0x6a;
    shr.b32 upper, $2, 8;
    lop3.b32 $1, upper, 0x00ff00ff, offset, 0x6a;
}""")
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 upper, even, odd, offset;
    mov.b32 offset, 0x64806480;
    lop3.b32 even, $2, 0x00ff00ff, offset, 0x6a;
    shr.b32 upper, $2, 8;
    lop3.b32 odd, upper, 0x00ff00ff, offset, 0x6a;
    sub.rn.f16x2 $0, even, offset;
    sub.rn.f16x2 $1, odd, offset;
}""")
# What is added to a code in the numbers of INT8_TO_RAISED: 0x6480 in fp16.
RAISED_BY = tl.constexpr(1152.0)
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# For GPUs without that conversion: see `from_e4m3`.
E4M3_BITS_TO_FP16 = tl.constexpr("""{
    .reg .b32 moved, sign, even, odd, factor;
    mov.b32 factor, 0x5c005c00;
    shl.b32 moved, $2, 7;
    and.b32 even, moved, 0x3f803f80;
    shl.b32 sign, $2, 8;
    lop3.b32 even, sign, 0x80008000, even, 0xea;
    shr.b32 moved, $2, 1;
    and.b32 odd, moved, 0x3f803f80;
    lop3.b32 odd, $2, 0x80008000, odd, 0xea;
    mul.rn.f16x2 $0, even, factor;
    mul.rn.f16x2 $1, odd, factor;
}""")
_TWO_FP16 = tl.constexpr((tl.float16, tl.float16))
# Weights with the scales of values in them are at most about this power of two.
_LARGEST_WEIGHT = tl.constexpr(12)
# What rows know before any key, they know this many powers of two above their maximum.
_BEHIND = tl.constexpr(100)


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


class Queries(NamedTuple):
    """A tile of queries for products with codes.

    even, odd [M, D / 2]: its columns; of 16 bits, as fp16 whose largest is near that type's.
    start [M]: what sums of products with raised codes begin with, to end as those with codes.
    unit: what one in them stands for.
    """

    even: Any
    odd: Any
    start: Any
    unit: Any


@triton.jit
def numbers_of(pairs, INT8: tl.constexpr, RAISED: tl.constexpr, NVIDIA: tl.constexpr):
    """Numbers of even and of odd columns, fp16 [N, C] each, from codes int16 [N, C].

    RAISED: int8 codes plus RAISED_BY, which spares subtracting it. NVIDIA: the GPU's compute
    capability, as 89, where it is NVIDIA's, else 0.
    """
    if NVIDIA > 0:
        # The first that converts e4m3 by itself is sm_89.
        E4M3: tl.constexpr = E4M3_TO_FP16 if NVIDIA >= 89 else E4M3_BITS_TO_FP16
        EIGHT: tl.constexpr = INT8_TO_RAISED if RAISED else INT8_TO_FP16
        ASSEMBLY: tl.constexpr = EIGHT if INT8 else E4M3
        even, odd = tl.inline_asm_elementwise(ASSEMBLY, _FOUR, [pairs], _TWO_FP16, True, 2)
    else:
        even = pairs & 0xFF
        odd = (pairs >> 8) & 0xFF
        if INT8:
            even = (even ^ 0x6480).to(tl.float16, bitcast=True)
            odd = (odd ^ 0x6480).to(tl.float16, bitcast=True)
            if not RAISED:
                even -= RAISED_BY
                odd -= RAISED_BY
        else:
            even = from_e4m3(even)
            odd = from_e4m3(odd)
    return even, odd


@triton.jit
def _largest(x):
    """The largest finite magnitude in a tile, fp32."""
    x = tl.abs(x.to(tl.float32))
    return tl.max(tl.max(tl.where(x < float("inf"), x, 0.0), 1), 0)


@triton.jit
def queries_for_codes(
    pointers, in_rows, COLS: tl.constexpr, WIDTH: tl.constexpr, RAISED: tl.constexpr
):
    """`Queries` of the rows that begin at pointers [M, 1]; COLS and WIDTH as in `load_tile`."""
    HALF: tl.constexpr = COLS // 2
    pointers = pointers + 2 * tl.arange(0, HALF)[None, :]
    even = load_at(pointers, in_rows, HALF, (WIDTH + 1) // 2)
    odd = load_at(pointers + 1, in_rows, HALF, WIDTH // 2)
    unit = 1.0
    start = tl.zeros([even.shape[0]], tl.float32)
    if even.dtype != tl.float32:
        # A power of two takes the largest to 2^14 .. 2^15: bf16 keeps its bits in 32 powers below.
        largest = tl.maximum(_largest(even), _largest(odd))
        exponent = tl.minimum(268 - (largest.to(tl.int32, bitcast=True) >> 23), 253)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        even = (even.to(tl.float32) * factor).to(tl.float16)
        odd = (odd.to(tl.float32) * factor).to(tl.float16)
        if RAISED:
            total = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
            start = total * -RAISED_BY
    return Queries(even, odd, start, unit)


@triton.jit
def scores_of_codes(
    q, pairs, INT8: tl.constexpr, RAISED: tl.constexpr, PRECISION: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """Scores fp32 [M, N] in `q.unit` of codes int16 [N, C], whose keys' scales are not in them."""
    even, odd = numbers_of(pairs, INT8, RAISED, NVIDIA)
    if RAISED:
        s = tl.broadcast_to(q.start[:, None], q.even.shape[0], pairs.shape[0])
        s = tl.dot(q.even, tl.trans(even), s)
        s = tl.dot(q.odd, tl.trans(odd), s)
    elif q.even.dtype == tl.float32:
        s = rows_by_rows(q.even, even.to(tl.float32), PRECISION)
        s += rows_by_rows(q.odd, odd.to(tl.float32), PRECISION)
    else:
        s = tl.dot(q.even, tl.trans(even))
        s = tl.dot(q.odd, tl.trans(odd), s)
    return s


@triton.jit
def add_weighted_codes(
    acc, weights, pairs, DTYPE: tl.constexpr, INT8: tl.constexpr, PRECISION: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """acc, of even and of odd columns, + weights codes. DTYPE: that of `Queries`."""
    even, odd = numbers_of(pairs, INT8, False, NVIDIA)
    return (
        add_weighted_rows(acc[0], weights, even.to(DTYPE), PRECISION),
        add_weighted_rows(acc[1], weights, odd.to(DTYPE), PRECISION),
    )


@triton.jit
def lift_of(scale):
    """Lift of keys in log2 units, from the scales of values, when the maximum of a row is taken.

    It makes weights times scales at most 2^12, however small or large the scales are: fp16 then has
    all bits of numbers above 2^-26 of the largest. The logarithm is below the exact one by at most
    0.09: the bits of the scale, as an integer, count powers of two and are linear between them.
    """
    bits = scale.to(tl.int32, bitcast=True).to(tl.float32)
    return bits * 2.0**-23 - (127.0 + _LARGEST_WEIGHT)


@triton.jit
def far_behind(m, l):
    """The state before any key with m so low that `lift_of` places it by the keys."""
    return m - _BEHIND, l * 2.0**_BEHIND
