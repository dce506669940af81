"""flash_attn.flash_attn_triton_amd.utils: none of the package's kernels for AMD are in use."""

from typing import Any

__all__ = ["USE_TRITON_ROCM", "is_rdna"]

USE_TRITON_ROCM = False


def is_rdna(*_: Any) -> bool:
    """False: nothing goes by the family of an AMD GPU here."""
    return False
