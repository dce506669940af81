"""Codes of heads and the Hopper forward in 8 bits: operators, and the short ways; see `ops`."""

import torch
from einops import rearrange
from torch import Tensor

from ..options import Options
from . import attention
from . import schema as op_schema


def why_not_hopper(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dtype: torch.dtype
) -> str | None:
    """Why the Hopper kernel cannot serve a call in 8 bits with o in `dtype`, or None.

    q, k, v: tensors of the call's shapes on its device, of any dtype.
    """
    if not attention.TRITON_INSTALLED:
        return "triton is not installed"
    if not attention.on_hopper(q.device):
        return "its kernels are written for GPUs of compute capability 9.0"
    from ..kernels.hopper.host import why_not_hopper_fp8

    return why_not_hopper_fp8(q, k, v, options, dtype)


def pack_by_torch(v: Tensor) -> Tensor:
    """What `kernels.fp8_values.launch_pack_values` does, for tensors that no kernel reads."""
    padded = torch.nn.functional.pad(v.view(torch.uint8), (0, 0, 0, -v.shape[2] % 16))
    packed = rearrange(
        padded, "b h (n half four two) d -> b h d (n four half two)", half=2, four=4, two=2
    )
    return packed.view(v.dtype)


def _pack(v: Tensor) -> Tensor:
    if not (v.is_cuda or attention.interpreting()):
        return pack_by_torch(v)
    attention._kernels()  # which repairs the interpreter, where there is one
    from ..kernels.fp8_values import launch_pack_values

    with attention._device_of(v):
        return launch_pack_values(v)


pack_values = torch.library.custom_op(
    "fastattn::pack_values", _pack, mutates_args=(), schema="(Tensor v) -> Tensor"
)


@pack_values.register_fake
def _(v: Tensor) -> Tensor:
    B, H, T, D = v.shape
    return v.new_empty(B, H, D, -(-T // 16) * 16)


def _quantize(x: Tensor, lengths: Tensor | None, packed: bool) -> tuple[Tensor, Tensor]:
    attention._kernels()
    from ..kernels.fp8_quantize import launch_head_codes

    with attention._device_of(x):
        return launch_head_codes(x, lengths, packed)


quantize_heads = torch.library.custom_op(
    "fastattn::quantize_heads",
    _quantize,
    mutates_args=(),
    schema="(Tensor x, Tensor? lengths, bool packed) -> (Tensor, Tensor)",
)


@quantize_heads.register_fake
def _(x: Tensor, lengths: Tensor | None, packed: bool) -> tuple[Tensor, Tensor]:
    B, H, T, D = x.shape
    scale = x.new_empty(B, H, dtype=torch.float32)
    if packed:
        return x.new_empty(B, H, D, -(-T // 16) * 16, dtype=torch.float8_e4m3fn), scale
    return attention._fake_in_layout(x, H, T, D).to(torch.float8_e4m3fn), scale


def has_kernel(x: Tensor) -> bool:
    """Whether `quantize` serves x [B, H, T, D] on its GPU."""
    narrow = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    fits = x.shape[3] % 16 == 0 and x.shape[3] <= attention.MAX_HEAD_DIM and x.numel() > 0
    return attention.TRITON_INSTALLED and x.is_cuda and narrow and fits


def quantize(x: Tensor, lengths: Tensor | None, packed: bool) -> tuple[Tensor, Tensor]:
    """Codes, packed or not, and scales of x [B, H, T, D]; see `kernels.fp8_quantize`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    traced = attention._may_be_traced(x)
    codes, scale = (quantize_heads if traced else _quantize)(x, lengths, packed)
    return codes, scale


def _forward(
    q: Tensor, k: Tensor, values: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    dtype: torch.dtype, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse; see `kernels.hopper.forward.launch_hopper_forward_fp8`."""
    from ..kernels.hopper.forward import launch_hopper_forward_fp8

    scales = (q_scale, k_scale, v_scale)
    with attention._device_of(q):
        return launch_hopper_forward_fp8(q, k, values, scales, dtype, options)


hopper_forward_fp8 = op_schema.operator(
    "hopper_forward_fp8",
    _forward,
    "Tensor q, Tensor k, Tensor values, Tensor q_scale, Tensor k_scale, Tensor v_scale, "
    "ScalarType dtype",
    "(Tensor, Tensor)",
)


@hopper_forward_fp8.register_fake
def _(
    q: Tensor, k: Tensor, values: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    dtype: torch.dtype, *_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H_q, T_q, D = q.shape
    o = attention._fake_in_layout(q, H_q, T_q, D)
    return o.to(dtype), q.new_empty(B, H_q, T_q, dtype=torch.float32)


def pack(v: Tensor) -> Tensor:
    """v [B, H, T, D] e4m3, D 64, 128 or 256, with its keys contiguous; see `kernels.fp8_values`."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    packed: Tensor = pack_values(v) if attention._may_be_traced(v) else _pack(v)
    return packed


def attend(
    q: Tensor, k: Tensor, values: Tensor, scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B, H_q, T_q, D] in `dtype` and lse, by the op where something traces, else directly.

    values: from `pack`. For calls of which `why_not_hopper` is None.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_scale, k_scale, v_scale = (x.contiguous() for x in scales)
    options = attention._in_order(options)
    if attention._may_be_traced(q):
        flat = op_schema.flat(options)
        o, lse = hopper_forward_fp8(q, k, values, q_scale, k_scale, v_scale, dtype, *flat)
        return o, lse
    return _forward(q, k, values, q_scale, k_scale, v_scale, dtype, options)
