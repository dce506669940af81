"""8-bit codes, int8 or e4m3 as uint8: quantise fp32, and convert codes for products.

A number becomes the nearest code, ties to even, bitwise as in torch, in arithmetic of every GPU:
conversion instructions for e4m3 exist only from sm_89 on, and some round differently. A code
converts to a number exactly.

Decoding from an 8-bit cache reads half the bytes, so the instructions per code determine its speed.
Codes are loaded in pairs as 16-bit numbers, which matrix loads distribute for a product (values
transposed); a register holds four, columns 2c and 2c + 1 of two keys. They are converted there, to
a register for the product with the even columns and one for the odd columns. Both kinds of codes
fit in fp16, in fewer instructions than in bf16. So with 16-bit queries products are in fp16:
queries are scaled to its range, and weights times the scales of values by `lift_of`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .product import add_weighted_rows, rows_by_rows
from .tile import load_at

# Adding 1.5 * 2**23 rounds a number below 2**22 to an integer in the lowest bits.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDING_BITS = tl.constexpr(0x4B400000)
# The unit in the last place of 2**14 is 2**-9, the step of e4m3's subnormals.
_SUBNORMAL = tl.constexpr(16384.0)
_SUBNORMAL_BITS = tl.constexpr(0x46800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
# Input: four codes; outputs: even columns and odd columns.
_FOUR = tl.constexpr("=r,=r,r")
# The bytes 0x64, u are 1024 + u in fp16, and u = c + 128 is the code with its top bit flipped.
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
# Offset of codes in the numbers of INT8_TO_RAISED: 0x6480 in fp16.
RAISED_BY = tl.constexpr(1152.0)
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# For GPUs without that instruction: see `from_e4m3`.
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
# Weights times scales of values are at most about this power of two.
_LARGEST_WEIGHT = tl.constexpr(12)
# The initial state of rows is this many powers of two above their maximum.
_BEHIND = tl.constexpr(100)


@triton.jit
def row_scale(x, LARGEST: tl.constexpr):
    """Scale of every row of x [R, C], fp32: absmax / LARGEST; NaN where a number is not finite."""
    # tl.max drops NaN; adding x * 0 propagates NaN and infinity.
    absmax = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32))
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
def to_int8(x):
    """Round numbers in [-127, 127] to int8."""
    return ((x + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """Round numbers in [-448, 448] to e4m3 codes, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round the mantissa to 3 bits, then change the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) + _SUBNORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    code = tl.where(tl.abs(x) < 2.0**-6, subnormal, tl.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """fp16 from uint8 codes, exact; the code of NaN reads as 480."""
    bits = code.to(tl.uint16)
    # Interpreted as fp16, the code's exponent bias is 8 too large.
    half = (((bits << 8) & 0x8000) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half * 256.0


@triton.jit
def key_at(index):
    """Key at a position of the summed dim of an FP8 product on sm_90."""
    # After Q K^T a thread holds the scores of keys 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16, but
    # as operand of the next product it needs four adjacent ones. In this order these four are
    # adjacent, so that no weight moves between threads.
    return (index & -16) | ((index & 12) >> 1) | ((index & 2) << 2) | (index & 1)


class Queries(NamedTuple):
    """A tile of queries for products with codes.

    even, odd [M, D / 2]: its columns; for 16-bit queries scaled to fp16's range. start [M]: initial
    sums that cancel the offset of raised codes. unit: scale of the sums.
    """

    even: Any
    odd: Any
    start: Any
    unit: Any


@triton.jit
def numbers_of(pairs, INT8: tl.constexpr, RAISED: tl.constexpr, NVIDIA: tl.constexpr):
    """Convert pairs of codes int16 [N, C] to even and odd columns, fp16 [N, C] each.

    RAISED: keep the offset RAISED_BY of int8 codes, to save the subtraction. NVIDIA: the compute
    capability, such as 89; 0 for other GPUs.
    """
    if NVIDIA > 0:
        # sm_89 is the first with an e4m3 conversion.
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
    """Largest finite magnitude of a tile, fp32."""
    x = tl.abs(x.to(tl.float32))
    return tl.max(tl.max(tl.where(x < float("inf"), x, 0.0), 1), 0)


@triton.jit
def queries_for_codes(
    pointers, in_rows, COLS: tl.constexpr, WIDTH: tl.constexpr, RAISED: tl.constexpr
):
    """`Queries` of the rows at pointers [M, 1]; COLS and WIDTH as in `load_tile`."""
    HALF: tl.constexpr = COLS // 2
    pointers = pointers + 2 * tl.arange(0, HALF)[None, :]
    even = load_at(pointers, in_rows, HALF, (WIDTH + 1) // 2)
    odd = load_at(pointers + 1, in_rows, HALF, WIDTH // 2)
    unit = 1.0
    start = tl.zeros([even.shape[0]], tl.float32)
    if even.dtype != tl.float32:
        # A power of two scales the largest to 2^14 .. 2^15; bf16 stays exact for 32 powers below.
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
def scores_of_codes(q, pairs, const: tl.constexpr):
    """Scores fp32 [M, N], in `q.unit` and without scales of keys, from codes int16 [N, C]."""
    PRECISION: tl.constexpr = const.PRECISION
    even, odd = numbers_of(pairs, const.INT8, const.RAISED, const.NVIDIA)
    if const.RAISED:
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
def add_weighted_codes(acc, weights, pairs, DTYPE: tl.constexpr, const: tl.constexpr):
    """acc (even and odd columns) + weights @ codes. DTYPE: of `Queries`."""
    PRECISION: tl.constexpr = const.PRECISION
    even, odd = numbers_of(pairs, const.INT8, False, const.NVIDIA)
    return (
        add_weighted_rows(acc[0], weights, even.to(DTYPE), PRECISION),
        add_weighted_rows(acc[1], weights, odd.to(DTYPE), PRECISION),
    )


@triton.jit
def queries_by_groups(
    pointers, in_rows, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr
):
    """`Queries` of GROUPS parts of WIDTH columns, for keys that have a scale for each."""
    GROUPS: tl.constexpr = const.GROUPS
    queries = ()
    for g in tl.static_range(GROUPS):
        part = queries_for_codes(pointers + g * WIDTH, in_rows, COLS, WIDTH, const.RAISED)
        queries = queries + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@triton.jit
def group_of(q, g: tl.constexpr):
    """`Queries` of group g of `queries_by_groups`; in a tuple Triton 3.6 loses fields' names."""
    return Queries(q[g][0], q[g][1], q[g][2], q[g][3])


@triton.jit
def scores_of_groups(q, codes, scales, const: tl.constexpr):
    """Scores fp32 [M, N] of keys by groups, their scales and `Queries.unit` in them."""
    GROUPS: tl.constexpr = const.GROUPS
    of_group = group_of(q, 0)
    s = scores_of_codes(of_group, codes[0], const)
    s = s * (of_group.unit * scales[0])[None, :]
    for g in tl.static_range(1, GROUPS):
        of_group = group_of(q, g)
        part = scores_of_codes(of_group, codes[g], const)
        s += part * (of_group.unit * scales[g])[None, :]
    return s


@triton.jit
def add_weighted_groups(
    acc, rescale, weights, codes, scales, DTYPE: tl.constexpr, const: tl.constexpr
):
    """acc rescale + weights codes of each group; see `add_weighted_codes`."""
    GROUPS: tl.constexpr = const.GROUPS
    sums = ()
    for g in tl.static_range(GROUPS):
        part = (acc[g][0] * rescale[:, None], acc[g][1] * rescale[:, None])
        p = weights * scales[g][None, :]
        part = add_weighted_codes(part, p, codes[g], DTYPE, const)
        sums = sums + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def largest_of(scales, GROUPS: tl.constexpr):
    """The largest scale of each row by groups."""
    largest = scales[0]
    for g in tl.static_range(1, GROUPS):
        largest = tl.maximum(largest, scales[g])
    return largest


@triton.jit
def lift_of(scale):
    """Lift of scores, in log2 units, from the scales of values, for the row maximum."""
    # Bounds weights times scales by 2^12, so that fp16 is exact down to 2^-26 of the largest. The
    # logarithm, from the scale's bits, is linear between powers of two, at most 0.09 too small.
    bits = scale.to(tl.int32, bitcast=True).to(tl.float32)
    return bits * 2.0**-23 - (127.0 + _LARGEST_WEIGHT)


@triton.jit
def far_behind(m, l):
    """The initial state with m so low that keys determine it despite `lift_of`."""
    return m - _BEHIND, l * 2.0**_BEHIND
