"""@triton.jit functions that `derivative` generates at run time."""

import triton as triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["libdevice", "tl", "triton"]
