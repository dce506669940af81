"""Triton kernels and their launchers, called by `fastattn.ops`.

Modules are imported on first access, as in `kernels.forward.launch_forward`, so that fastattn works
without triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "append", "arguments", "backward", "backward_bias", "backward_mods",
    "backward_relative", "combine", "decode", "decode_splits", "forward", "fp8_quantize",
    "fp8_values", "hopper_backward", "hopper_forward", "hopper_host", "pages",
    "selected_backward", "selected_choose", "selected_forward", "statistics", "tangent",
    "tangent_backward", "tiles",
]  # fmt: skip

if TYPE_CHECKING:
    from . import (
        append,
        backward,
        backward_bias,
        backward_mods,
        backward_relative,
        combine,
        decode,
        forward,
        statistics,
    )
    from .forward_mode import backward_dq as tangent_backward
    from .forward_mode import tangent
    from .fp8 import quantize as fp8_quantize
    from .fp8 import values as fp8_values
    from .hopper import backward as hopper_backward
    from .hopper import forward as hopper_forward
    from .hopper import host as hopper_host
    from .launch import arguments, decode_splits, tiles
    from .rules import pages
    from .selected import backward as selected_backward
    from .selected import choose as selected_choose
    from .selected import forward as selected_forward
else:
    _FOLDERS = {
        "arguments": "launch.arguments",
        "decode_splits": "launch.decode_splits",
        "fp8_quantize": "fp8.quantize",
        "fp8_values": "fp8.values",
        "hopper_backward": "hopper.backward",
        "hopper_forward": "hopper.forward",
        "hopper_host": "hopper.host",
        "pages": "rules.pages",
        "selected_backward": "selected.backward",
        "selected_choose": "selected.choose",
        "selected_forward": "selected.forward",
        "tangent": "forward_mode.tangent",
        "tangent_backward": "forward_mode.backward_dq",
        "tiles": "launch.tiles",
    }

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{_FOLDERS.get(name, name)}", __name__)
        globals()[name] = module
        return module
