"""Make `import flash_attn` and `import flash_attn_interface` find the functions of this package."""

import sys

from . import package_alias

__all__ = ["install", "uninstall"]

# What is not attention has no place here.
_INSTEAD = {
    "": "fastattn's own functions and modules, or the package itself after uninstall()",
    "losses": "torch.nn.functional.cross_entropy, or the package itself after uninstall()",
    "models": 'fastattn.models, or models of transformers with attn_implementation="fastattn"',
    "modules": "fastattn.MultiheadAttention and CausalGQAttention, and torch.nn beside them",
    "ops": "functions of torch, which torch.compile fuses",
    "ops.rms_norm": "torch.nn.RMSNorm",
    "ops.layer_norm": "torch.nn.LayerNorm",
    "ops.triton.layer_norm": "torch.nn.LayerNorm and torch.nn.RMSNorm",
    "ops.fused_dense": "torch.nn.Linear",
}


def install() -> None:
    """Make `import flash_attn` find these functions, in this process, until `uninstall`.

    Of flash_attn resolve flash_attn_interface, bert_padding, layers.rotary, ops.triton.rotary and
    cute; beside it flash_attn_interface, which is version 3's. Importing another module of
    flash_attn raises ModuleNotFoundError, which names what serves in its place. importlib.metadata
    reports flash_attn's version, so call this before a library that looks for it is imported.
    Modules of the real packages that were imported before are put aside; code that took functions
    from them keeps those.
    """
    from . import amd, bert_padding, passes, rotary, version_2, version_3, version_4

    functions = (version_2, sys.modules[__name__])
    modules = {
        "": functions,
        "flash_attn_interface": (*functions, passes),
        "bert_padding": (bert_padding,),
        "layers.rotary": (rotary,),
        "ops.triton.rotary": (rotary,),
        "flash_attn_triton_amd.utils": (amd,),
        "cute": (version_4,),
        "cute.interface": (version_4,),
    }
    package_alias.install("flash_attn", modules, version_2.__version__, _INSTEAD)
    package_alias.install("flash_attn_interface", {"": (version_3,)})


def uninstall() -> None:
    """Undo `install`: what was imported before is back. Nothing happens if it is not in force."""
    package_alias.uninstall("flash_attn_interface")
    package_alias.uninstall("flash_attn")
