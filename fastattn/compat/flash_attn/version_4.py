"""flash_attn.cute, flash-attn 4's module, with its argument order and results.

`compat.flash_attn` documents the arguments. Both functions return (o, lse), lse None unless
return_lse.
"""

from typing import Any

from torch import Tensor

from . import version_2
from .argument_order import of_version

__version__ = "4.0.0"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


@of_version(4)
def flash_attn_func(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend: (o [B, T_q, H_q, D_v], lse [B, H_q, T_q] or None)."""
    result = version_2.flash_attn_func(**kwargs)
    return result if kwargs.get("return_lse") else (result, None)


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
    result = version_2.flash_attn_varlen_func(**kwargs)
    return result if kwargs.get("return_lse") else (result, None)
