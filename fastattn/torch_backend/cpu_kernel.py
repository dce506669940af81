"""torch's attention kernel for CPUs: with its lse, a column of scores, and gradients of both.

A column is one more key, with value 0 and the same score for all queries of a head.
"""

from functools import cache
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from ..options import Options
from . import formula
from .derivatives import gradients_by_formula

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# At least as many fp32 numbers as a vector of this CPU has: Arm's SVE has up to 2,048 bits. Without
# a mask, torch 2.13's CPU kernel ignores NaN in the maximum of scores that fill no vector, and
# treats an all-NaN row as one without keys.
VECTOR = 64 if torch.backends.cpu.get_cpu_capability() == "SVE" else 16


def fills_rows(o: Tensor) -> bool:
    """Whether no row of o, which is not empty, is 0: none was taken for one without keys."""
    # NaN is not above 0: values with NaN show it in a row that is otherwise 0.
    first = (o.detach() if o.requires_grad else o).select(-1, 0)
    return bool(torch.linalg.vector_norm(first, -inf).item() > 0)


# Most queries times keys of calls whose gradients take less time in fp32 than in bf16, with torch
# 2.13 on a CPU with AVX-512.
_SHORT = 2**14


def in_fp32(q: Tensor, k: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's function takes less time in fp32 than in 16 bits, casts included.

    others: inputs that may need gradients too.
    """
    if q.dtype == torch.float16:
        return not _multiplies_fp16()
    if q.dtype != torch.bfloat16:
        return False
    T_q = q.shape[2]
    if T_q == 1 or T_q * k.shape[2] > _SHORT or not torch.is_grad_enabled():
        return T_q == 1
    return any(x is not None and x.requires_grad for x in (q, k, *others))


@cache
def _multiplies_fp16() -> bool:
    """Whether this CPU has instructions for products in fp16."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is None or supported()


def beside_column(options: Options) -> Options:
    """The options of a call without what adds a column."""
    return options if options.sinks is None else options._replace(sinks=None)


def fits(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether the kernel supports these layouts and options: it does not check this."""
    # It has no gradients of a bias, and no dropout.
    learned = any(x is not None and x.requires_grad for x in options.differentiable)
    if learned or options.fp32_results or options.dropout:
        return False
    return q.shape[3] == v.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blind: Tensor | None, is_causal: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """o, lse, and rows where they may be wrong, bool [B, H_q, T_q]; None: no row is.

    mask: summand without gradients. blind: rows without keys, if known.
    """
    mask = mask if mask is None else mask.to(q.dtype)
    o, of_kernel = _forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=options.scale)
    lse = of_kernel
    if blind is not None:
        o, lse = o.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -inf)
    o, lse = formula.with_column(o, lse, options.sinks)
    # The kernel's lse is 0 in rows without keys, and where NaN is missed; 1 / 0 is infinite.
    if isfinite((of_kernel.reciprocal() + lse).sum().item()):
        return o, lse, None
    odd = of_kernel == 0
    odd = (odd if blind is None else odd & ~blind) | (lse == inf)
    return o, lse, odd if odd.any() else None


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blind: Tensor | None, is_causal: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`attention`, with gradients of o and lse in q, k, v and the column, of any order."""
    mask = mask if mask is None else mask.to(q.dtype)
    inputs = (q, k, v, options.sinks, mask, blind, is_causal, options)
    results: tuple[Tensor, Tensor, Tensor | None] = _Differentiable.apply(*inputs)  # type: ignore[no-untyped-call]
    return results


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, column: Tensor | None, mask: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        o, lse, odd = attention(q, k, v, mask, *rest)
        _, ctx.is_causal, options = rest
        ctx.scale = options.scale
        ctx.set_materialize_grads(False)
        if odd is not None:
            ctx.mark_non_differentiable(odd)
        ctx.save_for_backward(q, k, v, column, mask, o, lse)
        return o, lse, odd

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        q, k, v, column, mask, o, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            options = of_mask(mask, ctx.is_causal, ctx.scale)

            def plain(q: Tensor, k: Tensor, v: Tensor, column: Tensor | None) -> Any:
                return formula.attention(q, k, v, options._replace(sinks=column), return_lse=True)

            grads = gradients_by_formula(plain, (q, k, v, column), needed, (do, dlse))
            return *grads, None, None, None, None
        do = torch.zeros_like(o) if do is None else do.contiguous()
        delta = (do.to(lse.dtype) * o).sum(-1)
        delta = delta if dlse is None else delta - dlse
        dcolumn = None
        if needed[3]:
            dcolumn = -formula.weighed_by_column(column, lse, delta).to(column.dtype)
        lse = lse.masked_fill(lse == -inf, 0)  # a number, for p = 0
        # p by this lse is that of the keys beside the column.
        given = (do, q, k, v, o) if dlse is None else _with_dlse(do, q, k, v, o, dlse, lse.dtype)
        flags: dict[str, Any] = {"attn_mask": mask, "scale": ctx.scale}
        grads = _backward(*given, lse, 0.0, ctx.is_causal, **flags)
        dq, dk, dv = (
            dx[..., : x.shape[3]].to(x.dtype) for dx, x in zip(grads, (q, k, v), strict=True)
        )
        return dq, dk, dv, dcolumn, None, None, None, None


def _with_dlse(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dlse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Inputs of the backward with one more column, that add dlse to ds = p (do.v - do.o)."""
    # Padded, tensors of one column keep the order of dims that torch calls channels_last.
    wide = [torch.nn.functional.pad(x.to(dtype), (0, 1)).contiguous() for x in (do, q, k, v, o)]
    wide[0][..., -1] = 1
    wide[-1][..., -1] = -dlse
    return tuple(wide)


def of_mask(mask: Tensor | None, is_causal: bool, scale: float) -> Options:
    """The options of a call of torch's function."""
    if mask is not None and mask.dtype != torch.bool:
        return Options(causal=is_causal, scale=scale, attn_bias=mask)
    return Options(causal=is_causal, scale=scale, attn_mask=mask)
