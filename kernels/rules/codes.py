"""8-bit codes as the numbers that products take: int8, or e4m3 as uint8. Every result is exact.

Of a cache in 8 bits, decoding reads half the bytes, so that the instructions a code takes decide
its speed. Compilers spend a slow conversion on each number, and read values by the byte since a
product wants pairs of keys side by side. Here four codes are a register from memory on, and become
numbers two at a time; they go through shared memory once more, as 16-bit numbers, which matrix
loads can transpose. That they do it before the product and not as part of it is why the
assembly is not called pure: the compiler would move what is pure behind the transposition.
"""

import triton
import triton.language as tl

from .quantize import from_e4m3

# Four codes in, four numbers out.
_FOUR = tl.constexpr("=r,=r,r")
# A byte below 0x43 is 128 + c in bf16, where c has 7 bits; its own top bit, worth -128 in a code,
# is there the lowest of the exponent: of 0x43 and the top bit alone it makes 128 or 256. So the
# code is the number of the lower bits less that of the top bit.
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, high, bits, top, minus_one;
    mov.b32 minus_one, 0xbf80bf80;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    and.b32 bits, low, 0xff7fff7f;
    and.b32 top, low, 0xff80ff80;
    fma.rn.bf16x2 $0, top, minus_one, bits;
    and.b32 bits, high, 0xff7fff7f;
    and.b32 top, high, 0xff80ff80;
    fma.rn.bf16x2 $1, top, minus_one, bits;
}""")
# A byte below 0x64 is 1024 + u in fp16, and u = c + 128 is the code with its top bit turned.
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 turned, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 turned, $2, 0x80808080;
    prmt.b32 low, turned, 0x64646464, 0x4140;
    prmt.b32 high, turned, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, low, offset;
    sub.rn.f16x2 $1, high, offset;
}""")
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# From fp16 to bf16 there is a slow conversion, by way of fp32 two fast ones.
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b16 low, high, first, second;
    .reg .b32 pair;
    .reg .f32 x, y;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {first, second}, pair;
    cvt.f32.f16 x, first;
    cvt.f32.f16 y, second;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {first, second}, pair;
    cvt.f32.f16 x, first;
    cvt.f32.f16 y, second;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")


@triton.jit
def numbers_of(codes, DTYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """Codes in DTYPE.

    NVIDIA: the GPU's compute capability, as 89, where it is NVIDIA's, else 0.
    """
    BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if codes.dtype == tl.uint8:
        if NVIDIA < 89:  # the first that converts e4m3 by itself
            numbers = from_e4m3(codes)
        elif BF16:
            numbers = tl.inline_asm_elementwise(E4M3_TO_BF16, _FOUR, [codes], tl.bfloat16, False, 4)
        else:
            numbers = tl.inline_asm_elementwise(E4M3_TO_FP16, _FOUR, [codes], tl.float16, False, 4)
    elif NVIDIA < 80:  # the first with arithmetic of bf16
        numbers = codes
    elif BF16:
        numbers = tl.inline_asm_elementwise(INT8_TO_BF16, _FOUR, [codes], tl.bfloat16, False, 4)
    else:
        numbers = tl.inline_asm_elementwise(INT8_TO_FP16, _FOUR, [codes], tl.float16, False, 4)
    return numbers.to(DTYPE)
