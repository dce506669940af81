"""flash_attn.cute, flash-attn 4's module, with its argument order and results.

`compat.flash_attn` documents the arguments. Both functions return (o, lse), lse None unless
return_lse; with qv, heads are its last dim.
"""

from typing import Any

from torch import Tensor

from . import version_2
from .argument_order import of_version
from .conventions import sides

__version__ = "4.0.0"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


@of_version(4)
def flash_attn_func(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend: (o [B, T_q, H_q, D_v], lse [B, H_q, T_q] or None)."""
    return _pair(version_2.flash_attn_func, kwargs)


@of_version(4)
def flash_attn_varlen_func(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend within packed sequences: (o [total_q, H_q, D_v], lse [H_q, total_q] or None).

    cu_seqlens_q is required: padded queries [B, T_q, H_q, D] are not supported.
    """
    if kwargs.get("cu_seqlens_q") is None:
        raise NotImplementedError(
            "cu_seqlens_q=None, for padded queries, is not supported by "
            "fastattn.compat.flash_attn.version_4; fastattn.attention takes key_lengths"
        )
    return _pair(version_2.flash_attn_varlen_func, kwargs)


def _pair(function: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call version 2's function: (o, lse or None)."""
    size = kwargs.get("window_size", (None, None))
    below = [x is not None and x < 0 for x in sides(size)]
    if any(below) and not all(below) and not kwargs.get("causal"):
        raise NotImplementedError(
            f"window_size={size}: in version 4 a negative side hides the nearest keys, which is "
            "not supported; give None for a side without an end"
        )
    result = function(**kwargs)
    if not kwargs.get("return_lse"):
        return result, None
    return result if kwargs.get("qv") is None else (result[0], result[1].mT)
