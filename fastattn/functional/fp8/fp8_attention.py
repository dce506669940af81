"""FP8 attention: e4m3 queries, keys and values with a scale per head. Forward only.

    o_i = sum_j w_ij v_scale v_j,    w_i = softmax_j(scale * q_scale * k_scale * q_i . k_j)

It reads half the bytes and on Hopper has twice the tensor-core rate. Besides the rounding of
inputs, products in 8 bits round the weights to e4m3. Weights are scaled by the running row maximum
to at most 2^8. With u = 2^-4, e4m3's half unit in the last place, and 2^-10, half the step of its
subnormals,

    |o_i - exact| <= sum_j (u w_ij + 2^-18 max_j w_ij) |v_scale v_j|   over the visible keys,

a sink's weight included in the maximum, plus the error of 16-bit attention. lse is not affected, as
sums use unrounded weights. Hopper's tensor cores accumulate 8-bit products with about 14 bits
(DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2): a further error
of about 2^-13 of the sum per instruction of 32 columns or keys. The kernel has no registers for the
remedy, periodic promotion of partial sums.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks, dispatch, tracing
from ...dispatch import Explanation
from ...ops import fp8, spread
from ...ops.gradients import as_batch, as_packed
from ...options import Options
from ...tuned import choices
from ...tuned.families import of_call
from .. import call_options, fused_attention
from .codes import PackedValues, check_codes, dequantized, unpacked, viewed

# Head dims at which 8 bits take less time than 16, the packing of values included: bench/results.
_FASTER = (64, 128)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Call(NamedTuple):
    """A checked call.

    v: a view in v's shape if `values` are packed. rows: batch rows, or packed sequences.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor | PackedValues
    rows: int
    scale_tensors: dict[str, Tensor | None]
    options: Options

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.options.cu_seqlens_q is not None

    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scales of q, k and v, default 1."""
        q, k, v = (
            x.new_ones(self.rows, x.shape[1], dtype=torch.float32) if scale is None else scale
            for x, scale in zip((self.q, self.k, self.v), self.scale_tensors.values(), strict=True)
        )
        return q, k, v

    def stand_ins(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Expanded scalars in another dtype with the shapes of q, k and v."""
        number = self.q.new_zeros(1, dtype=dtype)
        return (
            number.expand(self.q.shape), number.expand(self.k.shape), number.expand(self.v.shape)
        )  # fmt: skip

    def numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantised q, k and v."""
        of_queries, of_keys = self.options.cu_seqlens_q, self.options.cu_seqlens_k
        v = self.values
        v = unpacked(v, of_keys) if isinstance(v, PackedValues) else v
        return (
            dequantized(self.q, self.scale_tensors["q_scale"], of_queries, dtype),
            dequantized(self.k, self.scale_tensors["k_scale"], of_keys, dtype),
            dequantized(v, self.scale_tensors["v_scale"], of_keys, dtype),
        )


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
) -> call_options.Results:
    """Attention of e4m3 queries, keys and values with a scale per head, without gradients.

    The Hopper kernel multiplies in 8 bits and so rounds the weights to e4m3 (this module's
    docstring has the bound). It reads v contiguous along keys, which takes a pass over v unless v
    is packed (`pack_values`). Other backends dequantise to out_dtype and call `fastattn.attention`,
    with its accuracy and speed.

    Args:
        q: [B, H_q, T_q, D] float8_e4m3fn, any strides.
        k: [B, H_k, T_k, D] float8_e4m3fn.
        v: [B, H_k, T_k, D_v] float8_e4m3fn, or `PackedValues`.
        q_scale: fp32 [B, H_q], positive; default 1. `quantize_fp8` makes codes and scales. Values
            are checked on the CPU only.
        k_scale, v_scale: fp32 [B, H_k], likewise.
        out_dtype: bfloat16, float16 or float32.
        return_lse: also return the log of the softmax denominators.
        backend: "hopper", "triton", "torch" or "auto" (default; FASTATTN_BACKEND replaces it): the
            Hopper kernel where a GPU has run it right, and faster than in 16 bits; `explain_fp8`
            reports the choice.
        options: causal, window, prefix_lengths, keep_first, key_lengths, query_offset, scale,
            softcap and sinks, as for `fastattn.attention`.

    Returns:
        o [B, H_q, T_q, D_v] in out_dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log, sink included. A query that sees no key has o = 0 and lse = -inf (or its sink). A NaN
        past key_lengths reaches neither.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call.
        RuntimeError: an input requires grad while grad mode is on.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call = _checked_fp8(q, k, v, scales, out_dtype, options)
    return _compute(call, out_dtype, return_lse, backend, options)


