"""Attention with the scoring functions of its literature, in place of the scaled dot product.

    dot product      q . k                        Luong et al. 2015 (arXiv 1508.04025), "dot"
    multiplicative   k^T W q                      the same, "general"
    additive         u^T tanh(W_q q + W_k k)      Bahdanau et al. 2015 (arXiv 1409.0473)

Luong's "concat", u^T tanh(W [q; k]), is the additive one with W_q and W_k the halves of W.
"""

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .. import checks, dispatch
from ..ops import additive as additive_ops
from ..options import Options
from ..torch_backend import additive as additive_formula
from ..torch_backend import formula
from . import arguments, attend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import AttentionArguments, MaskArguments


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with the score q . k, not scaled (Luong et al. 2015, "dot").

    Args:
        q: [B, H_q, T_q, D].
        k: [B, H_k, T_k, D].
        v: [B, H_k, T_k, D_v].
        return_lse, backend, options: as for `attention`; scale is not among them.

    Returns:
        As `attention`; differentiable likewise.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    return _unscaled("dot_product_attention", q, k, v, return_lse, backend, options)


def multiplicative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with the score k^T W q (Luong et al. 2015, "general").

    Queries are projected by W to the width of the keys; then the kernels take their dot product.

    Args:
        q: [B, H_q, T_q, D_q].
        k: [B, H_k, T_k, D_k].
        v: [B, H_k, T_k, D_v].
        weight: W in q's dtype, [D_k, D_q] as an nn.Linear(D_q, D_k) has it, or [H_q, D_k, D_q], one
            for each head; differentiable.
        return_lse, backend, options: as for `attention`; scale is not among them.

    Returns:
        As `attention`; differentiable in q, k, v and weight.

    Raises:
        TypeError, ValueError: as `attention`, or a weight of another dtype, shape or device.
    """
    checks.check_tensors(q, k, v)
    q = _projected("weight", weight, "q", q, k.shape[-1])
    return _unscaled("multiplicative_attention", q, k, v, return_lse, backend, options)


def _unscaled(
    name: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, backend: str | None,
    options: "AttentionArguments",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if "scale" in options:
        raise TypeError(f"{name} takes no scale: its score is not scaled")
    options["scale"] = 1.0
    if return_lse:
        return attend.attention(q, k, v, return_lse=True, backend=backend, **options)
    return attend.attention(q, k, v, backend=backend, **options)


@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = ...,
    w_key: Tensor | None = ..., *, return_lse: Literal[False] = ..., backend: str | None = ...,
    **masks: "Unpack[MaskArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = ...,
    w_key: Tensor | None = ..., *, return_lse: Literal[True], backend: str | None = ...,
    **masks: "Unpack[MaskArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@arguments.ADDITIVE.sign
def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    w_query: Tensor | None = None,
    w_key: Tensor | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **masks: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(u^T tanh(W_q q + W_k k)) v, fused (Bahdanau et al. 2015).

    The kernels take the scores of a tile one hidden column at a time, forward and backward: memory
    is linear in T, and the [T_q, T_k, hidden] that the formula speaks of is never held. Time is
    B * H_q * T_q * T_k * hidden tanh, without matrix units.

    Args:
        q: [B, H_q, T_q, D_q], fp16, bf16, fp32 or fp64.
        k: [B, H_k, T_k, D_k], likewise; H_k divides H_q, K/V heads are shared as in `attention`.
        v: [B, H_k, T_k, D_v].
        u: [hidden], or [H_q, hidden] for one a head, any float dtype.
        w_query: W_q in q's dtype, [hidden, D_q] as an nn.Linear(D_q, hidden) has it, or
            [H_q, hidden, D_q]. None: q is projected already, D_q = hidden (a bias can be added to
            it then).
        w_key: W_k, [hidden, D_k] or [H_k, hidden, D_k]. None: k is projected already.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto", as for `attention`.
        masks: causal, window, prefix_lengths, keep_first, stride, key_padding_mask, key_lengths,
            documents, attn_mask (bool), mask_mod, mod_tensors and query_offset, as for `attention`.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q]. Both are
        differentiable in q, k, v, u, w_query and w_key, deterministically; gradients of gradients
        take the formula on torch. A query that sees no key has o = 0, lse = -inf and gradients of
        0. NaN in keys or values that are padded out reaches nothing.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call; the message names it.
    """
    checks.check_tensors(q, k, v)
    _refuse_others(masks)
    hidden = _check_u(u, q)
    q = _projected("w_query", w_query, "q", q, hidden)
    # Options first, without gradients: a NaN in keys that are padded out would reach those of W_k.
    keys = k.detach().new_empty(()).expand(*k.shape[:3], hidden)
    options = arguments.dense_options(q, keys.to(q.dtype), v.to(q.dtype), **masks)
    exists = formula.existing_keys(options, k.shape[2], k.device)
    if w_key is not None and exists is not None:
        k = torch.where(exists[:, None, :, None], k, 0.0)
    k = _projected("w_key", w_key, "k", k, hidden)
    q, k, v, _ = attend.autocast(q, k, v, {})
    checks.check_qkv(q, k, v)
    return _compute(q, k, v, u.expand(q.shape[1], hidden), options, return_lse, backend)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options, return_lse: bool,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """o, or (o, lse), from the backend that serves the checked call."""
    choice = dispatch.choose(q, k, v, options, backend)
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        o, lse = additive_formula.attention(q, k, v, u, options)
        return (o, lse.float()) if return_lse else o
    # Columns of zeros add u_d tanh(0) = 0 to every score.
    width = v.shape[-1]
    q, k, v = (attend.kernel_rows(x) for x in (q, k, v))
    u = torch.nn.functional.pad(u, (0, q.shape[-1] - u.shape[-1]))
    o, lse = additive_ops.attend(q, k, v, u, options)
    o = o if o.shape[-1] == width else o[..., :width]
    return (o, lse) if return_lse else o


def _refuse_others(masks: dict[str, Any]) -> None:
    arguments.ADDITIVE.refuse_others(masks)
    mask = masks.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be a bool tensor (True = attend), got {mask.dtype}")


def _check_u(u: Tensor, q: Tensor) -> int:
    """u is [hidden] or [H_q, hidden] on q's device; returns hidden."""
    checks.check_floats("u", u)
    H_q = q.shape[1]
    if u.dim() not in (1, 2) or u.shape[-1] == 0 or (u.dim() == 2 and u.shape[0] != H_q):
        raise ValueError(f"u must have shape [hidden] or [{H_q}, hidden], got {list(u.shape)}")
    checks.check_device("u", u, q)
    return u.shape[-1]


def _projected(name: str, w: Tensor | None, of: str, x: Tensor, width: int) -> Tensor:
    """x [B, H, T, D] times w^T, w being [width, D] or [H, width, D]; x itself without w.

    name, of: what messages call w and x.
    """
    H, D = x.shape[1], x.shape[3]
    if w is None:
        if width != D:
            raise ValueError(
                f"{name} must be given where {of} is not as wide as u, got widths {D} and {width}"
            )
        return x
    checks.check_floats(name, w)
    if w.dtype != x.dtype and not formula.autocasting(x.device):
        raise TypeError(f"{name} must have the dtype of {of} ({x.dtype}), got {w.dtype}")
    if tuple(w.shape) not in ((width, D), (H, width, D)):
        raise ValueError(
            f"{name} must have shape [{width}, {D}] or [{H}, {width}, {D}], got {list(w.shape)}"
        )
    checks.check_device(name, w, x)
    return x @ w.mT
