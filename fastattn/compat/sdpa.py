"""`torch.nn.functional.scaled_dot_product_attention`, served by the kernels where possible.

The contract is exactly torch's: top-left causal masks, broadcasting and errors. Calls that the
kernels cannot serve or torch would refuse go unchanged to torch's own function.
"""

import math
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import checks, dispatch
from ..dispatch import Explanation
from ..functional import fused_attention, inputs
from ..options import Options
from ..tracing import decided
from .torch_sdpa import by_overrides, overridden
from .torch_sdpa import torch_attention as torch_attention

_NO_OPTIONS = Options()
LOWEST_BIAS = -1e38


class Arguments(NamedTuple):
    """Arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of_call(cls, *arguments: Any, **options: Any) -> "Arguments":
        """Bind a call; its errors are those of a function with torch's signature."""
        if len(arguments) > 6:
            raise TypeError(
                "scaled_dot_product_attention takes 6 positional arguments at most: scale and "
                f"enable_gqa go by name, got {len(arguments)}"
            )
        return cls(*arguments, **options)


class _Call(NamedTuple):
    """A translated call of `fastattn.attention`, and the shape of torch's result.

    split: a leading dim whose entries need separate calls, see `_uneven`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    shape: tuple[int, ...]
    split: int | None = None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by the kernels, else by torch
    itself.

    Args:
        query: [..., H_q, L, E], with any number of leading dims, which broadcast as in torch.
        key: [..., H, S, E].
        value: [..., H, S, E_v].
        attn_mask: bool (True = attend) or float (added to the scores; differentiable), broadcasting
            to [..., H_q, L, S]; or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: probability to drop a weight, applied whenever it is above 0. The kernels use
            torch's generator but draw other bits.
        is_causal: query i sees keys j <= i, for any L and S.
        scale: factor on the products; default E ** -0.5.
        enable_gqa: query head h reads key and value head h // (H_q // H).

    Returns:
        [..., H_q, L, E_v] in query's dtype. A query that sees no key has 0.

    Raises:
        Exception: torch's errors.
    """
    arguments = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    served = served_attention(arguments)
    return by_torch(arguments) if isinstance(served, str) else served


def served_attention(arguments: Arguments) -> Tensor | str:
    """Compute `scaled_dot_product_attention` by the kernels, or return why they do not serve it."""
    arguments = _decided(arguments)
    call = _translated(arguments)
    if isinstance(call, str):
        return call
    if call.split is not None:
        outputs: list[Any] = [served_attention(x) for x in _parts(arguments, call)]
        return torch.stack(outputs, call.split)
    return fused_attention.attention(call.q, call.k, call.v, **call.options).reshape(call.shape)


def _decided(arguments: Arguments) -> Arguments:
    """Resolve flags that are comparisons of symbolic sizes under torch.compile."""
    if not torch.compiler.is_compiling():
        return arguments
    is_causal, enable_gqa = (
        decided(x) if isinstance(x, (bool, torch.SymBool)) else x
        for x in (arguments.is_causal, arguments.enable_gqa)
    )
    return arguments._replace(is_causal=is_causal, enable_gqa=enable_gqa)


def by_torch(arguments: Arguments) -> Tensor:
    """Call torch's own function, even while patched: overrides and CausalBias see torch's."""
    *call, scale, enable_gqa = _decided(arguments)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    mask = arguments.attn_mask
    if overridden(arguments.query, arguments.key, arguments.value, _without_causal_bias(mask)):
        return by_overrides(*call, **options)
    if _causal_bias(mask) is not None:
        # As its __torch_function__, which looks up torch's function by name.
        expanded: Tensor = type(mask)._dispatch(*call, **options)
        return expanded
    return torch_attention(*call, **options)


def explain(*arguments: Any, **options: Any) -> Explanation:
    """Explain the backend of a call of `scaled_dot_product_attention`, and why not faster ones.

    "torch" means torch's own function. Computes nothing.
    """
    bound = Arguments.of_call(*arguments, **options)
    call = _translated(bound)
    while isinstance(call, _Call) and call.split is not None:
        bound = _parts(bound, call)[0]
        call = _translated(bound)
    if isinstance(call, str):
        return Explanation("torch", {"triton": call})
    return fused_attention.explain(call.q, call.k, call.v, **call.options)


