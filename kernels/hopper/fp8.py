"""FP8 forward: differences from 16 bits, the scales of heads and the range of weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_SMALLEST = gl.constexpr(2.0**-126)


@gluon.constexpr_function
def is_fp8(dtype):
    """Whether q, k and v are 8-bit with scales; tiles of v are then [D, BLOCK_N]."""
    return dtype == gl.float8e4nv


@gluon.constexpr_function
def weight_shift(dtype):
    """Weights reach 2 to this power, as e4m3 covers only a limited range below 448."""
    return 8 if is_fp8(dtype) else 0


@gluon.constexpr_function
def weight_slack(dtype, slack):
    """SLACK of `online_step`, as far as the dtype permits."""
    return 0 if is_fp8(dtype) else slack


@gluon.jit
def head_scales(scales, scale, tile, work):
    """Scale of a head's scores, including q's and k's, and the scale of its v."""
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scales
    H, G, b = work.H, work.G, tile.row.b
    of_keys = b * (H // G) + tile.h // G
    scale *= gl.load(q_scale_ptr + b * H + tile.h) * gl.load(k_scale_ptr + of_keys)
    # The scales of two zero heads multiply to 0 in fp32, and 0 times -inf is NaN. NaN stays NaN.
    scale = gl.where(scale < _SMALLEST, _SMALLEST, scale)
    return scale, gl.load(v_scale_ptr + of_keys)
