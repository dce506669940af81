"""Attention to a part of the keys, forward and backward, for callers that merge parts.

Ring attention keeps the keys of a sequence on several devices. Its forward merges the parts'
results. In backward the parts are independent, given the merged lse for the weights exp(score -
lse) and the merged o for the gradients of scores, weight * (do.v - do.o): Liu et al., "Ring
Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv 2310.01889.
"""

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, dispatch, score_checks, tracing
from ..block_mask import with_tensors
from ..ops.call import contiguous
from ..ops.gradients import (
    Kernels,
    as_batch,
    as_packed,
    gradients_and_delta,
    laid,
    mod_gradients,
)
from ..options import LEARNED, Options
from ..torch_backend import block as formula
from ..torch_backend.block import Results
from . import call_options, inputs
from .fused_attention import checked_options, compute


class BlockGradients(NamedTuple):
    """Gradients from one part of the keys; see `attention_block_backward`.

    Attributes:
        of_options: gradients by name of options that require grad. "mod_tensors": a tuple of those
            of what score_mod reads, None of what does not require grad.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor
    of_options: dict[str, Any]


@call_options.DENSE.sign
def attention_block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """o and lse of `attention` to a part of the keys, for `merge`; no gradients.

    For q in fp64 lse is fp64 too, unless sequences are packed.

    Each part in bf16 is rounded; out_dtype torch.float32 avoids the accumulated error.

    Args:
        q, k, v: as in `attention`, k and v of this part. With cu_seqlens_q as in
            `attention_varlen`.
        out_dtype: dtype of o: q's (default), or torch.float32 for q in fp16 or bf16.
        backend, options: as for `attention`. Pass sinks to one part only. Dropout needs
            dropout_seed. Autocast does not apply.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    name = "attention_block_forward"
    checked = _checked_block(name, q, k, v, cu_seqlens_q, cu_seqlens_k, out_dtype, options)
    with torch.no_grad():
        o, lse = compute(q, k, v, checked, True, backend, None, options)
    return o, lse


@call_options.DENSE.sign
def attention_block_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    **options: Any,
) -> BlockGradients:
    """Compute the share of one part of the keys in the gradients of attention to all keys.

    Args:
        do: gradient of o, in q's dtype.
        q, k, v: as in `attention_block_forward`, k and v of this part.
        o: merged [B, H_q, T_q, D_v], or packed [total_q, H_q, D_v]; fp32 is converted to q's dtype.
        lse: merged fp32 [B, H_q, T_q], or packed [H_q, total_q], natural log. For q in fp64 pass
            `attention_block_forward`'s fp64 lse, as fp32 would limit the gradients' accuracy.
        dlse: gradient of lse, as lse, or None.
        out_dtype: dtype of all gradients: their tensor's (default), or torch.float32 for q in fp16
            or bf16.
        backend, options: as for `attention`, of this part. relative_bias, relative_keys,
            relative_query, query2, key2, attn_bias, sinks and what score_mod reads get gradients if
            they require grad. Pass sinks to one part only. Dropout needs dropout_seed.

    Returns:
        dq, dk and dv in the shapes of q, k and v; delta = do.o - dlse, fp32 as lse; and gradients
        of options by their names, in their shapes.

    Raises:
        TypeError, ValueError: as `attention`, or o or lse does not fit the call.
    """
    name = "attention_block_backward"
    checked = _checked_block(name, q, k, v, cu_seqlens_q, cu_seqlens_k, out_dtype, options)
    if checked.score_mod is not None and checked.score_mod_grad is None:
        grad = score_checks.derived(checked.score_mod, checked.mod_tensors, f"in {name}")
        checked = checked._replace(score_mod_grad=grad)
    _check_results(do, o, lse, dlse, q, v)
    learned = _learned(options, checked)
    with torch.no_grad():
        choice = dispatch.choose(q, k, v, checked, backend, among=dispatch.BACKENDS, training=True)
        results = (do, dlse, q, k, v, o.to(q.dtype), lse)
        if choice.backend == "torch":
            dispatch.warn_if_slow(choice, q.device)
            gradients, delta, of_mods = _in_torch(results, checked, learned)
        else:
            kernels, launched = dispatch.launched(choice, q, k, v, checked)
            gradients, delta, of_mods = _by_kernels(kernels, results, launched, learned)
        tensors = (x for _, x in learned.values())
        shaped = []
        for grad, x in zip(gradients, (q, k, v, *tensors), strict=True):
            grad = grad[..., : x.shape[-1]].reshape(x.shape)
            shaped.append(grad.to(x.dtype if out_dtype is None else out_dtype))
        dq, dk, dv, *rest = shaped
        names = [name for name, _ in learned.values()]
        of_options: dict[str, Any] = dict(zip(names, rest, strict=True))
        if of_mods:
            of_options["mod_tensors"] = tuple(
                grad if grad is None else grad.to(x.dtype if out_dtype is None else out_dtype)
                for grad, x in zip(of_mods, checked.mod_tensors, strict=True)
            )
    return BlockGradients(dq, dk, dv, delta, of_options)