def _translated(arguments: Arguments) -> _Call | str:
    """Translate the call, or return why torch's own function has to serve it."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    # torch also takes numpy's numbers and 0-dim tensors.
    dropout_p, scale = checks.as_python(dropout_p), checks.as_python(scale)
    reason = _not_plain(query, key, value, attn_mask)
    reason = reason or _odd_numbers(dropout_p, is_causal, scale, enable_gqa)
    mask = {"attn_mask": _without_causal_bias(attn_mask)}
    # torch's fused kernels have no tangents: any backend serves calls with them.
    if reason is None and not inputs.duals(query, key, value, mask):
        forced = os.environ.get(dispatch.ENVIRONMENT) == "torch"
        reason = f'{dispatch.ENVIRONMENT} is "torch"' if forced else None
        reason = reason or dispatch.why_not_triton(query, key, value, _NO_OPTIONS)
    if reason is not None:
        return reason
    heads = _in_four_dims(query, key, value, enable_gqa)
    if isinstance(heads, str):
        return heads
    q, k, v, batch = heads
    options: dict[str, Any] = {"causal": is_causal, "query_offset": 0}
    split = None
    if attn_mask is not None:
        # Shape that torch adds the mask to, without leading dims of value alone.
        leading = _common(query.shape[:-3], key.shape[:-3])
        assert leading is not None, "value fits too"
        H = () if query.dim() == 2 else (max(query.shape[-3], key.shape[-3]),)
        scores = (*leading, *H, query.shape[-2], key.shape[-2])
        masked = _mask_options(attn_mask, is_causal, query, scores)
        if isinstance(masked, str):
            return masked
        options.update(masked)
        split = _uneven(attn_mask.shape[:-3], batch)
    if scale is not None:
        options["scale"] = scale
    if dropout_p:
        options["dropout"] = dropout_p
    heads_dim = (q.shape[1],) if query.dim() > 2 else ()
    return _Call(q, k, v, options, (*batch, *heads_dim, q.shape[2], v.shape[3]), split)


def _uneven(leading: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    """Find the shortest leading dim, if a mask broadcasts over some of them but not all.

    A pair bias [B, 1, H, L, S] for query [B, N, H, L, E] is one: as rows of [B * N, H, L, S], it
    would be copied N times.
    """
    leading = (1,) * (len(batch) - len(leading)) + leading
    dims = [n for n, size in enumerate(batch) if size != 1]
    if len({leading[n] == 1 for n in dims}) < 2:
        return None
    return batch.index(min(batch[n] for n in dims))


def _parts(arguments: Arguments, call: _Call) -> list[Arguments]:
    """Split a call along a leading dim."""
    dim, rank = call.split, len(call.shape)
    assert dim is not None
    sizes = [-1] * rank
    sizes[dim] = call.shape[dim]
    tensors = (x[(None,) * (rank - x.dim())].expand(sizes).unbind(dim) for x in arguments[:4])
    return [
        arguments._replace(query=q, key=k, value=v, attn_mask=mask)
        for q, k, v, mask in zip(*tensors, strict=True)
    ]


def _not_plain(*tensors: Tensor | None) -> str | None:
    """Reason that torch's dispatcher must handle these arguments, or None."""
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter, type(None)) or _causal_bias(x) is not None:
            if x is not None and (x.is_nested or x.layout is not torch.strided):
                return "an argument is nested or sparse"
        elif not isinstance(x, Tensor):
            return "an argument is no tensor"
        elif is_traceable_wrapper_subclass(x) or has_torch_function((x,)):
            return f"an argument is a {type(x).__name__}"
    override = overridden(*map(_without_causal_bias, tensors))
    return None if override is None else f"{override} wants to see the call"


