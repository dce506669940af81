"""Prepare q, k and v for a backend: projection, autocast, padding for the kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, score_checks, tracing
from ..options import LEARNED, LIKE_Q, Options


def kernel_rows(x: Tensor) -> Tensor:
    """x with contiguous rows, zero-padded to a multiple of 16 bytes."""
    surplus = -x.shape[-1] % (16 // x.element_size())
    x = F.pad(x, (0, surplus)) if surplus else x  # which keeps torch's channels_last
    return x if x.stride(-1) == 1 else x.contiguous()


def kernel_options(options: Options) -> Options:
    """Options with `kernel_rows` applied to the tensors that are multiplied like q."""
    if options.relative_keys is None and options.key2 is None:
        return options
    values = {name: getattr(options, name) for name in LIKE_Q}
    rows: dict[str, Any] = {name: kernel_rows(x) for name, x in values.items() if x is not None}
    return options._replace(**rows)


def autocast(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Inside torch.autocast, cast floating tensors as scaled_dot_product_attention does.

    options: unchecked. Returns the same dict if no tensor changes.
    """
    dtype = tracing.autocast_dtype(q.device)
    if dtype is None:
        return q, k, v, options
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    values = {"q": q, "k": k, "v": v, **{name: options[name] for name in LIKE_Q if name in options}}
    tensors = {name: x for name, x in values.items() if isinstance(x, Tensor) and x.dtype in narrow}
    of_q = dtype if q.dtype in narrow else q.dtype
    goals = {name: of_q if name in LIKE_Q else dtype for name in tensors}
    changed = {name: x.to(goals[name]) for name, x in tensors.items() if x.dtype != goals[name]}
    if not changed:
        return q, k, v, options
    q, k, v = (changed.pop(name, values[name]) for name in ("q", "k", "v"))
    return q, k, v, options | changed


def duals(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors with a tangent among q, k, v and the learned options, by the caller's names."""
    if not tracing.in_forward_mode():
        return {}
    learned = {name: options.get(name) for name in ("attn_mask", *LEARNED)}
    values = {"q": q, "k": k, "v": v, **learned}
    return {
        name: x
        for name, x in values.items()
        if isinstance(x, Tensor) and x.is_floating_point() and _is_dense(x)
        if tracing.has_tangent(x)
    }


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def detached(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], duals: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Remove the tangents of a call, as checks refuse unsupported ones."""
    plain: dict[str, Any] = {name: x.detach() for name, x in duals.items()}
    q, k, v = (plain.pop(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return q, k, v, options | plain


def restored(
    q: Tensor, k: Tensor, v: Tensor, options: Options, duals: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Inverse of `detached`, after the checks, in their dtypes and dims.

    Raises:
        ValueError: score_mod cannot be differentiated, and there is no score_mod_grad.
    """
    if options.score_mod is not None and options.score_mod_grad is None:
        where = f"where an input has a tangent, as {next(iter(duals))} has"
        grad = score_checks.derived(options.score_mod, options.mod_tensors, where)
        options = options._replace(score_mod_grad=grad)
    checked: dict[str, Any] = {"q": q, "k": k, "v": v, **options._asdict()}
    tensors: dict[str, Any] = {}
    for name, x in duals.items():
        field = "attn_bias" if name == "attn_mask" else name
        like = checked[field]
        tensors[field] = x.to(like.dtype)[(None,) * (like.dim() - x.dim())]
    q, k, v = (tensors.pop(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return q, k, v, options._replace(**tensors)


def apart(options: dict[str, Any]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Options with mod_tensors detached, and mod_tensors themselves if any learns.

    Checks refuse mod_tensors with gradients or tangents, which few functions support.
    """
    mods = options.get("mod_tensors")
    if options.get("score_mod") is None or type(mods) is not tuple:
        return options, ()
    dual = tracing.in_forward_mode()
    if not any(
        isinstance(x, Tensor) and (tracing.wants_gradient(x) or (dual and tracing.has_tangent(x)))
        for x in mods
    ):
        return options, ()
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in mods)
    return {**options, "mod_tensors": plain}, mods


def projected(name: str, w: Tensor | None, of: str, x: Tensor, width: int) -> Tensor:
    """x [B, H, T, D] w^T, for w [width, D] or [H, width, D]; x itself without w.

    name, of: names of w and x in messages.
    """
    H, D = x.shape[1], x.shape[3]
    if w is None:
        if width != D:
            raise ValueError(
                f"{name} must be given where {of} is not as wide as u, got widths {D} and {width}"
            )
        return x
    dtype = "float" if tracing.autocasting(x.device) else f"as {of}"
    checks.check_input(name, w, dtype, "H? width D", x, {"H": H, "width": width, "D": D})
    return x @ w.mT
