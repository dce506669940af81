"""Composed masks: constants bound to a rule, masks joined by and / or, Python functions."""

import hashlib
import inspect
import linecache
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ..block_mask import TensorFunction, is_python, parts_of, with_tensors
from ..torch_backend import triton_language

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
            module included: pass the mod_tensors of all masks, in order. Or Python functions, as
            `attention` takes them: the numbers and tensors that they read are now fixed.

    Raises:
        ValueError: there is no mask, a Python function cannot be translated, or it reads tensors
            and another mask takes mod_tensors.
    """
    return _joined("or", "|", masks)


def from_python(function: Callable[..., Any]) -> TensorFunction:
    """A Python function as a mask_mod or score_mod, translated once for all calls.

    Calls need not translate it, and torch.compile can trace them. The numbers and tensors that it
    reads are now fixed; the elements of the tensors may change.

    Args:
        function: (b, h, q_pos, k_pos), a mask, or (score, b, h, q_pos, k_pos), as `attention` takes
            them.

    Raises:
        ValueError: it has other parameters, or cannot be translated.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [x for x in parameters if x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD]
    return TensorFunction.of("score_mod" if len(needed) == 5 else "mask_mod", function)


def visited_blocks(mask: Any, T_q: int, T_k: int, *tensors: Tensor, block: int = 64) -> float:
    """Fraction of the blocks of scores with a visible pair, which kernels visit.

    Args:
        mask: a `mask_mod` of any kind, evaluated for batch row 0 and head 0.
        T_q, T_k: numbers of queries, at the last positions, and keys.
        tensors: its mod_tensors, on the CPU.
        block: queries and keys of a block.
    """
    q_pos = torch.arange(T_k - T_q, T_k, dtype=torch.int32, device="cpu")[None, None, :, None]
    k_pos = torch.arange(T_k, dtype=torch.int32, device="cpu")[None, None, None]
    places = triton_language.Places(0, 1, 0, 1, q_pos, k_pos)
    made = with_tensors({"mask_mod": mask, "mod_tensors": tensors}, q_pos.device)
    seen = triton_language.mask_mod(made["mask_mod"], places, made["mod_tensors"])
    seen = seen.expand(1, 1, T_q, T_k)[0]
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
    parts = [TensorFunction.of("mask_mod", x) if is_python(x) else x for x in masks]
    functions = [parts_of(x, ()) for x in parts]
    own = [x for _, tensors in functions for x in tensors]
    calls: list[str] = []
    names: list[str] = []
    scope = {}
    for number, (function, tensors) in enumerate(functions):
        scope[f"part_{number}"] = function
        taken = [f"tensor_{len(names) + i}" for i in range(len(_parameters(function)))]
        if own and taken and not tensors:
            raise ValueError(
                f"{name}_masks cannot join {function.__name__}, which takes mod_tensors, with "
                "Python functions that read tensors; make it one of them"
            )
        calls.append(f"part_{number}({', '.join(('b, h, q_pos, k_pos', *taken))})")
        names += taken
    joined = _made(name, scope, [*_PLACES, *names], f" {operator} ".join(calls))
    return TensorFunction(joined, tuple(own)) if own else joined


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
