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
from . import cpu_kernel, dropout, formula, masks
from .derivatives import carried, gradients_by_formula
from .query_chunks import attention_in_tiles, chunks, in_chunks, seen_keys, widened

Results: TypeAlias = Tensor | tuple[Tensor, Tensor]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Options], Results]


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False, first_row: int = 0,
    first_query: int | None = None,
) -> Results:  # fmt: skip
    """`fastattn.attention` or, packed, `attention_varlen`, for checked arguments.

    first_row: b of the first batch row; not 0 for a part. first_query: i of a chunk's first query.
    """
    return bind(q, k, v, options, return_lse, first_row, first_query)(q, k, v, options)


def bind(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False,
    first_row: int = 0, first_query: int | None = None,
) -> Attend:  # fmt: skip
    """The function that computes calls with these layouts and options, whatever tensors hold.

    torch's function supports a mask and a bias on scores, no tangents, and on a CPU an lse and a
    column of scores. Other calls run the formula, in fp32 or wider. Eager calls whose scores or
    masks take much memory, and those that see few keys, run in chunks of queries.
    """
    how: dict[str, Any] = {"return_lse": return_lse, "first_row": first_row}
    ordered = options.batch_invariant and q.numel() and k.numel()
    if not ordered and carried(q, k, v, options) is not None:
        return partial(_with_tangents, **how)
    if options.key2 is not None and options.relative_keys is None:
        return partial(_with_one_product, **how)
    if options.cu_seqlens_q is not None:
        return partial(formula.each_sequence, attention, return_lse=return_lse)
    if ordered:
        return partial(_in_tiles, **how)
    on_host = tracing.host_knows(q)
    beside = cpu_kernel.beside_column(options)
    fits, summed = on_host and cpu_kernel.fits(q, k, v, beside), return_lse or beside is not options
    options = beside if fits else options
    empty = q.numel() == 0 or k.numel() == 0
    by_formula = summed > fits or empty or _needs_formula(q, options)
    step = q.shape[2] if empty or tracing.may_be_traced(q) else _step(q, k, options, by_formula)
    if tracing.always(step < q.shape[2]):
        return partial(_in_chunks, step=step, by_formula=by_formula, **how)
    how["first_query"] = first_query or 0
    if by_formula:
        whole = empty or tracing.may_be_traced(q) or first_query is not None
        step = 0 if whole else _step(q, k, options, True, _FEWER)
        return partial(_by_formula, step=step, **how)
    causal, gqa = _is_causal(options), not tracing.always(q.shape[1] == k.shape[1])
    lower, T_k = causal and options.left is None, k.shape[2]
    skips = causal and fits and T_k > _KEYS_AT_ONCE
    added = None
    if not (options.plain and (lower or masks.sees_all(options, q.shape[2], T_k))):
        added = masks.added_scores(q, T_k, options, first_row, lasting=on_host, is_causal=skips)
    if added is None or added.leaves_all(options):
        if summed:
            return partial(_with_lse, added=None, is_causal=lower, **how)
        wide = tracing.always(T_k >= cpu_kernel.VECTOR)
        # ONNX's operators pass NaN on.
        for_onnx = not on_host and torch.onnx.is_in_onnx_export()
        short = q.is_cpu and not (wide or options.dropout or for_onnx)
        bound = partial(_short, on_host=on_host) if short else _fused
        return partial(bound, is_causal=lower, gqa=gqa)
    if summed:
        return partial(_with_lse, added=added, is_causal=skips, **how)
    complete = on_host and added.is_complete(options)
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


# Scores in memory at once, with tangents: 256 MiB in fp32, and as many tangents.
_WITH_TANGENTS = 2**26


def _with_tangents(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, first_row: int
) -> Results:
    """The formula in chunks: its operations have tangents at every level of torch.func."""
    if options.cu_seqlens_q is not None:
        return formula.each_sequence(attention, q, k, v, options, return_lse)
    elements = q.shape[0] * q.shape[1] * k.shape[2]
    parts = []
    for rows, own in chunks(options, q.shape[2], elements, _WITH_TANGENTS):
        how = {"return_lse": True, "first_row": first_row, "first_query": rows.start}
        parts.append(formula.attention(q[:, :, rows], k, v, own, **how))
    o, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    lse = lse if options.fp32_results else lse.float()
    return (o, lse) if return_lse else o


