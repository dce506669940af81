"""Recognise attention blocks of other models by their submodules, then test them.

Names and sizes only suggest what a block computes; `trial` finds out.
"""

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, nn

from ...rotary import RotaryStyle
from ..fused_block import Plan, Rotary
from .block_trial import tried
from .block_twin import OF_ANY_MODULE

# Projections, the last one that of the output: queries, keys and values together, or each alone.
_PROJECTIONS = (
    ("c_attn", "c_proj"),
    ("qkv", "proj"),
    ("qkv_proj", "out_proj"),
    ("qkv_proj", "o_proj"),
    ("wqkv", "wo"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("wq", "wk", "wv", "wo"),
    ("w_q", "w_k", "w_v", "w_o"),
    ("W_q", "W_k", "W_v", "W_o"),
    ("W_Q", "W_K", "W_V", "W_O"),
    ("W_query", "W_key", "W_value", "out_proj"),
)
_HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "n_local_heads")
_CONFIGS = ("config", "cfg", "args", "params")
_FORMS = {0: (), 1: ("complex", "pairs"), 2: ("halves", "doubled", "repeated")}


# Of the blocks of a model that were tried out.
Tried = list[tuple[nn.Module, Plan | str]]

# A swapped block has a forward of its own.
_NOT_COMPARED = OF_ANY_MODULE | {"forward"}


def recognise(module: nn.Module, before: Tried) -> Plan | str:
    """The plan of a block that is known, or why it is not.

    Its random inputs come from a generator of its own, its hooks do not run, and it is not changed.

    Args:
        before: blocks that need no second trial if this one is like them; it enters them.
    """
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    for block, result in before:
        if _alike(block, module):
            return result
    result = _recognised(module)
    before.append((module, result))
    return result


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether they have one class and equal attributes, parts, buffers and shapes of parameters.

    What parameters hold does not count: a trial draws them anew.
    """
    ours, theirs = (
        {name: x for name, x in vars(block).items() if name not in _NOT_COMPARED}
        for block in (one, other)
    )
    if type(one) is not type(other) or ours.keys() != theirs.keys():
        return False
    plain = (bool, int, float, str)
    for name, x in ours.items():
        y = theirs[name]
        if x is not y and not (isinstance(x, plain) and type(x) is type(y) and x == y):
            return False
    parameters = (
        [(name, p.shape, p.dtype, p.device) for name, p in block.named_parameters(recurse=False)]
        for block in (one, other)
    )
    buffers = [dict(block.named_buffers(recurse=False)) for block in (one, other)]
    children = [dict(block.named_children()) for block in (one, other)]
    return (
        operator.eq(*parameters)
        and buffers[0].keys() == buffers[1].keys()
        and all(_same_tensor(x, buffers[1][name]) for name, x in buffers[0].items())
        and children[0].keys() == children[1].keys()
        and all(_alike(x, children[1][name]) for name, x in children[0].items())
    )


def _same_tensor(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and not x.is_meta and torch.equal(x, y)


def _recognised(module: nn.Module) -> Plan | str:
    found = parts(module)
    if isinstance(found, str):
        return found
    projections, heads, kv_heads, D = found
    needed = [
        name
        for name, parameter in list(inspect.signature(type(module).forward).parameters.items())[1:]
        if parameter.default is parameter.empty
    ]
    if not 1 <= len(needed) <= 3:
        return f"forward takes {', '.join(needed) or 'nothing'}; x and rotary tables are known"
    forms = _FORMS[len(needed) - 1]
    if forms and D % 2:
        return f"its head dim {D} is odd, so its other arguments are no rotary tables"
    # Of two channels there is one pairing.
    styles: tuple[RotaryStyle, ...] = ("half", "interleaved") if D > 2 else ("half",)
    rotaries: list[Rotary | None] = [Rotary(form, style) for form in forms for style in styles]
    plans = [
        Plan(projections, heads, kv_heads, D, causal, rotary, tuple(needed))
        for rotary in rotaries or [None]
        for causal in (True, False)
    ]
    return tried(module, plans)


def parts(module: nn.Module) -> tuple[tuple[str, ...], int, int, int] | str:
    """Projections, heads, key and value heads and head dim by names and sizes, or why not."""
    children = dict(module.named_children())
    known = [names for names in _PROJECTIONS if all(name in children for name in names)]
    if not known:
        return _missing(set(children))
    projections: tuple[str, ...] = known[0]
    layers = [x for x in map(children.get, projections) if isinstance(x, nn.Linear)]
    if len(layers) < len(projections):
        return "its projections are not all nn.Linear"
    for name, child in children.items():
        if name not in projections and not isinstance(child, (nn.Dropout, nn.Identity)):
            return f"it has a part that is not known: {name}"
    if module._parameters:
        return f"it has parameters of its own: {', '.join(module._parameters)}"
    heads = _number_of_heads(module)
    width = layers[-1].in_features
    if heads is None:
        return (
            f"its number of heads is not found under {', '.join(_HEADS)}, on it or on its "
            f"{', '.join(_CONFIGS)}"
        )
    if width % heads:
        return f"{projections[-1]} takes {width} channels, which {heads} heads do not divide"
    D = width // heads
    if len(projections) == 2:
        kv_heads, rest = divmod(layers[0].out_features - width, 2 * D)
    else:
        kv_heads, rest = divmod(layers[1].out_features, D)
    if rest or kv_heads < 1 or heads % kv_heads:
        return "the sizes of its projections fit no number of heads"
    return projections, heads, kv_heads, D


def _missing(children: set[str]) -> str:
    """What is missing for the projections that come closest."""
    nearest = max(_PROJECTIONS, key=lambda names: len(children.intersection(names)) / len(names))
    there = [name for name in nearest if name in children]
    if not there:
        return "its parts have no names that are known"
    lacking = [name for name in nearest if name not in children]
    return f"it has {', '.join(there)}, but no {', '.join(lacking)}"


def _number_of_heads(module: nn.Module) -> int | None:
    holders = [module, *(getattr(module, name, None) for name in _CONFIGS)]
    for holder in holders:
        for name in _HEADS:
            found: Any = getattr(holder, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None
