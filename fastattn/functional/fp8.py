"""Attention in 8 bits: e4m3 queries, keys and values with a scale a head. Forward only.

    o_i = sum_j w_ij v_scale v_j,    w_i = softmax_j(scale * q_scale * k_scale * q_i . k_j)

An extra beside exact attention, with half the bytes and on Hopper twice the rate of the tensor
cores. What it costs in accuracy, beside that of the e4m3 inputs themselves: where the products run
in 8 bits the weights are rounded to e4m3 as well. They are scaled so that the largest of a row
stands at 2^8 at most, by the maximum of the keys met so far, and with u = 2^-4, e4m3's half unit
in the last place, and 2^-10, half the step of its subnormal numbers,

    |o_i - exact| <= sum_j (u w_ij + 2^-18 max_j w_ij) |v_scale v_j|   over the visible keys,

a sink's weight counted in the maximum, plus what 16-bit attention errs by, too. lse is not
affected: sums take weights before rounding. Hopper's tensor cores add up products in 8 bits with
about 14 bits (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2):
a further 2^-13 or so of the sum in every instruction of 32 columns or keys. The kernel leaves it at
that: the remedy, sums moved on to other registers at intervals, takes registers that it has not.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from einops import rearrange
from torch import Tensor

from .. import checks, dispatch
from ..dispatch import Explanation
from ..ops import fp8
from ..options import Options
from ..quantization import quantize_rows
from . import attend, call_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import Fp8Arguments

E4M3 = torch.float8_e4m3fn
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PACKED_HEAD_DIMS = (64, 128, 256)


class PackedValues(NamedTuple):
    """Values in the memory order of the Hopper kernel; made by `pack_values`.

    Attributes:
        codes: [B, H_k, D, T] e4m3, T_k rounded up to whole sixteens, whose keys stand in the order
            0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15 within every 16.
        length: T_k.
    """

    codes: Tensor
    length: int


@overload
def quantize_fp8(
    x: Tensor, lengths: Tensor | None = ..., *, packed: Literal[False] = ...
) -> tuple[Tensor, Tensor]: ...
@overload
def quantize_fp8(
    x: Tensor, lengths: Tensor | None = ..., *, packed: Literal[True]
) -> tuple[PackedValues, Tensor]: ...
def quantize_fp8(
    x: Tensor, lengths: Tensor | None = None, *, packed: bool = False
) -> tuple[Tensor | PackedValues, Tensor]:
    """e4m3 codes of x with one scale for each head, so that x is about scale * codes.

    On a GPU a kernel reads x twice and writes codes once, to the bit what torch's arithmetic gives
    elsewhere. It takes head dims that are multiples of 16; float64 and others go through torch.

    Args:
        x: [B, H, T, D], any float dtype, any strides.
        lengths: int32 or int64 [B]: only the first lengths[b] rows of batch row b count. The codes
            of the others are 0, whatever they hold.
        packed: give codes as `pack_values` does, without a pass of its own; D 64, 128 or 256.

    Returns:
        codes [B, H, T, D] float8_e4m3fn in x's memory order, or `PackedValues`, and scale fp32
        [B, H]: the largest magnitude over 448. |x - scale * codes| <= max(|x| / 16, scale / 1024).
        A head that holds inf or NaN gets the scale NaN, one of no rows 1.

    Raises:
        TypeError, ValueError: x is no float tensor of four dimensions, or lengths do not fit it.
    """
    checks.check_floats("x", x)
    packed = checks.check_flag("packed", packed)
    if x.dim() != 4:
        raise ValueError(f"x must have 4 dimensions [B, H, T, D], got {list(x.shape)}")
    if lengths is not None:
        checks.check_integers("lengths", lengths)
        checks.check_placement("lengths", lengths, (x.shape[0],), x)
    if packed:
        _check_packed_head_dim("x", x)
    x = x.detach()
    if fp8.has_kernel(x):
        codes, scale = fp8.quantize(x, lengths, packed)
        return (PackedValues(codes, x.shape[2]) if packed else codes), scale
    codes, scale = _quantized(x, lengths)
    return (pack_values(codes) if packed else codes), scale


def _quantized(x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    if lengths is not None:
        exists = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        x = torch.where(exists[:, None, :, None], x, 0)
    if x.numel() == 0:
        return x.to(E4M3), x.new_ones(x.shape[:2], dtype=torch.float32)
    codes, scale = quantize_rows(x.flatten(2), "fp8")
    # In the memory order of x, as the kernel leaves them.
    return torch.empty_like(x, dtype=E4M3).copy_(codes.view(x.shape)), scale


def pack_values(v: Tensor) -> PackedValues:
    """v as the Hopper kernel reads it, for calls of `attention_fp8` that share it.

    A pass over v that `attention_fp8` else makes in every call that Hopper serves.

    Args:
        v: [B, H_k, T_k, D] float8_e4m3fn, D 64, 128 or 256, any strides.

    Raises:
        TypeError, ValueError: v is not e4m3, or of another shape.
    """
    _check_codes("v", v)
    _check_packed_head_dim("v", v)
    # Interpreted, the kernel serves only who asks for it: torch does the same at once.
    packed = fp8.pack_by_torch(v) if v.is_cpu else fp8.pack(v)
    return PackedValues(packed, v.shape[2])


def _unpacked(values: PackedValues) -> Tensor:
    """v [B, H_k, T_k, D] again."""
    codes = values.codes.view(torch.uint8)
    v = rearrange(
        codes, "b h d (n four half two) -> b h (n half four two) d", half=2, four=4, two=2
    )
    return v[:, :, : values.length].view(E4M3)


@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ...,
    return_lse: Literal[False] = ..., backend: str | None = ..., **options: "Unpack[Fp8Arguments]",
) -> Tensor: ...  # fmt: skip
@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ...,
    return_lse: Literal[True], backend: str | None = ..., **options: "Unpack[Fp8Arguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@call_options.FP8.sign
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor | PackedValues,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of e4m3 queries, keys and values, each head with a scale. Has no gradients.

    The Hopper kernel multiplies in 8 bits, for which it rounds the weights to e4m3 (the head of
    this module states the bound), and reads v with its keys contiguous: unless v comes packed
    (`pack_values`), a pass over v puts it so. Every other backend dequantises to out_dtype and
    calls `fastattn.attention`: as good as that on the same numbers, and no faster.

    Args:
        q: [B, H_q, T_q, D] float8_e4m3fn, any strides.
        k: [B, H_k, T_k, D] float8_e4m3fn.
        v: [B, H_k, T_k, D_v] float8_e4m3fn, or `PackedValues`.
        q_scale: fp32 [B, H_q], positive; default 1. `quantize_fp8` makes codes and scales.
        k_scale, v_scale: fp32 [B, H_k], likewise.
        out_dtype: bfloat16, float16 or float32.
        return_lse: also return the log of the softmax denominators.
        backend: "hopper" (has to be asked for), "triton", "torch" or "auto" (default;
            FASTATTN_BACKEND replaces it); `explain_fp8` tells which one serves.
        options: causal, window, prefix_lengths, keep_first, key_lengths, query_offset, scale,
            softcap and sinks mean what they mean to `fastattn.attention`.

    Returns:
        o [B, H_q, T_q, D_v] in out_dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log, the sink counted. A query that sees no key has o = 0 and lse = -inf (or its sink). A
        NaN behind key_lengths reaches neither.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call.
        RuntimeError: an input requires grad while grad mode is on.
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call = _checked(q, k, v, scales, out_dtype, options)
    choice = _choose(call, out_dtype, backend)
    if choice.backend == "hopper":
        values = v.codes if isinstance(v, PackedValues) else fp8.pack(v)
        o, lse = fp8.attend(q, k, values, call.scales(), out_dtype, call.options)
        return (o, lse) if return_lse else o
    if not choice.forced:
        _say_once(choice, q.device)
    rows = (
        _dequantized(q, q_scale, out_dtype),
        _dequantized(k, k_scale, out_dtype),
        _dequantized(_unpacked(v) if isinstance(v, PackedValues) else v, v_scale, out_dtype),
    )
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        o, lse = attend.attention(*rows, return_lse=True, backend=choice.backend, **options)
    return (o, lse) if return_lse else o


@call_options.FP8.sign
def explain_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor | PackedValues,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[Fp8Arguments]",
) -> Explanation:
    """Which backend `attention_fp8` would use for these arguments, and why not a faster one.

    Checks the arguments as `attention_fp8` does, and computes nothing.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call = _checked(q, k, v, scales, out_dtype, dict(options))
    return _choose(call, out_dtype, backend)


