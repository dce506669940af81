"""Attention by torch's fused kernel, with our semantics.

It is the fast path on a CPU and the last resort elsewhere. It adds to
torch.nn.functional.scaled_dot_product_attention: padded-out keys are zeroed, as torch would
propagate their NaN; rows without keys give 0, and rows with visible NaN give NaN; masks are built
only if torch has no flag for them.
"""

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
from . import formula, tangents
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
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False, first_row: int = 0
) -> Attend:
    """The function that computes calls with these layouts and options, whatever tensors hold.

    torch's function returns no lse, supports only a bias on scores, and no tangents. Other calls
    run the formula, in fp32 or wider, with all scores in memory.
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
    if return_lse or q.numel() == 0 or k.numel() == 0 or _needs_formula(q, options):
        return partial(_by_formula, **how)
    known = tracing.host_knows(q)
    is_causal, gqa = _is_causal(options), not tracing.always(q.shape[1] == k.shape[1])
    if not (is_causal or (options.plain and formula.sees_all(options, q.shape[2], k.shape[2]))):
        shown = _lasting_mask(q, k, options) if known and options.plain else None
        if shown is not None:
            return partial(_fused, shown=shown, gqa=gqa)
        return partial(_masked, gqa=gqa, first_row=first_row, known=known)
    short = q.device.type == "cpu" and not tracing.always(k.shape[2] >= WIDEST_VECTOR)
    return partial(_fused, is_causal=is_causal, gqa=gqa, short=short, known=known)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    gqa: bool,
    shown: Tensor | None = None,
    is_causal: bool = False,
    short: bool = False,
    known: bool = False,
) -> Tensor:
    """o of torch's function.

    shown: a mask or bias. short: without, there are few keys, on a CPU. known: whether the host
    knows what tensors hold.
    """
    o = scaled_dot_product_attention(
        q, k, v, attn_mask=shown, is_causal=is_causal, scale=options.scale, enable_gqa=gqa
    )
    if o.requires_grad:
        _allow_second_derivatives(o, (q, k, v, shown), is_causal, options.scale)
    if not short or (known and torch.count_nonzero(o).item() == o.numel()):
        return o
    return _with_nan(o, q, k, is_causal)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, gqa: bool, first_row: int, known: bool
) -> Tensor:
    """o of a call with a mask or bias. known: as for `_fused`."""
    B, H_q, T_q, _ = q.shape
    T_k = k.shape[2]
    mask = formula.visible(options, B, H_q, T_q, T_k, q.device, first_row=first_row)
    exists = formula.existing_keys(options, T_k, q.device)
    if exists is not None:
        k, v = _harmless(k, exists, known), _harmless(v, exists, known)
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], T_q, T_k)
    bias = options.attn_bias
    if bias is not None:
        bias = bias.expand(*bias.shape[:2], T_q, T_k)
        bias = bias if mask is None else torch.where(mask, bias, float("-inf"))
    shown = mask if bias is None else bias
    o = _fused(q, k, v, options, gqa=gqa, shown=shown)
    if mask is not None and not (known and _is_tame(o)):
        # On a CPU torch gives 0 for rows without keys, unless there is NaN elsewhere; its CUDA
        # kernels differ.
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o


# Most scores of a mask that is kept with a call: 64 KiB in fp32, for one of 1024 calls.
_LASTING = 2**14


def _lasting_mask(q: Tensor, k: Tensor, options: Options) -> Tensor | None:
    """The mask of all calls with these sizes and plain options, to be added to scores.

    None if it is large, or if a row sees no key.
    """
    B, H_q, T_q, _ = q.shape
    T_k = k.shape[2]
    if T_q * T_k > _LASTING:
        return None
    with torch.inference_mode(False):  # no graph could save what inference mode makes
        mask = formula.visible(options, B, H_q, T_q, T_k, q.device)
        if mask is None or not mask.any(-1).all():
            return None
        return torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))


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
        seen = in_keys.cummax(-1).values
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


def _needs_formula(q: Tensor, options: Options) -> bool:
    """Whether the call has more than masks and a bias in q's dtype."""
    bias = options.attn_bias
    return options.weighs or (bias is not None and bias.dtype != q.dtype)


def _is_causal(options: Options) -> bool:
    """Whether the mask is torch's is_causal."""
    return (
        options.plain
        and options.band == (None, 0)
        and options.query_offset is not None
        and tracing.always(options.query_offset == 0)
    )


# Far above activations' norms, and far below overflow in a product of two.
_LARGE = 1e9


def _harmless(x: Tensor, exists: Tensor, known: bool) -> Tensor:
    """x [B, H, T_k, D] with hidden rows zeroed, as their weight of 0 does not remove NaN.

    Zeroing costs a copy. Eagerly on a CPU it is cheaper to check first.
    """
    if known and _is_tame(x):
        return x
    return torch.where(exists[:, None, :, None], x, 0.0)


def _is_tame(x: Tensor) -> bool:
    """Whether x has no NaN, infinity or number that could overflow in a product."""
    norm = torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float))
    return norm.item() < _LARGE
