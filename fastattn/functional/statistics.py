"""Statistics of attention weights: entropy, weight received, largest weights and scores."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, dispatch
from ..cache.views import view_of_cache
from ..ops import statistics as kernels
from ..options import Options
from ..torch_backend import dropout
from ..torch_backend import statistics as formula
from ..torch_backend import torch_attention as torch_backend
from ..torch_backend.decode import in_order
from ..torch_backend.torch_attention import one_product
from . import call_options, inputs
from .decode import check_query

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import AttentionArguments

# Size of a kernel's list of each row in registers.
MAX_TOP = 64
# Elements of `attention_weights`' result: 256 MiB.
MAX_ELEMENTS = 2**26


class AttentionStatistics(NamedTuple):
    """Results of `attention_statistics`: fp32 tensors, fp64 for inputs in fp64.

    Attributes:
        entropy: [B, H_q, T_q], of each query's weights, in nats: between 0 (one key has all the
            weight) and the log of the number of visible keys. 0 for a query without keys.
        received: [B, H_q, T_k], total weight of each key over the queries. Their sum is T_q if
            every query sees a key and there are no sinks.
        top_weights: [B, H_q, T_q, top], the largest weights of each query, the largest first.
        top_positions: int64 [B, H_q, T_q, top], their keys; of equal scores the first key comes
            first. Padded with weight 0 and position -1.
        distance: [B, H_q, T_q], weighted mean of |p - j|.
    """

    entropy: Tensor
    received: Tensor
    top_weights: Tensor
    top_positions: Tensor
    distance: Tensor


def attention_statistics(
    q: Tensor,
    k: Any,
    *,
    lse: Tensor | None = None,
    top: int = 0,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> AttentionStatistics:
    """Statistics of the weights of `attention`, without a [T_q, T_k] tensor.

    Weights as in `attention` with the same arguments. A sink is one more key in the entropy and
    takes its share of the weights, but is not listed. A key with score -inf, by an attn_bias or
    score_mod, counts as not visible.

    All but top_positions are differentiable in q, k, lse and learned options: with every backend
    the backward runs on torch in chunks of queries. Double backward holds all scores, as do
    gradients in torch.func and torch.compile. For plain scores scale * q.k the following computes
    the entropy by kernels, forward and backward:
    `lse - scale * (q * attention(q, k, k)).sum(-1)`.

    Args:
        q: [B, H_q, T_q, D], as for `attention`.
        k: [B, H_k, T_k, D]; or a cache (no ring) that ends with the T_q queries' own tokens, as for
            `decode_attention`. It is causal by default, T_k is its length_bound, keys are in the
            order of their positions, and pages and codes are copied.
        lse: float [B, H_q, T_q], from `attention` with return_lse=True and the same arguments, to
            save recomputing it. It may include more keys, such as other devices': every sum is then
            these keys' share. If it does not require grad, nor do the results.
        top: number of largest weights of each query to list, 0 to 64. There are kernels for 0, for
            1 and 2, and for each power of two.
        backend: as for `attention`; `fastattn.explain(q, k, k, ...)` reports the choice.
        options: as for `attention`, except dropout. batch_invariant has no effect.

    Returns:
        An `AttentionStatistics`.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    top = checks.check_count("top", top, 0)
    if top > MAX_TOP:
        raise ValueError(f"top must be at most {MAX_TOP}, got {top}")
    with torch.set_grad_enabled(_learns(lse)):
        q, k, lse, checked, served = _prepared("attention_statistics", q, k, lse, backend, options)
    compute = formula.attention_statistics if served == "torch" else kernels.attention_statistics
    return AttentionStatistics(*_computed(compute, formula.of_rows, q, k, lse, top, checked))


