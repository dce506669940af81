"""Functions of @triton.jit that `derivative` writes while the program runs."""

import triton as triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["libdevice", "tl", "triton"]