@call_options.PACKED_FP8.sign
def attention_varlen_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor | PackedValues,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """`attention_fp8` within each of N packed sequences, without padding.

    The FP8 counterpart of `attention_varlen`.

    Args:
        q: [total_q, H_q, D] float8_e4m3fn, any strides.
        k: [total_k, H_k, D] float8_e4m3fn.
        v: [total_k, H_k, D_v] float8_e4m3fn, or `PackedValues` with the same cu_seqlens_k.
        cu_seqlens_q: int32 or int64 [N + 1] on q's device, as for `attention_varlen`.
        cu_seqlens_k: likewise to total_k; default cu_seqlens_q.
        q_scale: fp32 [N, H_q], positive; default 1. `quantize_fp8` makes codes and scales. Values
            are checked on the CPU only.
        k_scale, v_scale: fp32 [N, H_k], likewise.
        out_dtype, return_lse, backend: as for `attention_fp8`.
        options: as for `attention_fp8`, except query_offset; key_lengths and prefix_lengths are
            [N].

    Returns:
        o [total_q, H_q, D_v] in out_dtype; with return_lse also lse, fp32 [H_q, total_q].

    Raises:
        TypeError, ValueError, RuntimeError: as `attention_fp8`. The values of offsets are checked
            on the CPU only.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    offsets = (cu_seqlens_q, cu_seqlens_k)
    call = _checked_fp8(q, k, v, scales, out_dtype, options, offsets)
    return _compute(call, out_dtype, return_lse, backend, options)


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
    **options: Any,
) -> Explanation:
    """Return the backend of a call of `attention_fp8`, and why a faster one was not used.

    Checks the arguments as `attention_fp8` does, and computes nothing.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call = _checked_fp8(q, k, v, scales, out_dtype, dict(options))
    checks.check_flag("return_lse", return_lse)
    choice = _choose(call, out_dtype, backend)
    if choice.backend != "hopper":
        return choice
    like = call.stand_ins(out_dtype)
    return dispatch.with_findings(choice, like[0], like[2], _families(call, like))


