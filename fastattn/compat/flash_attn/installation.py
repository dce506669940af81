"""Make `import flash_attn` and `import flash_attn_interface` import this package."""

import sys

from . import package_alias

__all__ = ["install", "uninstall"]

# Replacements for flash_attn's modules that are not attention.
_INSTEAD = {
    "": "fastattn's own functions and modules, or the package itself after uninstall()",
    "losses": "torch.nn.functional.cross_entropy, or the package itself after uninstall()",
    "models": 'fastattn.models, or models of transformers with attn_implementation="fastattn"',
    "modules": "fastattn.MultiheadAttention, CausalGQAttention, and torch.nn",
    "ops": "functions of torch, which torch.compile fuses",
    "ops.rms_norm": "torch.nn.RMSNorm",
    "ops.layer_norm": "torch.nn.LayerNorm",
    "ops.triton.layer_norm": "torch.nn.LayerNorm and torch.nn.RMSNorm",
    "utils": "torch.distributed.nn.functional, or the package itself after uninstall()",
    "ops.fused_dense": "torch.nn.Linear",
}


def install() -> None:
    """Make `import flash_attn` import these functions, in this process, until `uninstall`.

    flash_attn has flash_attn_interface, bert_padding, layers.rotary, ops.triton.rotary and cute.
    The top-level flash_attn_interface is version 3. Importing another module of flash_attn raises a
    ModuleNotFoundError that names a replacement. importlib.metadata reports flash_attn and
    flash_attn_3, so call this before importing a library that looks for them. Imported modules of
    the real packages are set aside; code that took functions from them keeps those.
    """
    from . import amd, bert_padding, passes, rotary, version_2, version_3, version_4

    functions = (version_2, sys.modules[__name__])
    modules = {
        "": functions,
        "flash_attn_interface": (*functions, passes, amd),
        "bert_padding": (bert_padding,),
        "layers.rotary": (rotary,),
        "ops.triton.rotary": (rotary,),
        "flash_attn_triton_amd.utils": (amd,),
        "cute": (version_4,),
        "cute.interface": (version_4,),
    }
    package_alias.install("flash_attn", modules, version_2.__version__, _INSTEAD)
    package_alias.install(
        "flash_attn_interface",
        {"": (version_3,)},
        version_3.__version__,
        distribution="flash_attn_3",
    )


def uninstall() -> None:
    """Undo `install` and restore the real packages' modules, if it is active."""
    package_alias.uninstall("flash_attn_interface")
    package_alias.uninstall("flash_attn")
