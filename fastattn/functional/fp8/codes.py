"""Quantise heads to e4m3 with a scale each, and pack values for the Hopper kernel."""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ... import checks, dispatch, tracing
from ...ops import fp8
from ...ops.gradients import as_batch, as_packed
from ...quantization import codes_of, scale_of, sizes_of

E4M3 = torch.float8_e4m3fn
_PACKED_HEAD_DIMS = (64, 128, 256)


class PackedValues(NamedTuple):
    """Values in the Hopper kernel's memory order, from `pack_values`.

    Attributes:
        codes: [B, H_k, D, T] e4m3, T_k rounded up to a multiple of 16, with keys in the order 0 1 8
            9, 2 3 10 11, 4 5 12 13, 6 7 14 15 within every 16. Packed sequences are a batch of one,
            and sequence n begins at group cu_seqlens[n] // 16 + n of 16 keys.
        length: T_k, or total_k for packed sequences.
    """

    codes: Tensor
    length: int


@overload
def quantize_fp8(
    x: Tensor, lengths: Tensor | None = ..., *, cu_seqlens: Tensor | None = ...,
    packed: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def quantize_fp8(
    x: Tensor, lengths: Tensor | None = ..., *, cu_seqlens: Tensor | None = ...,
    packed: Literal[True],
) -> tuple[PackedValues, Tensor]: ...  # fmt: skip
def quantize_fp8(
    x: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    packed: bool = False,
) -> tuple[Tensor | PackedValues, Tensor]:
    """Quantise x to e4m3 with one scale per head, so that x is about scale * codes.

    On a GPU a kernel reads x twice and writes codes once, bitwise equal to torch's. It serves head
    dims that are multiples of 16; torch serves float64 and other head dims.

    Args:
        x: [B, H, T, D], any float dtype, any strides; with cu_seqlens [total, H, D].
        lengths: int32 or int64 [B]: only the first lengths[b] tokens of batch row b count. The
            codes of the others are 0.
        cu_seqlens: int32 or int64 [N + 1] on x's device, non-decreasing from 0 to at most total:
            offsets of N packed sequences, which replace batch rows.
        packed: return codes as `pack_values`, without its extra pass; D 64, 128 or 256.

    Returns:
        codes, float8_e4m3fn in x's shape and memory order, or `PackedValues`, and scale fp32 [B, H]
        or [N, H]: the largest magnitude over 448. |x - scale * codes| <= max(|x| / 16, scale /
        1024). A head with inf or NaN gets the scale NaN, which `attention_fp8` refuses on the CPU;
        without tokens all scales are 1.

    Raises:
        TypeError, ValueError: x is no float tensor of four dims, or three with cu_seqlens, or
            lengths or cu_seqlens do not fit.
        RuntimeError: x requires grad while grad mode is on.
    """
    packed = checks.check_flag("packed", packed)
    checks.check_input("x", x, "float", _dims(cu_seqlens is not None), x, {})
    rows = _count_rows(x, cu_seqlens)
    if lengths is not None:
        checks.check_input("lengths", lengths, "integer", "B", x, {"B": rows})
    if packed:
        _check_packed_head_dim("x", x)
    if torch.is_grad_enabled() and tracing.wants_gradient(x):
        raise RuntimeError(
            "quantize_fp8 has no gradient, but x requires one: call it under torch.no_grad(), or "
            "pass x.detach()"
        )
    x = x.detach()
    if dispatch.quantizes(x):
        batch = _batch(x, cu_seqlens)
        codes, scale = fp8.quantize(batch, lengths, cu_seqlens, packed)
        if packed:
            return PackedValues(codes, batch.shape[2]), scale
        return codes if cu_seqlens is None else as_packed(codes), scale
    codes, scale = quantize_by_torch(x, lengths, cu_seqlens)
    return (pack_values(codes, cu_seqlens) if packed else codes), scale


def quantize_by_torch(
    x: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` in torch."""
    N, H = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x.shape[1]
    if x.numel() == 0:
        return x.to(E4M3), x.new_ones(N, H, dtype=torch.float32)
    if cu_seqlens is not None:
        return _quantize_sequences(x, lengths, cu_seqlens)
    if lengths is not None:
        exists = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        x = torch.where(exists[:, None, :, None], x, 0)
    scale = scale_of(sizes_of(x.flatten(2)), "fp8")
    return _in_order(x, codes_of(x, scale[..., None, None], "fp8")), scale


def _quantize_sequences(
    x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantise packed sequences: codes [total, H, D] and scales [N, H]."""
    ids = fp8.sequence_of_rows(cu_seqlens, x.shape[0])
    x = torch.where((ids < 0)[:, None, None], 0, x)
    ids = ids.clamp(min=0)
    if lengths is not None:
        position = torch.arange(x.shape[0], device=x.device) - cu_seqlens[ids]
        x = torch.where((position < lengths[ids])[:, None, None], x, 0)
    sizes = sizes_of(x)
    largest = sizes.new_zeros(cu_seqlens.shape[0] - 1, x.shape[1])
    largest = largest.scatter_reduce(0, ids[:, None].expand_as(sizes), sizes, "amax")
    scale = scale_of(largest, "fp8")
    return _in_order(x, codes_of(x, scale[ids][..., None], "fp8")), scale


def _in_order(x: Tensor, codes: Tensor) -> Tensor:
    """codes in the memory order of x, as from the kernel."""
    return torch.empty_like(x, dtype=E4M3).copy_(codes)


def pack_values(v: Tensor, cu_seqlens: Tensor | None = None) -> PackedValues:
    """Pack v for the Hopper kernel, for several calls with the same v.

    Otherwise `attention_fp8` and `attention_varlen_fp8` do so in every call on Hopper.

    Args:
        v: [B, H_k, T_k, D] float8_e4m3fn, D 64, 128 or 256, any strides; with cu_seqlens
            [total_k, H_k, D].
        cu_seqlens: int32 or int64 [N + 1] on v's device, non-decreasing from 0 to at most total_k:
            cu_seqlens_k of later calls of `attention_varlen_fp8`.

    Raises:
        TypeError, ValueError: v is not e4m3, or has another shape; cu_seqlens do not fit.
    """
    check_codes("v", v, cu_seqlens is not None)
    _count_rows(v, cu_seqlens)
    _check_packed_head_dim("v", v)
    rows = _batch(v, cu_seqlens)
    # The interpreted kernel is opt-in, as torch is faster.
    packed = fp8.pack_by_torch(rows, cu_seqlens) if v.is_cpu else fp8.pack(rows, cu_seqlens)
    return PackedValues(packed, rows.shape[2])


def viewed(values: PackedValues, sequences: bool) -> Tensor:
    """View packed values in v's shape, [total_k, H_k, D] of sequences, but not in its order."""
    rows = values.codes.mT[:, :, : values.length]
    return as_packed(rows) if sequences else rows


def unpacked(values: PackedValues, cu_seqlens: Tensor | None = None) -> Tensor:
    """Inverse of `pack_values`: v [B, H_k, T_k, D], or [total_k, H_k, D]."""
    codes = values.codes.view(torch.uint8)
    *others, columns = codes.shape
    v = codes.view(*others, columns // 16, 4, 2, 2).permute(0, 1, 3, 5, 4, 6, 2).flatten(2, 5)
    if cu_seqlens is None:
        return v[:, :, : values.length].view(E4M3)
    v = torch.nn.functional.pad(v, (0, 0, 0, 1))  # for the rows of no sequence
    return as_packed(v[:, :, fp8.places_of_packed(cu_seqlens, values.length)]).view(E4M3)


def dequantized(
    codes: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """scale * codes, rounded once to dtype."""
    if scale is None:
        return codes.to(dtype)
    if cu_seqlens is None:
        factors = scale[..., None, None]
    else:
        factors = scale[fp8.sequence_of_rows(cu_seqlens, codes.shape[0])][..., None]
    return (codes.to(torch.float32) * factors).to(dtype)


def _batch(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x if cu_seqlens is None else as_batch(x)


def _count_rows(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of batch rows or packed sequences of x; checks the offsets."""
    if cu_seqlens is None:
        return x.shape[0]
    checks.check_offsets("cu_seqlens", cu_seqlens, x.shape[0], x)
    return cu_seqlens.shape[0] - 1


def check_codes(name: str, x: Tensor, in_sequences: bool) -> None:
    """Check that x is e4m3 [B, H, T, D], or packed [total, H, D]."""
    checks.check_input(name, x, "float8_e4m3fn", _dims(in_sequences), x, {})


def _dims(in_sequences: bool) -> str:
    return "total H D" if in_sequences else "B H T D"


def _check_packed_head_dim(name: str, x: Tensor) -> None:
    if x.shape[-1] not in _PACKED_HEAD_DIMS:
        served = ", ".join(map(str, _PACKED_HEAD_DIMS))
        raise ValueError(f"{name} must have a head dim of {served} to be packed, got {x.shape[-1]}")
