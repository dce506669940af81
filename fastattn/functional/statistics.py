"""Statistics of attention: entropies, weight received, largest weights and scores, the weights."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, dispatch
from ..ops import statistics as kernels
from ..options import Options
from ..torch_backend import attend as torch_backend
from ..torch_backend import dropout
from ..torch_backend import statistics as formula
from ..torch_backend.attend import one_product
from . import call_options, inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import AttentionArguments

# Of the list that a kernel keeps of each row in registers.
MAX_TOP = 64
# Of the tensor that `attention_weights` makes: 256 MiB.
MAX_ELEMENTS = 2**26


class AttentionStatistics(NamedTuple):
    """Results of `attention_statistics`: fp32 tensors, fp64 for inputs in fp64.

    Attributes:
        entropy: [B, H_q, T_q], of the weights of each query, in nats: between 0 (one key has all
            the weight) and the log of the number of keys that it sees. 0 for a query that sees
            none.
        received: [B, H_q, T_k], the weights of each key added up over the queries. They come to T_q
            if every query sees a key and there are no sinks.
        top_weights: [B, H_q, T_q, top], the largest weights of each query, the largest first.
        top_positions: int64 [B, H_q, T_q, top], their keys; of equal scores the first key comes
            first. Where a query sees fewer keys than `top`, the rest has weight 0 and position -1.
        distance: [B, H_q, T_q], how far each query looks: the mean of |p - j| by its weights.
    """

    entropy: Tensor
    received: Tensor
    top_weights: Tensor
    top_positions: Tensor
    distance: Tensor


def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    lse: Tensor | None = None,
    top: int = 0,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> AttentionStatistics:
    """Statistics of the weights that `attention` gives the keys; no [T_q, T_k] tensor is made.

    Weights are those of `attention` with the same arguments. With sinks, the sink is one more key
    in the entropy and takes its share of the weights, but is none of the keys that are listed. A
    key whose score is -inf, by an attn_bias or score_mod, counts as not seen.

    All but top_positions are differentiable in q, k, lse and the options that learn: the backward
    is torch's formula in chunks of queries, by every backend, and has no derivative of its own. Of
    scores that are scale * q.k alone the entropy is, by kernels both ways,
    `lse - scale * (q * attention(q, k, k)).sum(-1)`.

    Args:
        q: [B, H_q, T_q, D], as for `attention`.
        k: [B, H_k, T_k, D].
        lse: float [B, H_q, T_q], as `attention` with return_lse=True gave it for the same
            arguments, which saves computing it again. With the lse of more keys than these, as
            where they are divided among devices, every sum is the part of these keys. One that does
            not require grad leaves the results without gradient.
        top: how many of the largest weights of each query to list, 0 to 64. A first call compiles
            a kernel for 0, for 1 and 2, and for each power of two, which serves all tops to it.
        backend: as for `attention`; `fastattn.explain(q, k, k, ...)` tells which one serves.
        options: those of `attention`, except dropout.

    Returns:
        An `AttentionStatistics`.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    top = checks.check_count("top", top, 0)
    if top > MAX_TOP:
        raise ValueError(f"top must be at most {MAX_TOP}, got {top}")
    learns = torch.is_grad_enabled() and (lse is None or lse.requires_grad)
    with torch.set_grad_enabled(learns):
        q, k, lse, checked, served = _prepared("attention_statistics", q, k, lse, backend, options)
    compute = formula.attention_statistics if served == "torch" else kernels.attention_statistics
    inputs = (q, k, lse, *checked.differentiable)
    if learns and any(x is not None and x.requires_grad for x in inputs):
        return AttentionStatistics(*formula.differentiable(compute, q, k, lse, top, checked))
    with torch.no_grad():
        return AttentionStatistics(*compute(q, k, lse, top, checked))


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    lse: Tensor | None = None,
    max_elements: int = MAX_ELEMENTS,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor:
    """The weights that `attention` gives every key, for shapes where they fit into memory.

    Not differentiable: inputs that require grad are read as if detached.

    Args:
        q, k, lse, backend, options: as for `attention_statistics`.
        max_elements: how many numbers the result may have.

    Returns:
        fp32 (fp64 for q in fp64) [B, H_q, T_q, T_k]. Rows add up to 1, with sinks to less, and to 0
        where a query sees no key.

    Raises:
        TypeError, ValueError: as `attention`, and a result of more than max_elements numbers.
    """
    max_elements = checks.check_count("max_elements", max_elements, 0)
    with torch.no_grad():
        q, k, lse, checked, served = _prepared("attention_weights", q, k, lse, backend, options)
        shape = (*q.shape[:3], k.shape[2])
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        if elements > max_elements:
            raise ValueError(
                f"attention_weights would have shape {list(shape)}, {elements} numbers, more than "
                f"max_elements={max_elements}; attention_statistics needs no such tensor"
            )
        if served == "torch":
            return formula.attention_weights(q, k, lse, checked)
        return kernels.attention_weights(q, k, lse, checked)


def _prepared(
    name: str,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    backend: str | None,
    given: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Options, str]:
    """q, k and lse as the backend takes them, the checked options, and the backend."""
    if given.get("dropout"):
        raise TypeError(f"{name} takes no dropout: it tells of the weights before it")
    call_options.DENSE._replace(name=name).refuse_others(given)
    checks.check_tensors(q, k, k)
    q, k, _, given = inputs.autocast(q, k, k, given)
    # There are no values, which else might be latents.
    options = call_options.dense_options(q, k, k.new_empty(1).expand(k.shape), **given)
    if lse is not None:
        checks.check_floats("lse", lse)
        checks.check_placement("lse", lse, tuple(q.shape[:3]), q)
        lse = lse.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
    if options.key2 is not None and options.relative_keys is None:
        q, k, options = one_product(q, k, options)
    choice = dispatch.choose(q, k, k, options, backend, family="statistics")
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        return q, k, lse, options, choice.backend
    q, k = inputs.kernel_rows(q), inputs.kernel_rows(k)
    return q, k, lse, inputs.kernel_options(options), choice.backend


def attention_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, backend: str | None
) -> tuple[Tensor, ...]:
    """`attention` or `attention_varlen` with return_max=True, of checked arguments."""
    if options.dropout and options.dropout_seed is None:
        options = options._replace(dropout_seed=dropout.draw_seed(q.device))
    choice = dispatch.choose(q, k, v, options, backend)
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        o, lse = torch_backend.attention(q, k, v, options, True)
        with torch.no_grad():
            largest = formula.largest_scores(q, k, options)
        largest = largest.detach() if q.dtype == torch.float64 else largest.detach().float()
    else:
        _, options = dispatch.launched(choice, q, v, options)
        options = inputs.kernel_options(options)
        rows = (inputs.kernel_rows(q), inputs.kernel_rows(k), inputs.kernel_rows(v))
        o, lse, largest = kernels.attend_with_max(*rows, options)
        o = o[..., : v.shape[-1]]
    return (o, lse, largest) if return_lse else (o, largest)
