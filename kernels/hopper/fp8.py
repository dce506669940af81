"""Forward in 8 bits: what differs from 16, the scales of heads and the range of weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_SMALLEST = gl.constexpr(2.0**-126)


@gluon.constexpr_function
def is_fp8(dtype):
    """Whether q, k and v are of 8 bits, with scales: the tiles of v are [D, BLOCK_N] then."""
    return dtype == gl.float8e4nv


@gluon.constexpr_function
def weight_shift(dtype):
    """Weights reach 2 to this power. e4m3 ends at 448, and what is far below is lost to it."""
    return 8 if is_fp8(dtype) else 0


@gluon.constexpr_function
def weight_slack(dtype, slack):
    """How much farther weights may reach, of what a configuration says: see `online_step`."""
    return 0 if is_fp8(dtype) else slack


@gluon.jit
def head_scales(scales, scale, tile, work):
    """The scale of a head's scores, that of its q and k counted, and the scale of its v."""
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scales
    H, G, b = work.H, work.G, tile.row.b
    of_keys = b * (H // G) + tile.h // G
    scale *= gl.load(q_scale_ptr + b * H + tile.h) * gl.load(k_scale_ptr + of_keys)
    # Two heads of zeros come to less than fp32 has, and 0 times -inf is NaN, as NaN should be.
    scale = gl.where(scale < _SMALLEST, _SMALLEST, scale)
    return scale, gl.load(v_scale_ptr + of_keys)