def _odd_numbers(
    dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> str | None:
    """Reason that the kernels do not serve the non-tensor arguments, or None."""
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "is_causal or enable_gqa is no bool"
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        return "dropout_p is no float"
    if not 0 <= dropout_p < 1:
        return f"dropout_p is {dropout_p}"
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return "scale is no float"
    return None if 0 < scale < math.inf else f"scale is {scale}"


def _in_four_dims(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]] | str:
    """q, k, v as [B, H, T, D] and the leading dims in B, or why that is impossible."""
    dims = query.dim()
    if dims < 2 or key.dim() != dims or value.dim() != dims:
        return "query, key and value differ in dimensions, or have fewer than 2"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "query, key and value differ in dtype"
    if key.device != query.device or value.device != query.device:
        return "query, key and value differ in device"
    if key.shape[-1] != query.shape[-1] or value.shape[-2] != key.shape[-2]:
        return "query, key and value do not fit together"
    if query.numel() == 0 or key.numel() == 0 or value.numel() == 0:
        return "an argument is empty"
    if dims == 2:
        if enable_gqa:
            return "enable_gqa without a dimension of heads"
        return query[None, None], key[None, None], value[None, None], ()
    heads = _head_counts(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa)
    batch = _common(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if heads is None or batch is None:
        return "heads or leading dimensions do not fit together"
    leading = [(*batch, count) for count in heads]
    q, k, v = (
        x if x.shape[:-2] == sizes else x.expand(*sizes, *x.shape[-2:])
        for x, sizes in zip((query, key, value), leading, strict=True)
    )
    if dims == 4:
        return q, k, v, batch
    if dims == 3:
        return q[None], k[None], v[None], batch
    return q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4), batch


def _head_counts(H_q: int, H_k: int, H_v: int, enable_gqa: bool) -> tuple[int, int, int] | None:
    """Heads of q, k and v after expansion; None = not for the kernels, or an error."""
    if enable_gqa:
        return (H_q, H_k, H_v) if H_k == H_v and H_q % H_k == 0 else None
    # Multi-query attention broadcasts one key and value head by itself.
    if H_k == H_v == 1:
        return H_q, 1, 1
    common = max(H_q, H_k, H_v)
    return (common,) * 3 if _common((H_q,), (H_k,), (H_v,)) is not None else None


def _common(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape that shapes of equal length broadcast to, or None."""
    shape = []
    for sizes in zip(*shapes, strict=True):
        size = next((size for size in sizes if size != 1), 1)
        if any(other not in (1, size) for other in sizes):
            return None
        shape.append(size)
    return tuple(shape)


def _mask_options(
    mask: Any,
    is_causal: bool,
    query: Tensor,
    scores: tuple[int, ...],
) -> dict[str, Any] | str:
    """Translate attn_mask to options of `attention`; scores: the shape that torch adds it to."""
    if is_causal:
        return "attn_mask and is_causal are both given"
    if (bias := _causal_bias(mask)) is not None:
        if (mask.seq_len_q, mask.seq_len_kv) != scores[-2:]:
            return "attn_mask is a CausalBias of other lengths"
        aligned_right = mask.variant == bias.CausalVariant.LOWER_RIGHT
        return {"causal": True, "query_offset": scores[-1] - scores[-2] if aligned_right else 0}
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask is {mask.dtype}"
    if mask.device != query.device:
        return f"attn_mask is on {mask.device}"
    if not 2 <= mask.dim() <= len(scores):
        return f"attn_mask has {mask.dim()} dimensions"
    sizes = zip(mask.shape, scores[-mask.dim() :], strict=True)
    if any(size not in (1, full) for size, full in sizes):
        return "attn_mask does not broadcast to the scores"
    # Of all leading dims or of none, as `_uneven` saw.
    mask = mask.flatten(0, -4) if mask.dim() > 4 else mask
    if mask.dtype == torch.bool:
        return {"attn_mask": mask}
    return {"attn_bias": bounded_bias(mask)}


def _causal_bias(mask: object) -> Any:
    """Return torch.nn.attention.bias if mask is its CausalBias, else None."""
    # Importing it would import torch._dynamo, which takes a second; a CausalBias exists only after.
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias if bias is not None and isinstance(mask, bias.CausalBias) else None


def _without_causal_bias(mask: Any) -> Any:
    return None if _causal_bias(mask) is not None else mask


def bounded_bias(bias: Tensor) -> Tensor:
    """Bound a bias: its finite entries stay finite in the kernels, which multiply by log2(e)."""
    # Models mask with the lowest number of a dtype, and torch's output for a fully masked row is
    # the mean of the values.
    if bias.dtype == torch.float16:
        return bias
    return torch.where(bias == -math.inf, bias, bias.clamp(min=LOWEST_BIAS))
