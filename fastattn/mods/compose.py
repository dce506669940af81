"""Composed masks: constants bound to a rule, masks joined by and / or, lambdas."""

import hashlib
import inspect
import linecache
import sys
from types import FunctionType
from typing import Any

import torch
import triton
from torch import Tensor

from ..block_mask import BlockMask
from ..torch_backend import triton_language
from .lambdas import parts_of

# By the name of a made function: the functions that it calls.
_PARTS: dict[str, dict[str, Any]] = {}
_PLACES = ("b", "h", "q_pos", "k_pos")


def bind(rule: Any, *constants: int) -> Any:
    """A `mask_mod` that passes constants to a rule, after the position of the key.

    The same rule and constants give the same function, so tables and compiled kernels are reused.

    Args:
        rule: @triton.jit function (b, h, q_pos, k_pos, *constants, *tensors) -> bool.
        constants: ints, compiled in.

    Raises:
        TypeError: a constant is no int.
    """
    for x in constants:
        if type(x) is not int:
            raise TypeError(f"constants of {rule.__name__} must be ints, got {x!r}")
    tensors = _parameters(rule)[len(constants) :]
    call = ", ".join(("part_0(b, h, q_pos, k_pos", *map(str, constants), *tensors)) + ")"
    name = "_".join(map(str, (rule.__name__, *constants)))
    return _made(name, {"part_0": rule}, [*_PLACES, *tensors], call)


def and_masks(*masks: Any) -> Any:
    """A `mask_mod`: the intersection of masks. Arguments and errors as in `or_masks`."""
    return _joined("and", "&", masks)


def or_masks(*masks: Any) -> Any:
    """A `mask_mod`: the union of masks.

    Args:
        masks: one or more @triton.jit functions (b, h, q_pos, k_pos, *tensors), results of this
            module included, or lambdas in a file (before Python 3.11 one per line), with the
            numbers of their scope fixed. Pass the mod_tensors of all masks, in order.

    Raises:
        ValueError: there is no mask.
        TypeError: a mask is a Python function, or a lambda without its source.
    """
    return _joined("or", "|", masks)


def visited_blocks(mask: Any, T_q: int, T_k: int, *tensors: Tensor, block: int = 64) -> float:
    """Fraction of the blocks of scores with a visible pair, which kernels visit.

    Args:
        mask: a `mask_mod` or `BlockMask`, evaluated for batch row 0 and head 0.
        T_q, T_k: numbers of queries, at the last positions, and keys.
        tensors: its mod_tensors, on the CPU.
        block: queries and keys of a block.
    """
    q_pos = torch.arange(T_k - T_q, T_k, dtype=torch.int32, device="cpu")[None, None, :, None]
    k_pos = torch.arange(T_k, dtype=torch.int32, device="cpu")[None, None, None]
    places = triton_language.Places(0, 1, 0, 1, q_pos, k_pos)
    seen = triton_language.mask_mod(mask, places, tensors).expand(1, 1, T_q, T_k)[0]
    padded = torch.nn.functional.pad(seen, (0, -T_k % block, 0, -T_q % block))
    rows, columns = (n // block for n in padded.shape[1:])
    blocks = padded.reshape(rows, block, columns, block).any(3).any(1)
    return blocks.float().mean().item()


def _parameters(mod: Any) -> list[str]:
    """Names of a mask's parameters after the position of the key."""
    return list(inspect.signature(mod.fn).parameters)[4:]


def _joined(name: str, operator: str, masks: tuple[Any, ...]) -> Any:
    if not masks:
        raise ValueError(f"{name}_masks takes one mask or more, got none")
    parts = [_jitted(mask.mask_mod if isinstance(mask, BlockMask) else mask) for mask in masks]
    calls: list[str] = []
    tensors: list[str] = []
    for number, part in enumerate(parts):
        own = [f"tensor_{len(tensors) + i}" for i in range(len(_parameters(part)))]
        calls.append(f"part_{number}({', '.join(('b, h, q_pos, k_pos', *own))})")
        tensors += own
    scope = {f"part_{i}": part for i, part in enumerate(parts)}
    return _made(name, scope, [*_PLACES, *tensors], f" {operator} ".join(calls))


def _jitted(mask: Any) -> Any:
    if not isinstance(mask, FunctionType):
        return mask
    arguments, result, scope = parts_of(mask)
    return _made("lambda", scope, arguments, result)


def _made(name: str, parts: dict[str, Any], arguments: list[str], result: str) -> Any:
    """Make a @triton.jit function at the top level of this module, for `block_mask.named`."""
    # Named by the source, so that other processes reuse the compiled kernels.
    functions = [part.fn for part in parts.values() if hasattr(part, "fn")]
    text = "".join(f"{function.__module__}{inspect.getsource(function)}" for function in functions)
    taken = ", ".join(arguments)
    name += "_" + hashlib.sha256(f"{text}{taken}{result}".encode()).hexdigest()[:8]
    while name in _PARTS and any(_PARTS[name].get(key) is not x for key, x in parts.items()):
        name += "x"
    if name in _PARTS:
        return globals()[name]
    _PARTS[name] = parts
    source = f"def {name}({taken}):\n    return {result}\n"
    path = f"<{__name__}.{name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    scope: dict[str, Any] = {**parts, "__name__": __name__}
    exec(compile(source, path, "exec"), scope)
    made = triton.jit(scope[name])
    setattr(sys.modules[__name__], name, made)
    return made