# Scores, or numbers of masks and biases, in memory at once: above the first, a call runs in chunks
# of the second (8 MiB in fp32), on a CPU. Times as many elsewhere, and times fewer, which stay in a
# cache, of the formula without gradients. Queries of a narrow window's chunk.
_MOST, _AT_ONCE, _ELSEWHERE, _FEWER, _QUERIES = 2**22, 2**21, 32, 4, 256


def _step(q: Tensor, k: Tensor, options: Options, by_formula: bool, fewer: int = 1) -> int:
    """Number of queries to compute at once."""
    (B, H_q, T_q, _), T_k = q.shape, k.shape[2]
    flagged = _is_causal(options) and T_k > _KEYS_AT_ONCE
    made = options._replace(causal=False, right=None) if flagged else options
    of_all = B * H_q if by_formula or options.dropout else masks.copies(made, B, H_q)
    # Keys that a chunk in the middle of many sees.
    keys = seen_keys(options._replace(query_offset=T_k), _QUERIES, 2 * T_k).number
    narrow = 2 * keys <= T_k
    many = of_all * (keys if narrow else T_k)
    many = many if q.is_cpu else -(-many // _ELSEWHERE)
    many *= fewer
    step = T_q if many * T_q <= _MOST else max(1, _AT_ONCE // many)
    return min(step, _QUERIES) if narrow else step


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, step: int, by_formula: bool,
    return_lse: bool, first_row: int,
) -> Results:  # fmt: skip
    """A call in chunks of queries, of the keys that they may see; gradients recompute each."""
    dtype, records = q.dtype, _records(q, k, v, options)
    if by_formula or records:  # sums of gradients are rounded once
        q, k, v = (formula.wide(x, None) for x in (q, k, v))
    options = widened(options)
    drawn: dict[int, Tensor] = {}  # states before torch drew a chunk's dropout

    def attend(*inputs: Any) -> tuple[Tensor, ...]:
        q, k, v, own, first_query = inputs
        keys = seen_keys(own, q.shape[2], k.shape[2])
        call = (q, keys.of(k), keys.of(v), keys.options(own, q.device))
        with torch.random.fork_rng(devices=(), enabled=first_query in drawn):
            if own.dropout and own.dropout_seed is None:
                torch.set_rng_state(drawn.setdefault(first_query, torch.get_rng_state()))
            results = attention(*call, return_lse, first_row, first_query)
        return results if isinstance(results, tuple) else (results,)

    slices = chunks(options, q.shape[2], 1, step)
    of_results = (2, 2) if return_lse else (2,)
    main, dims = (q, k, v), (2, None, None)
    o, *lse = in_chunks(attend, main, dims, of_results, options, slices, records=records)
    o = o if options.fp32_results else o.to(dtype)
    return (o, *lse) if return_lse else o  # type: ignore[return-value]


def _by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    step: int = 0,
    first_query: int = 0,
    **how: Any,
) -> Results:
    if 0 < step < q.shape[2] and not _records(q, k, v, options):
        return _in_chunks(q, k, v, options, step=step, by_formula=True, **how)
    results = formula.attention(q, k, v, options, first_query=first_query, **how)
    if not isinstance(results, tuple) or options.fp32_results:
        return results
    return results[0], results[1].float()


