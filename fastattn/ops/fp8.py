"""FP8 operators: quantised heads, packed values, the Hopper forward."""

import torch
from torch import Tensor

from .. import kernels
from ..options import Options
from ..position_tables import document_ids
from . import call, flops
from .call import fake_in_layout, fake_output, operator


def packed_length(T: int, cu_seqlens: Tensor | None) -> int:
    """Length of packed values: multiples of 16, with gaps between packed sequences."""
    if cu_seqlens is None:
        return -(-T // 16) * 16
    sequences = cu_seqlens.shape[0] - 1
    return 16 * (T // 16 + sequences) if T and sequences else 0


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [total]: packed sequence of each row, -1 for rows of none."""
    return document_ids(cu_seqlens, total)[0].long()


def places_of_packed(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [total]: places of packed keys in `kernels.fp8_values`; the end for those of none."""
    ids = sequence_of_rows(cu_seqlens, total)
    starts = cu_seqlens.long()[ids]
    places = torch.arange(total, device=ids.device) - starts + (starts // 16 + ids) * 16
    return torch.where(ids < 0, packed_length(total, cu_seqlens), places)


def pack_by_torch(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Pack values like `kernels.fp8.values.launch_pack_values`, for tensors no kernel can read."""
    B, H, T, D = v.shape
    length = packed_length(T, cu_seqlens)
    padded = v.new_zeros(B, H, length + 1, D, dtype=torch.uint8)
    places = slice(0, T) if cu_seqlens is None else places_of_packed(cu_seqlens, T)
    padded[:, :, places] = v.view(torch.uint8)
    padded = padded[:, :, :length]
    # Rows n, half, four, two become columns n, four, half, two.
    rows = padded.reshape(B, H, length // 16, 2, 4, 2, D)
    return rows.permute(0, 1, 6, 2, 4, 3, 5).flatten(3).view(v.dtype)


@operator(flops.nothing)
def pack_values(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """See `kernels.fp8.values.launch_pack_values`."""
    if not (v.is_cuda or call.interpreting()):
        return pack_by_torch(v, cu_seqlens)
    return kernels.fp8_values.launch_pack_values(v, cu_seqlens)


@pack_values.op.register_fake
def _(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    B, H, T, D = v.shape
    return v.new_empty(B, H, D, packed_length(T, cu_seqlens))


@operator(flops.nothing)
def quantize_heads(
    x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor]:
    """See `kernels.fp8.quantize.launch_head_codes`."""
    return kernels.fp8_quantize.launch_head_codes(x, lengths, cu_seqlens, packed)


@quantize_heads.op.register_fake
def _(
    x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor]:
    B, H, T, D = x.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scale = x.new_empty(rows, H, dtype=torch.float32)
    if packed:
        length = packed_length(T, cu_seqlens)
        return x.new_empty(B, H, D, length, dtype=torch.float8_e4m3fn), scale
    return fake_in_layout(x, H, T, D).to(torch.float8_e4m3fn), scale


def quantize(
    x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor]:
    """Codes, packed or not, and scales of x [B, H, T, D]; see `kernels.fp8.quantize`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    lengths, cu_seqlens = (y if y is None else y.contiguous() for y in (lengths, cu_seqlens))
    return quantize_heads(x, lengths, cu_seqlens, packed)


@operator(flops.attended(1, 1))
def hopper_forward_fp8(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    dtype: torch.dtype,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o and lse; see `kernels.hopper.forward.launch_hopper_forward_fp8`."""
    scales = (q_scale, k_scale, v_scale)
    launch = kernels.hopper_forward.launch_hopper_forward_fp8
    return call.by_shipped_shapes(launch, q, k, values, scales, dtype, options)


@hopper_forward_fp8.op.register_fake
def _(q: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    dtype = next(x for x in arguments if isinstance(x, torch.dtype))
    o, lse = fake_output(q, q.shape[3])
    return o.to(dtype), lse


def pack(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Pack v [B, H, T, D] e4m3, D 64, 128 or 256, along keys; see `kernels.fp8_values`."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    return pack_values(v, None if cu_seqlens is None else cu_seqlens.contiguous())


def attend(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D] in `dtype` and lse; values: from `pack`; if not `why_not_hopper_fp8`."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_scale, k_scale, v_scale = (x.contiguous() for x in scales)
    return hopper_forward_fp8(q, k, values, q_scale, k_scale, v_scale, dtype, options)
