"""Floating point operations of the operators, for `torch.utils.flop_counter`.

As for torch's own attention: 2 per multiply-add, over all T_q T_k pairs regardless of masks,
including products that a backward recomputes. The softmax and options are not counted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# Of the operators in torch.ops: the name of this package, which a copy has another of.
NAMESPACE = __package__.rpartition(".")[0].replace(".", "_")
_COUNTER = "torch.utils.flop_counter"
# Operations from an operator's arguments by name.
Formula = Callable[[Mapping[str, Any]], int]
_formulas: dict[str, tuple[Sequence[str], Formula]] = {}


def register(name: str, parameters: Sequence[str], formula: Formula) -> None:
    """Count calls of the operator NAMESPACE::`name` by `formula`."""
    _formulas[name] = parameters, formula
    if _COUNTER in sys.modules:
        _register_with(sys.modules[_COUNTER], (name,))


def nothing(_: Mapping[str, Any]) -> int:
    """Formula of an operator without matrix products."""
    return 0


def attended(wide: int, of_values: int) -> Formula:
    """Per pair of query and key, `wide` products of D terms and `of_values` of D_v."""

    def count(inputs: Mapping[str, Any]) -> int:
        q, k = inputs["q"], inputs["k"]
        # Packed codes are transposed; D_v is D.
        D_v = inputs["v"].shape[-1] if "v" in inputs else q.shape[-1]
        terms = wide * q.shape[-1] + of_values * D_v
        return 2 * q.shape[1] * terms * _pairs(q, k, inputs)

    return count


def differentiated(inputs: Mapping[str, Any]) -> int:
    """The products of a backward, scores included, for the gradients in `wanted`."""
    of_scores = [of for of in "qk" if of in inputs["wanted"]]
    of_values = "v" in inputs["wanted"]
    if not (of_scores or of_values):
        return 0
    return attended(1 + len(of_scores), bool(of_scores) + of_values)(inputs)


def decoded(inputs: Mapping[str, Any]) -> int:
    """The two products of every query with its cache row's keys."""
    q, k, v, table, lengths, rows = (
        inputs[name] for name in ("q", "k", "v", "block_table", "lengths", "batch_index")
    )
    room = k.shape[2] * (1 if table is None else table.shape[1])
    if _known(lengths):
        of_rows = lengths[: q.shape[0]] if rows is None else lengths[rows.long()]
        keys = int(of_rows.clamp(0, room).sum())
    else:
        keys = q.shape[0] * room
    return int(2 * q.shape[1] * q.shape[2] * keys * (q.shape[3] + v.shape[3]))


def packed_over_cache(inputs: Mapping[str, Any]) -> int:
    """The two products of every packed query with its cache row's keys."""
    q, k, v, table, lengths, rows, starts = (
        inputs[name]
        for name in ("q", "k", "v", "block_table", "lengths", "batch_index", "cu_seqlens")
    )
    room = k.shape[2] * (1 if table is None else table.shape[1])
    pairs = q.shape[0] * room
    if _known(lengths) and _known(starts):
        of_rows = lengths[: starts.shape[0] - 1] if rows is None else lengths[rows.long()]
        pairs = int((starts.diff() * of_rows.clamp(0, room)).sum())
    return int(2 * q.shape[1] * pairs * (q.shape[2] + v.shape[3]))


def _pairs(q: Tensor, k: Tensor, inputs: Mapping[str, Any]) -> int:
    """Pairs of query and key in all rows or packed sequences (if unknown, equally long)."""
    starts = [inputs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    pairs = q.shape[0] * q.shape[2] * k.shape[2]
    if starts[0] is None:
        return pairs
    if not all(map(_known, starts)):
        return int(pairs // max(starts[0].shape[0] - 1, 1))
    lengths = (x.diff().tolist() for x in starts if x is not None)
    return sum(T_q * T_k for T_q, T_k in zip(*lengths, strict=True))


def _known(x: Any) -> bool:
    """Whether a tensor has values, unlike tracers' and meta tensors."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"


def _register_with(counter: ModuleType, names: Sequence[str]) -> None:
    """Register formulas with torch."""
    for name in names:
        parameters, formula = _formulas[name]
        target = getattr(getattr(torch.ops, NAMESPACE), name)
        if target not in counter.flop_registry:
            count = partial(_count, parameters, formula)
            counter.register_flop_formula(target, get_raw=True)(count)


def _count(
    parameters: Sequence[str], formula: Formula, *arguments: Any, out_val: Any = None, **_: object
) -> int:
    return formula(dict(zip(parameters, arguments, strict=True)))


class _Awaited(MetaPathFinder):
    """Registers all formulas when torch's counter, which imports Triton, is imported."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register_with(module, tuple(_formulas))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Awaited())
