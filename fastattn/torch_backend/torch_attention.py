"""Attention by torch's fused kernel, with the semantics of `fastattn.attention`.

It is the fast path on a CPU and the last resort elsewhere. It adds to
torch.nn.functional.scaled_dot_product_attention: padded-out keys are zeroed, as torch would
propagate their NaN; rows without keys give 0, and rows with visible NaN give NaN; masks are built
only if torch has no flag for them.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Imported by name, so that it stays torch's own if torch's module is patched.
from torch.nn.functional import scaled_dot_product_attention

from .. import tracing
from ..options import Options
from . import dropout, formula, masks, tangents
from .double_backward import gradients_by_formula
from .query_chunks import attention_in_tiles

Results: TypeAlias = Tensor | tuple[Tensor, Tensor]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Options], Results]


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False, first_row: int = 0
) -> Results:
    """`fastattn.attention` or, packed, `attention_varlen`, for checked arguments.

    first_row: b of the first batch row; not 0 for a part of a batch.
    """
    return bind(q, k, v, options, return_lse, first_row)(q, k, v, options)


def bind(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False,
    first_row: int = 0,
) -> Attend:  # fmt: skip
    """The function that computes calls with these layouts and options, whatever tensors hold.

    torch's function supports a mask and a bias on scores, no tangents, and an lse on a CPU without
    gradients. Other calls run the formula, in fp32 or wider, with all scores in memory.
    """
    how: dict[str, Any] = {"return_lse": return_lse, "first_row": first_row}
    ordered = options.batch_invariant and q.numel() and k.numel()
    if not ordered and tangents.carried(q, k, v, options) is not None:
        return partial(tangents.attention, **how)
    if options.key2 is not None and options.relative_keys is None:
        return partial(_with_one_product, **how)
    if options.cu_seqlens_q is not None:
        return partial(formula.each_sequence, attention, return_lse=return_lse)
    if ordered:
        return partial(_in_tiles, **how)
    on_host = tracing.host_knows(q)
    fits = on_host and _fits_cpu_kernel(q, k, v, options)
    if return_lse > fits or q.numel() == 0 or k.numel() == 0 or _needs_formula(q, options):
        return partial(_by_formula, **how)
    causal, gqa = _is_causal(options), not tracing.always(q.shape[1] == k.shape[1])
    lower, T_k = causal and options.left is None, k.shape[2]
    bare = options.plain and (lower or masks.sees_all(options, q.shape[2], T_k))
    if bare and return_lse:
        return partial(_with_lse, shown=None, is_causal=lower, first_row=first_row)
    if bare:
        wide = tracing.always(T_k >= WIDEST_VECTOR)
        # ONNX's operators pass NaN on.
        for_onnx = not on_host and torch.onnx.is_in_onnx_export()
        short = q.is_cpu and not (wide or options.dropout or for_onnx)
        bound = partial(_short, on_host=on_host) if short else _fused
        return partial(bound, is_causal=lower, gqa=gqa)
    skips = causal and fits and T_k > _KEYS_AT_ONCE
    added = masks.added_scores(q, T_k, options, first_row, lasting=on_host, is_causal=skips)
    if return_lse:
        return partial(_with_lse, shown=added.quickly, is_causal=skips, first_row=first_row)
    # A bias may be NaN or infinite where a key is hidden.
    complete = on_host and not added.biased and added.shows_each_query_a_key(options)
    return partial(_masked, added=added, on_host=on_host, complete=complete, gqa=gqa)


def _with_one_product(q: Tensor, k: Tensor, v: Tensor, options: Options, **how: Any) -> Results:
    q, k, options = one_product(q, k, options)
    return attention(q, k, v, options, **how)


def _in_tiles(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, first_row: int
) -> Results:
    o, lse = attention_in_tiles(q, k, v, options, first_row)
    o, lse = (o, lse) if options.fp32_results else (o.to(q.dtype), lse.float())
    return (o, lse) if return_lse else o


def _by_formula(q: Tensor, k: Tensor, v: Tensor, options: Options, **how: Any) -> Results:
    results = formula.attention(q, k, v, options, **how)
    if not isinstance(results, tuple) or options.fp32_results:
        return results
    return results[0], results[1].float()


def _fused(
    q: Tensor, k: Tensor, v: Tensor, options: Options, shown: Tensor | None = None, *,
    is_causal: bool, gqa: bool,
) -> Tensor:  # fmt: skip
    """o of torch's function with a mask or bias, or is_causal; of its CPU kernel with both.

    The function also drops weights without a seed.
    """
    if is_causal and shown is not None:
        o, _ = _cpu_kernel(q, k, v, 0.0, True, attn_mask=shown, scale=options.scale)
    else:
        o = scaled_dot_product_attention(
            q, k, v, attn_mask=shown, dropout_p=options.dropout, is_causal=is_causal,
            scale=options.scale, enable_gqa=gqa,
        )  # fmt: skip
    if options.dropout:  # by torch's formula, which has derivatives, but adds -inf to NaN
        odd = is_causal and not o.detach()[..., :1].sum().isfinite()
        return attention(q, k, v, dropout.seeded(options, q.device)) if odd else o  # type: ignore[return-value]
    if o.requires_grad:
        _allow_second_derivatives(o, (q, k, v, shown), is_causal, options.scale)
    return o


def _short(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, is_causal: bool, gqa: bool, on_host: bool
) -> Tensor:
    """o of a call without a mask that has few keys, on a CPU.

    on_host: whether the host knows what tensors hold.
    """
    o = _fused(q, k, v, options, is_causal=is_causal, gqa=gqa)
    if on_host and torch.count_nonzero(o).item() == o.numel():
        return o
    return _with_nan(o, q, k, is_causal)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, added: masks.AddedScores, on_host: bool,
    complete: bool, gqa: bool,
) -> Tensor:  # fmt: skip
    """o of a call with a mask or bias.

    on_host: as for `_short`. complete: no bias, no padding, and each query sees a key.
    """
    if complete or (on_host and not options.dropout):
        shown = added.quickly(options)
        o = _fused(q, k, v, options, shown, is_causal=added.is_causal, gqa=gqa)
        if complete or _is_sound(o, k, v, options):
            return o
    shown, mask = added.exactly(options)
    exists = masks.existing_keys(options, k.shape[2], q.device)
    if exists is not None:
        k, v = (torch.where(exists[:, None, :, None], x, 0.0) for x in (k, v))
    o = _fused(q, k, v, options, shown, is_causal=False, gqa=gqa)
    if mask is not None:
        # On a CPU torch gives 0 for rows without keys, unless there is NaN elsewhere; its CUDA
        # kernels differ.
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o


def _records(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether autograd records the call."""
    inputs = (q, k, v, *options.differentiable)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *,
    shown: Callable[[Options], Tensor | None] | None, is_causal: bool, first_row: int,
) -> Results:  # fmt: skip
    """o and lse of torch's CPU kernel; of the formula for gradients.

    shown: makes the mask or bias of a call.
    """
    exactly = partial(_by_formula, q, k, v, options, return_lse=True, first_row=first_row)
    if _records(q, k, v, options):
        return exactly()
    mask = None if shown is None else shown(options)
    o, lse = _cpu_kernel(q, k, v, 0.0, is_causal, attn_mask=mask, scale=options.scale)
    # The lse is 0 in rows without keys, and where NaN is missed: see `_WIDEST_VECTOR`.
    if not (_is_finite(o) and torch.count_nonzero(lse).item() == lse.numel()):
        sound = o.isfinite().all(-1) & (lse != 0)
        exact_o, exact_lse = exactly()
        o = torch.where(sound[..., None], o, exact_o)
        lse = torch.where(sound, lse, exact_lse)
    return o, lse.float().contiguous()


