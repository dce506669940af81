"""flash_attn.flash_attn_triton_amd.utils, without the package's AMD kernels."""

from typing import Any

__all__ = ["USE_TRITON_ROCM", "is_rdna"]

USE_TRITON_ROCM = False


def is_rdna(*_: Any) -> bool:
    """Return False: no choice here depends on the AMD GPU family."""
    return False
