"""@triton.jit functions that are made at run time; without Triton the torch backend runs them."""

from types import ModuleType
from typing import Any

try:
    import triton as triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ModuleNotFoundError:

    class JITFunction:
        """A function that no kernel takes."""

        def __init__(self, function: Any) -> None:
            self.fn, self.__name__ = function, function.__name__

    JITFunction.__module__ = "triton.runtime.jit"
    triton, tl, libdevice = map(ModuleType, ("triton", "triton.language", "triton.language.extra"))
    triton.jit = JITFunction  # type: ignore[attr-defined]

__all__ = ["libdevice", "tl", "triton"]