@tracing.without_autocast
def _fused(
    q: Tensor, k: Tensor, v: Tensor, options: Options, shown: Tensor | None = None, *,
    is_causal: bool, gqa: bool,
) -> Tensor:  # fmt: skip
    """o of torch's function with a mask or bias, or is_causal; of its CPU kernel with both.

    The function also drops weights without a seed.
    """
    alike = not is_causal and (shown is None or shown.shape[1] == 1)
    if gqa and alike and q.shape[2] == 1 and tracing.host_knows(q):
        # Heads as queries of their key head, which torch does not copy then.
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        o = _fused(rows, k, v, options, shown, is_causal=False, gqa=False)
        return o.reshape(*q.shape[:3], -1)
    if q.dtype != torch.float32 and tracing.host_knows(q) and cpu_kernel.in_fp32(q, k, v, shown):
        if shown is not None and shown.is_floating_point():
            shown = shown.float()
        flags: dict[str, Any] = {"is_causal": is_causal, "gqa": gqa}
        return _fused(q.float(), k.float(), v.float(), options, shown, **flags).to(q.dtype)
    if is_causal and shown is not None:
        o, _, _ = cpu_kernel.attention(q, k, v, shown, None, True, options)
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
    if on_host and cpu_kernel.fills_rows(o):
        return o
    return _with_nan(o, q, k, is_causal)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, added: masks.AddedScores, on_host: bool,
    complete: bool, gqa: bool,
) -> Tensor:  # fmt: skip
    """o of a call with a mask or bias.

    on_host: as for `_short`. complete: `AddedScores.is_complete`.
    """
    if complete or (on_host and not options.dropout):
        shown = added.quickly(options)
        o = _fused(q, k, v, options, shown, is_causal=added.is_causal, gqa=gqa)
        if complete or _is_sound(o, k, v, options):
            return o
    shown, mask = added.exactly(options)
    o = _fused(q, *_existing(k, v, options), options, shown, is_causal=False, gqa=gqa)
    if mask is not None:
        # On a CPU torch gives 0 for rows without keys, unless there is NaN elsewhere; its CUDA
        # kernels differ.
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o


def _records(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether autograd records the call."""
    inputs = (q, k, v, *options.differentiable, *options.mod_tensors)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, added: masks.AddedScores | None,
    is_causal: bool, return_lse: bool, **how: int,
) -> Results:  # fmt: skip
    """o and lse of torch's CPU kernel. added: of a call with a mask or bias."""
    dtype, records = q.dtype, _records(q, k, v, options)
    if records or cpu_kernel.in_fp32(q, k):
        q, k, v = (formula.wide(x, None) for x in (q, k, v))
    compute = partial(cpu_kernel.differentiable if records else cpu_kernel.attention, q)
    o, lse, odd = compute(k, v, added and added.quickly(options), None, is_causal, options)
    if added is not None and not (odd is None and _is_sound(o, k, v, options)):
        shown, mask = added.exactly(options)
        if shown is not None and shown.dtype == torch.bool:
            shown = masks.added(shown, q.dtype)
        blind = None if mask is None else ~mask.any(-1).expand(lse.shape)
        o, lse, odd = compute(*_existing(k, v, options), shown, blind, False, options)
    if odd is not None:
        exact_o, exact_lse = _by_formula(q, k, v, options, return_lse=True, **how)
        if records:
            o, lse = exact_o, exact_lse
        else:
            o, lse = torch.where(odd[..., None], exact_o, o), torch.where(odd, exact_lse, lse)
    o = o.to(dtype)
    return (o, lse.float().contiguous()) if return_lse else o


def _existing(k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Keys and values, 0 where they are padding."""
    exists = masks.existing_keys(options, k.shape[2], k.device)
    if exists is None:
        return k, v
    k, v = (torch.where(exists[:, None, :, None], x, 0.0) for x in (k, v))
    return k, v


# torch's function has an argument for a mask or is_causal alone, and returns no lse. With both its
# kernel skips blocks of so many keys; a mask alone is faster where there is one block.
_KEYS_AT_ONCE = 512


def one_product(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor, Options]:
    """Convert a call with two products to one over longer rows, with key2 expanded to k's heads."""
    query, key = options.query2, options.key2
    assert query is not None and key is not None
    # Heads are dim 1 in packed sequences too.
    key = key.repeat_interleave(k.shape[1] // key.shape[1], 1)
    options = options._replace(query2=None, key2=None)
    return torch.cat((q, query), -1), torch.cat((k, key), -1), options


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
        options = cpu_kernel.of_mask(shown, is_causal, scale)

        def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return (formula.attention(q, k, v, options._replace(attn_bias=bias)),)  # type: ignore[return-value]

        tensors = q, k, v, options.attn_bias
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
    return not _needs_formula(q, options) and carried(q, k, v, options) is None


def _needs_formula(q: Tensor, options: Options) -> bool:
    """Whether the call has more than masks, biases, off a CPU in q's dtype, and torch's dropout."""
    if options.dropout and options.dropout_seed is None:
        options = options._replace(dropout=0)
    # Inside a transform torch's kernel does not see that a bias requires a gradient outside.
    if tracing.transforming() and any(x is not None for x in options.differentiable):
        return True
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