# torch's function has an argument for a mask or is_causal alone, and returns no lse. With both its
# kernel skips blocks of so many keys; a mask alone is faster where there is one block.
_KEYS_AT_ONCE = 512
_cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _fits_cpu_kernel(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether torch's CPU kernel supports these layouts: it does not check this."""
    # It has no gradients of a bias, and no dropout.
    learned = any(x is not None and x.requires_grad for x in options.differentiable)
    if learned or options.fp32_results or options.dropout:
        return False
    return q.shape[3] == v.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))


def one_product(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor, Options]:
    """Convert a call with two products to one over longer rows, with key2 expanded to k's heads."""
    query, key = options.query2, options.key2
    assert query is not None and key is not None
    # Heads are dim 1 in packed sequences too.
    key = key.repeat_interleave(k.shape[1] // key.shape[1], 1)
    options = options._replace(query2=None, key2=None)
    return torch.cat((q, query), -1), torch.cat((k, key), -1), options


# Lower bound on a CPU's vector length. Without a mask, torch 2.13's CPU kernel ignores NaN in the
# maximum of scores that fill no vector, and treats an all-NaN row as one without keys.
WIDEST_VECTOR = 64


def _with_nan(o: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """o with NaN in rows with NaN in the query or a visible key, where torch gives 0."""
    in_keys = k.isnan().any(-1)
    if is_causal:
        # Query i sees keys 0..i.
        seen = in_keys.cumsum(-1) > 0
        last = torch.arange(q.shape[2], device=q.device).clamp(max=k.shape[2] - 1)
        in_keys = seen[..., last]
    else:
        in_keys = in_keys.any(-1, keepdim=True)
    group = q.shape[1] // k.shape[1]
    of_head = torch.arange(q.shape[1], device=q.device) // group
    hit = q.isnan().any(-1) | in_keys[:, of_head]
    return o + torch.where(hit, torch.nan, 0.0).to(o.dtype).unsqueeze(-1)


def _allow_second_derivatives(
    o: Tensor, inputs: tuple[Tensor | None, ...], is_causal: bool, scale: float
) -> None:
    """Make the gradients of torch's fused kernel differentiable.

    torch has no derivative of that kernel's backward. Under create_graph=True its gradients are
    replaced by those of the plain formula.
    """
    node = None if torch.compiler.is_compiling() else o.grad_fn
    if node is None or not node.name().startswith("ScaledDotProduct"):
        return

    def replaced(
        grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        needed = [
            x is not None and grad is not None
            for x, grad in zip_longest(inputs, grad_inputs[: len(inputs)])
        ]
        q, k, v, shown = inputs
        is_mask = shown is not None and shown.dtype == torch.bool
        options = Options(causal=is_causal, scale=scale, attn_mask=shown if is_mask else None)

        def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return (formula.attention(q, k, v, options._replace(attn_bias=bias)),)  # type: ignore[return-value]

        tensors = q, k, v, None if is_mask else shown
        grads = gradients_by_formula(plain, tensors, needed, grad_outputs[:1])
        return (*grads[: len(grad_inputs)], *grad_inputs[len(inputs) :])

    node.register_hook(replaced)


def draws(q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool) -> bool:
    """Whether torch's function draws the dropout mask of a call without a seed."""
    # Not for traced calls, nor for parts of others, which all share one seed.
    if not options.dropout or options.dropout_seed is not None or return_lse:
        return False
    part = options.all_heads is not None or options.q_positions is not None
    if part or not (tracing.host_knows(q) and q.numel() and k.numel()):
        return False
    return not _needs_formula(q, options) and tangents.carried(q, k, v, options) is None


def _needs_formula(q: Tensor, options: Options) -> bool:
    """Whether the call has more than masks, biases, off a CPU in q's dtype, and torch's dropout."""
    if options.dropout and options.dropout_seed is None:
        options = options._replace(dropout=0)
    return options.weighs or not (q.is_cpu or masks.dtype_of_bias(q, options) == q.dtype)


def _is_causal(options: Options) -> bool:
    """Whether torch's is_causal is the right edge of the band."""
    return (
        options.band is not None
        and options.band[1] == 0
        and options.query_offsets is None
        and options.q_positions is None
        and options.query_offset is not None
        and tracing.always(options.query_offset == 0)
    )


# Far above activations' norms, and far below overflow in a product of two.
_LARGE = 1e9


def _is_sound(o: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether no hidden number has reached o, or can reach gradients by a weight of 0."""
    # A NaN or infinity would be in o. Gradients multiply all keys and values by numbers.
    if not _is_finite(o):
        return False
    if not (o.requires_grad and masks.lacks_keys(options)):
        return True
    return _is_finite(k) and _is_tame(v)


def _is_finite(x: Tensor) -> bool:
    """Whether x has no NaN or infinity, and no overflow in its sum."""
    x = x.detach() if x.requires_grad else x
    total = x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()
    return math.isfinite(total.item())


def _is_tame(x: Tensor) -> bool:
    """Whether x has no NaN, infinity or number that could overflow in a product."""
    norm = torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float))
    return norm.item() < _LARGE