class _Call(NamedTuple):
    """A checked call. v: a view with the shape of v, where values are packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: dict[str, Tensor | None]
    options: Options

    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """The scales of q, k and v, 1 where none was given."""
        q, k, v = (
            x.new_ones(x.shape[:2], dtype=torch.float32) if scale is None else scale
            for x, scale in zip((self.q, self.k, self.v), self.given.values(), strict=True)
        )
        return q, k, v

    def stand_ins(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors of the shapes of q, k and v in another dtype, that hold one number."""
        number = torch.empty(1, dtype=dtype, device=self.q.device)
        return (
            number.expand(self.q.shape), number.expand(self.k.shape), number.expand(self.v.shape)
        )  # fmt: skip


def _checked(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, scales: dict[str, Tensor | None],
    out_dtype: torch.dtype, options: dict[str, Any],
) -> _Call:  # fmt: skip
    call_options.FP8.refuse_others(options)
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    codes = v.codes if isinstance(v, PackedValues) else v
    for name, x in (("q", q), ("k", k), ("v", codes)):
        _check_codes(name, x)
        checks.check_device(name, x, q)
    if isinstance(v, PackedValues):
        packed, whole = codes.shape[3], -(-v.length // 16) * 16
        if packed != whole:
            raise ValueError(
                f"v must be packed by pack_values, got codes of {packed} keys for {v.length}"
            )
        codes = codes.mT[:, :, : v.length]
    rows = (q, k, codes)
    checked = call_options.fp8_options(*rows, **options)
    for (name, scale), x in zip(scales.items(), rows, strict=True):
        if scale is not None:
            _check_scale(name, scale, x)
    if torch.is_grad_enabled():
        inputs = (*rows, *scales.values(), *checked.differentiable)
        if any(x is not None and x.requires_grad for x in inputs):
            raise RuntimeError(
                "attention_fp8 has no gradients, but an input requires grad: call it under "
                "torch.no_grad() or torch.inference_mode(), or use fastattn.attention"
            )
    return _Call(*rows, scales, checked)


def _check_codes(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dtype != E4M3:
        raise TypeError(f"{name} must be a float8_e4m3fn tensor, got {checks.kind(x)}")
    if checks.check_tensor(name, x).dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions [B, H, T, D], got {list(x.shape)}")


def _check_packed_head_dim(name: str, x: Tensor) -> None:
    if x.shape[3] not in _PACKED_HEAD_DIMS:
        served = ", ".join(map(str, _PACKED_HEAD_DIMS))
        raise ValueError(f"{name} must have a head dim of {served} to be packed, got {x.shape[3]}")


def _check_scale(name: str, scale: object, x: Tensor) -> None:
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"{name} must be a float32 tensor, got {checks.kind(scale)}")
    checks.check_placement(name, scale, tuple(x.shape[:2]), x)


def _choose(call: _Call, out_dtype: torch.dtype, backend: str | None) -> Explanation:
    """The backend of a checked call, the Hopper kernel first."""
    forced = dispatch.asked_for(backend)
    reason = fp8.why_not_hopper(call.q, call.k, call.v, call.options, out_dtype)
    if forced == "hopper":
        if reason is None:
            return Explanation("hopper", {}, forced=True)
        raise ValueError(f'backend "hopper" cannot serve this call: {reason}')
    if forced != "auto":
        reason = f'backend "{forced}" was asked for'
    elif reason is None:
        reason = 'not yet verified on a GPU; backend="hopper" takes it'
    rest = dispatch.choose(*call.stand_ins(out_dtype), call.options, forced)
    name = str(out_dtype).removeprefix("torch.")
    first = {"hopper": f"{reason}; all others dequantise to {name} first"}
    return rest._replace(reasons=first | rest.reasons)


def _say_once(choice: Explanation, device: torch.device) -> None:
    """Say once for each reason that a GPU serves 8 bits no faster than 16 although nobody asked."""
    message = f"attention_fp8 does not multiply in fp8: {choice.reasons['hopper']}"
    dispatch.warn_once(message, device, 4)


def _dequantized(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scale * codes, rounded once to dtype."""
    if scale is None:
        return codes.to(dtype)
    return (codes.to(torch.float32) * scale[..., None, None]).to(dtype)
