"""q, k and v as a backend takes them: projected, cast under autocast, padded for the kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, tracing
from ..options import LIKE_Q, Options


def kernel_rows(x: Tensor) -> Tensor:
    """x with contiguous rows of a whole number of 16 bytes; columns of zeros change no score."""
    surplus = -x.shape[-1] % (16 // x.element_size())
    if surplus:
        return F.pad(x, (0, surplus))
    return x if x.stride(-1) == 1 else x.contiguous()


def kernel_options(options: Options) -> Options:
    """options whose tensors that are multiplied by q and its like are as `kernel_rows` has them."""
    if options.relative_keys is None:
        return options
    given = {name: getattr(options, name) for name in LIKE_Q}
    rows: dict[str, Any] = {name: kernel_rows(x) for name, x in given.items() if x is not None}
    return options._replace(**rows)


def autocast(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Inside torch.autocast, floating tensors in its dtype, as scaled_dot_product_attention has.

    options: unchecked. The same dict comes back where no tensor changes, and else another.
    """
    dtype = tracing.autocast_dtype(q.device)
    if dtype is None:
        return q, k, v, options
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    given = {"q": q, "k": k, "v": v, **{name: options[name] for name in LIKE_Q if name in options}}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dtype in narrow}
    of_q = dtype if q.dtype in narrow else q.dtype
    goals = {name: of_q if name in LIKE_Q else dtype for name in tensors}
    changed = {name: x.to(goals[name]) for name, x in tensors.items() if x.dtype != goals[name]}
    if not changed:
        return q, k, v, options
    q, k, v = (changed.pop(name, given[name]) for name in ("q", "k", "v"))
    return q, k, v, options | changed


def projected(name: str, w: Tensor | None, of: str, x: Tensor, width: int) -> Tensor:
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
    if w.dtype != x.dtype and not tracing.autocasting(x.device):
        raise TypeError(f"{name} must have the dtype of {of} ({x.dtype}), got {w.dtype}")
    if tuple(w.shape) not in ((width, D), (H, width, D)):
        raise ValueError(
            f"{name} must have shape [{width}, {D}] or [{H}, {width}, {D}], got {list(w.shape)}"
        )
    checks.check_device(name, w, x)
    return x @ w.mT