def attention_weights(
    q: Tensor,
    k: Any,
    *,
    lse: Tensor | None = None,
    max_elements: int = MAX_ELEMENTS,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor:
    """All weights of `attention`, for shapes where they fit in memory.

    Differentiable as those of `attention_statistics`.

    Args:
        q, k, lse, backend, options: as for `attention_statistics`.
        max_elements: limit on the size of the result.

    Returns:
        fp32 (fp64 for q in fp64) [B, H_q, T_q, T_k]. Rows sum to 1, with sinks to less, and to 0
        for queries without keys.

    Raises:
        TypeError, ValueError: as `attention`, or the result exceeds max_elements.
    """
    max_elements = checks.check_count("max_elements", max_elements, 0)
    with torch.set_grad_enabled(_learns(lse)):
        q, k, lse, checked, served = _prepared("attention_weights", q, k, lse, backend, options)
    shape = (*q.shape[:3], k.shape[2])
    elements = shape[0] * shape[1] * shape[2] * shape[3]
    if elements > max_elements:
        raise ValueError(
            f"attention_weights would have shape {list(shape)}, {elements} numbers, more than "
            f"max_elements={max_elements}; attention_statistics needs no such tensor"
        )
    compute = formula.attention_weights if served == "torch" else _weights_by_kernels
    return _computed(compute, formula.attention_weights, q, k, lse, 0, checked)[0]


def _weights_by_kernels(
    q: Tensor, k: Tensor, lse: Tensor | None, _: int, options: Options
) -> tuple[Tensor]:
    return (kernels.attention_weights(q, k, lse, options),)


def _learns(lse: Tensor | None) -> bool:
    """Whether results may have gradients: an lse without one makes them constants."""
    return torch.is_grad_enabled() and (lse is None or getattr(lse, "requires_grad", False))


def _computed(
    compute: Any, of_some: Any, q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, ...]:
    """compute(q, k, lse, top, options), with the gradients of `of_some` where they are wanted."""
    tensors = (q, k, lse, *options.differentiable)
    if _learns(lse) and any(x is not None and x.requires_grad for x in tensors):
        return formula.differentiable(compute, of_some, q, k, lse, top, options)
    with torch.no_grad():
        results: tuple[Tensor, ...] = compute(q, k, lse, top, options)
        return results


def _prepared(
    name: str, q: Tensor, k: Any, lse: Tensor | None, backend: str | None, arguments: Any
) -> tuple[Tensor, Tensor, Tensor | None, Options, str]:
    """q, k and lse for the backend, the checked options, and the backend."""
    if arguments.get("dropout"):
        raise TypeError(f"{name} does not support dropout: it reports weights before dropout")
    if k is not None and not isinstance(k, Tensor):
        k, arguments = _of_cache(name, q, k, arguments)
    call_options.DENSE._replace(name=name).refuse_others(arguments)
    checks.check_tensors(q, k, k)
    q, k, _, arguments = inputs.autocast(q, k, k, arguments)
    # Without values, as k could be taken for latents.
    options = call_options.dense_options(q, k, k.new_zeros(1).expand(k.shape), **arguments)
    options = options._replace(batch_invariant=False)  # a promise of o and lse
    if lse is not None:
        checks.check_input("lse", lse, "float", "B H_q T_q", q, checks.sizes_of(q))
        lse = lse.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
    if options.key2 is not None and options.relative_keys is None:
        q, k, options = one_product(q, k, options)
    choice = dispatch.choose(q, k, k, options, backend, family="statistics")
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        return q, k, lse, options, choice.backend
    q, k = inputs.kernel_rows(q), inputs.kernel_rows(k)
    return q, k, lse, inputs.kernel_options(options), choice.backend


def _of_cache(
    name: str, q: Tensor, cache: Any, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Keys of a cache by their positions, and the options of a call with these."""
    view, uniform = view_of_cache(cache, "k")
    call_options.CACHE._replace(name=f"{name} of a cache").refuse_others(arguments)
    check_query(q, view)
    if view.window is not None:
        raise ValueError(f"k must hold every token, got a ring of window={view.window}")
    # Values are not read: a column of the keys stands for them.
    keys = view._replace(v=view.k[..., :1], v_scale=None)
    k, _, placed = in_order(keys, Options(), q.shape[2], uniform)
    options = {"causal": True, **arguments, "query_offset": placed.query_offset}
    if placed.query_offsets is not None:
        options |= {"query_offset": placed.query_offsets, "key_lengths": placed.key_lengths}
        options["key_padding_mask"] = placed.key_padding_mask
    for per_key in ("attn_mask", "attn_bias"):
        if options.get(per_key) is not None:
            options[per_key] = options[per_key][..., : k.shape[2]]
    return k, options


def check_max(options: Options) -> None:
    """Raise ValueError if return_max changes the order of a sum that batch_invariant promises."""
    if options.batch_invariant and options.sinks is not None:
        raise ValueError(
            "return_max cannot be combined with batch_invariant and sinks, which come last"
        )


def attention_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, backend: str | None
) -> tuple[Tensor, ...]:
    """`attention` or `attention_varlen` with return_max=True, for checked arguments."""
    check_max(options)
    options = dropout.seeded(options, q.device)
    choice = dispatch.choose(
        q, k, v, options, backend, among=dispatch.BACKENDS, also=("return_max",)
    )
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        o, lse = torch_backend.attention(q, k, v, options, True)
        with torch.no_grad():
            largest = formula.largest_scores(q, k, options)
        largest = largest.detach() if q.dtype == torch.float64 else largest.detach().float()
    else:
        _, options = dispatch.launched(choice, q, k, v, options)
        options = inputs.kernel_options(options)
        rows = (inputs.kernel_rows(q), inputs.kernel_rows(k), inputs.kernel_rows(v))
        o, lse, largest = kernels.attend_with_max(*rows, options, choice.backend)
        o = o[..., : v.shape[-1]]
    return (o, lse, largest) if return_lse else (o, largest)