def _checked_block(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Options:
    """Checked options of a part; name: of the public function."""
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is for packed sequences: cu_seqlens_q is not given")
    offsets = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    callee = call_options.DENSE if offsets is None else call_options.PACKED
    callee._replace(name=name).refuse_others(options)
    checks.check_tensors(q, k, v, checks.DENSE if offsets is None else checks.PACKED)
    checked = checked_options(q, k, v, with_tensors(options, q.device), offsets)
    if checked.dropout and checked.dropout_seed is None:
        raise ValueError("dropout_seed must be given: all parts, and their gradients, share it")
    wide = torch.promote_types(q.dtype, torch.float32)
    if out_dtype not in (None, q.dtype, wide):
        raise ValueError(f"out_dtype must be {q.dtype} or {wide}, got {out_dtype}")
    # With fp64 lse is fp64 too, as it limits the accuracy of all gradients.
    wider = q.dtype == torch.float64 and cu_seqlens_q is None
    return checked._replace(fp32_results=wider or out_dtype not in (None, q.dtype))


def _check_results(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, q: Tensor, v: Tensor
) -> None:
    sizes = checks.sizes_of(q) | {"D_v": v.shape[-1]}
    dims, rows = (
        ("B H_q T_q D_v", "B H_q T_q") if q.dim() == 4 else ("total_q H_q D_v", "H_q total_q")
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    checks.check_input("do", do, "as q", dims, q, sizes)
    checks.check_input("o", o, "" if getattr(o, "dtype", None) == wide else "as q", dims, q, sizes)
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None or name == "lse":
            dtype = "float32" if wide == torch.float32 else "float32 or float64"
            checks.check_input(name, x, dtype, rows, q, sizes)


def _learned(options: dict[str, Any], checked: Options) -> dict[str, tuple[str, Tensor]]:
    """Options that need gradients, by field: name and original tensor, which checks may detach."""
    learned = {}
    for name, x in options.items():
        field = "attn_bias" if name == "attn_mask" else name
        if field in LEARNED and getattr(checked, field) is not None and x.requires_grad:
            learned[field] = (name, x)
    return {field: learned[field] for field in LEARNED if field in learned}


# Gradients of q, k, v and the learned fields; delta; gradients of mod_tensors, if any learns.
_Found = tuple[list[Tensor], Tensor, list[Tensor | None]]


def _in_torch(results: Results, options: Options, learned: Iterable[str]) -> _Found:
    gradients, delta = formula.gradients(results, options, list(learned))
    (do, dlse, *saved), options = _batched(results, options)
    return gradients, delta, _of_mods(None, (*saved, options), do, dlse)


def _by_kernels(
    kernels: Kernels, results: Results, options: Options, learned: Container[str]
) -> _Found:
    """The gradients, with padded head dims."""
    do, dlse, *rows, lse = results
    results = (inputs.kernel_rows(do), dlse, *map(inputs.kernel_rows, rows), lse.contiguous())
    (do, dlse, *rows), options = _batched(results, inputs.kernel_options(options))
    saved: Any = (*rows, contiguous(options))
    needed = [True] * 3 + [name in learned for name in LEARNED]
    if tracing.may_be_traced(do):
        kernels = kernels.seen()
    grads, delta = gradients_and_delta(kernels, saved, needed, do, dlse)
    if options.cu_seqlens_q is not None:
        delta = delta[0]
        # Only tensors with rows; others have fewer dims.
        grads = [x if x is None or x.dim() != 4 else as_packed(x) for x in grads]
    of_mods = _of_mods(kernels, saved, do, dlse)
    return [x for x in grads if x is not None], delta, of_mods


def _batched(results: Results, options: Options) -> tuple[Results, Options]:
    """The results and options of a call, of packed sequences with a batch dim."""
    if options.cu_seqlens_q is None:
        return results, options
    rows = [x if x is None else as_batch(x) if x.dim() == 3 else x[None] for x in results]
    return rows, laid(options, as_batch)


def _of_mods(
    kernels: Kernels | None, saved: Any, do: Tensor, dlse: Tensor | None
) -> list[Tensor | None]:
    wanted = [x.requires_grad for x in saved[-1].mod_tensors]
    return mod_gradients(kernels, saved, wanted, do, dlse) if any(wanted) else []