def _compute(
    call: _Call, out_dtype: torch.dtype, return_lse: bool, backend: str | None,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """o, or (o, lse). options: unchecked."""
    return_lse = checks.check_flag("return_lse", return_lse)
    choice = _choose(call, out_dtype, backend)
    dispatch.log_once("fp8", choice, call.q, call.k, call.k, call.options)
    if choice.backend == "hopper":
        o, lse = _by_hopper(call, out_dtype)
        return (o, lse) if return_lse else o
    if not choice.forced:
        _say_once(choice, call.q.device)
    o, lse = _by_others(call, choice.backend, out_dtype, options)
    return (o, lse) if return_lse else o


def _by_others(
    call: _Call, backend: str, out_dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """o and lse of the dequantised inputs. options: unchecked."""
    if tracing.autocasting(call.q.device):
        # Autocast would change the dtype.
        with torch.autocast(call.q.device.type, enabled=False):
            return _by_others(call, backend, out_dtype, options)
    q, k, v = call.numbers(out_dtype)
    how: dict[str, Any] = {"return_lse": True, "backend": backend, **options}
    offsets = call.options.cu_seqlens_q
    with torch.no_grad():
        if offsets is None:
            return fused_attention.attention(q, k, v, **how)
        return fused_attention.attention_varlen(q, k, v, offsets, call.options.cu_seqlens_k, **how)


def _by_hopper(call: _Call, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, v = call.q, call.k, call.values
    if call.packed:
        q, k = as_batch(q), as_batch(k)
    if isinstance(v, PackedValues):
        values = v.codes
    else:
        values = fp8.pack(as_batch(v) if call.packed else v, call.options.cu_seqlens_k)
    o, lse = fp8.attend(q, k, values, call.scales(), out_dtype, call.options)
    return (as_packed(o), lse[0]) if call.packed else (o, lse)


def _checked_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, scales: dict[str, Tensor | None],
    out_dtype: torch.dtype, options: dict[str, Any],
    offsets: tuple[Tensor, Tensor | None] | None = None,
) -> _Call:  # fmt: skip
    """Check a call. offsets: of packed queries and keys, or None."""
    callee = call_options.FP8 if offsets is None else call_options.PACKED_FP8
    callee.refuse_others(options)
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    in_sequences = offsets is not None
    check_codes("q", q, in_sequences)
    for name, x in (("k", k), ("v", v)):
        codes = x.codes if isinstance(x, PackedValues) else x
        check_codes(name, codes, in_sequences and codes is x)
        checks.check_input(name, codes, "", "...", q, {})
    rows = (q, k, _view(v, in_sequences) if isinstance(v, PackedValues) else v)
    if offsets is None:
        checked, count = call_options.fp8_options(*rows, **options), q.shape[0]
    else:
        checked = call_options.packed_fp8_options(*rows, *offsets, **options)
        count = offsets[0].shape[0] - 1
    if isinstance(v, PackedValues):
        _check_length(v, checked.cu_seqlens_k)
    for (name, scale), x in zip(scales.items(), rows, strict=True):
        if scale is not None:
            _check_scale(name, scale, {"B": count, "H": x.shape[1]}, q)
    _refuse_gradients((*rows, *scales.values(), *checked.differentiable))
    return _Call(*rows, v, count, scales, checked)


def _view(v: PackedValues, in_sequences: bool) -> Tensor:
    """`viewed`, after checking the values."""
    checks.check_count("v.length", v.length, 0)
    if in_sequences and v.codes.shape[0] != 1:
        raise ValueError(
            f"v must be packed by pack_values with cu_seqlens_k, got codes of {v.codes.shape[0]} "
            "batch rows"
        )
    return viewed(v, in_sequences)


def _check_length(v: PackedValues, cu_seqlens: Tensor | None) -> None:
    of, length = "" if cu_seqlens is None else " with cu_seqlens_k", v.codes.shape[3]
    if length != fp8.packed_length(v.length, cu_seqlens):
        raise ValueError(
            f"v must be packed by pack_values{of}, got codes of {length} keys for {v.length}"
        )


def _check_scale(name: str, scale: Tensor, sizes: checks.Sizes, q: Tensor) -> None:
    checks.check_input(name, scale, "float32", "B H", q, sizes)
    if tracing.host_knows(scale):
        wrong = scale[~((scale > 0) & (scale < math.inf))]
        if wrong.numel():
            raise ValueError(f"{name} must be positive and finite, got {wrong[0].item()}")


def _refuse_gradients(inputs: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() and any(x is not None and tracing.wants_gradient(x) for x in inputs):
        raise RuntimeError(
            "attention in 8 bits has no gradients, but an input requires grad: call it under "
            "torch.no_grad() or torch.inference_mode(), or use fastattn.attention"
        )


def _choose(call: _Call, out_dtype: torch.dtype, backend: str | None) -> Explanation:
    """Backend of a checked call, the Hopper kernel preferred."""
    spread.refuse("attention_fp8")
    forced = dispatch.requested_backend(backend)
    reason = dispatch.why_not_hopper_fp8(call.q, call.k, call.v, call.options, out_dtype)
    if forced == "hopper":
        if reason is None:
            # The first caller installs this device's tuned shapes.
            choices.any_timed(call.q.device)
            return Explanation("hopper", {}, forced=True)
        raise ValueError(f'backend "hopper" cannot serve this call: {reason}')
    like = call.stand_ins(out_dtype)
    if forced != "auto":
        reason = f'backend "{forced}" was requested'
    elif reason is None:
        reason = _why_slow(call.q) or choices.why_quarantined(
            "hopper", like[0], like[2], _families(call, like)
        )
        if reason is None:
            return Explanation("hopper", {})
    rest = dispatch.choose(*like, call.options, forced)
    name = str(out_dtype).removeprefix("torch.")
    first = {"hopper": f"{reason}; all others dequantise to {name} first"}
    return rest._replace(reasons=first | rest.reasons)


def _families(call: _Call, like: tuple[Tensor, Tensor, Tensor]) -> tuple[str, ...]:
    """The families of a call by the Hopper kernel; like: its stand-ins."""
    return of_call("hopper", ("fp8",), *like, call.options)


def _why_slow(q: Tensor) -> str | None:
    """Reason that the Hopper kernel may be no faster than one in 16 bits, or None."""
    if q.shape[-1] in _FASTER:
        return dispatch.why_not_worth_it(q)
    return f'head dim {q.shape[-1]} was not timed in 8 bits; pass backend="hopper" to use it'


def _say_once(choice: Explanation, device: torch.device) -> None:
    """Warn once per reason that an unforced GPU call is not computed in 8 bits."""
    message = f"attention_fp8 does not multiply in fp8: {choice.reasons['hopper']}"
    dispatch.warn_once(message, device)
