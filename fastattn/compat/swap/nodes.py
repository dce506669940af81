"""Nodes of a captured graph: operations by one name, values, dims in another order."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.matmul, operator.matmul, torch.bmm), "matmul"),
    **dict.fromkeys((torch.mul, torch.multiply, operator.mul), "mul"),
    **dict.fromkeys((torch.div, torch.true_divide, operator.truediv), "div"),
    **dict.fromkeys((torch.add, operator.add), "add"),
    **dict.fromkeys((torch.sub, torch.subtract, operator.sub), "sub"),
    **dict.fromkeys((torch.softmax, F.softmax, torch.special.softmax), "softmax"),
    **dict.fromkeys((torch.dropout, F.dropout), "dropout"),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"),
    **{
        getattr(torch, name): name
        for name in ("masked_fill", "where", "einsum", "baddbmm", "transpose", "permute", "amax",
                     "reshape", "nan_to_num", "logical_not", "bitwise_not", "max", "isnan",
                     "swapaxes", "swapdims", "unsqueeze", "eq", "ne", "lt", "gt", "le", "ge")
    },
    **{getattr(operator, name): name for name in ("getitem", "eq", "ne", "lt", "gt", "le", "ge")},
    **{torch.ops.aten.mT: "mT", torch.ops.aten.numpy_T: "T"},
    **{operator.imul: "mul_", operator.itruediv: "div_", operator.iadd: "add_"},
    **{operator.isub: "sub_", operator.invert: "bitwise_not"},
}  # fmt: skip
_METHODS = {"bmm": "matmul", "multiply": "mul", "true_divide": "div", "subtract": "sub"}
# Operands of each operation, of which all but softmax's have to be positional.
OPERANDS = {
    **dict.fromkeys(("mul", "div", "add", "sub"), ("input", "other")),
    **{"matmul": ("input", "other"), "einsum": ("equation", "operands"), "softmax": ("input",)},
    **{"baddbmm": ("input", "batch1", "batch2"), "where": ("condition", "input", "other")},
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), ("input", "size")),
    "permute": ("input", "dims"),
}
CASTS = ("to", "type_as", "float", "half", "bfloat16", "double", "type", "contiguous", "clone")
_SWAPS = ("transpose", "swapaxes", "swapdims")
# Operations that give the same for the same operands.
_OF_MASKS = frozenset((
    "eq", "ne", "lt", "gt", "le", "ge", "bitwise_not", "logical_not", "getitem", "unsqueeze",
    "bool", "to", "view", "reshape", "expand",
))  # fmt: skip
_WORDS = {"getitem": "indexing", "sub": "subtraction", "add": "addition", "mul": "multiplication",
          "div": "division", "matmul": "a product with a vector"}  # fmt: skip
_OWN = ("torch", "_operator", "builtins")  # packages whose functions go without the package's name


class Unmatched(Exception):
    """A softmax, or a whole graph, is not rewritten; the reason."""


def operation(node: Any, placed: bool = True) -> str:
    """Name of a node's operation, one for function, method and operator; "" for others."""
    # placed: "" too where operands are not positional. Products with a vector are others.
    name = ""
    if isinstance(node, fx.Node) and node.op == "call_function":
        name = _FUNCTIONS.get(node.target, "")
    elif isinstance(node, fx.Node) and node.op == "call_method":
        name = _METHODS.get(str(node.target), str(node.target))
    if not (name and placed):
        return name
    missing = len(node.args) < len(OPERANDS.get(name, "x"))
    of_vector = name == "matmul" and not missing and min(map(rank_of, node.args[:2])) < 2
    return "" if missing or of_vector else name


def rank_of(x: Any) -> int:
    """Number of dims; 0 of what is no tensor."""
    tensor = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    return tensor.dim() if isinstance(tensor, Tensor) else 0


def words(node: fx.Node) -> str:
    """Name what a node does, in a user's words."""
    name = operation(node) or str(getattr(node.target, "__name__", node.target))
    of = str(getattr(node.target, "__module__", None) or "torch")
    foreign = node.op == "call_function" and of.partition(".")[0] not in _OWN
    return f"{of}.{name}" if foreign else _WORDS.get(name.removesuffix("_"), name)


def value(node: Any) -> Tensor:
    tensor = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(tensor, Tensor):
        what = f"the result of {words(node)}" if isinstance(node, fx.Node) else str(node)
        raise Unmatched(f"{what} is no tensor")
    return tensor


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def same_shape(x: Any, node: fx.Node) -> bool:
    return isinstance(x, fx.Node) and value(x).shape == value(node).shape


def order_of(node: fx.Node) -> list[int] | None:
    """Dims of the operand of a transposition in the order of the result; None for other nodes."""
    name: Any = node.args[1] if node.target is getattr else operation(node)
    rank = value(node).dim()
    order = list(range(rank))
    if name in ("mT", "T", "t") and rank > 1:
        return [*order[:-2], rank - 1, rank - 2] if name == "mT" else order[::-1]
    dims: Any = node.args[1:]
    if name in _SWAPS and len(dims) == 2:
        a, b = (x % rank for x in dims)
        order[a], order[b] = b, a
        return order
    if name == "permute":
        return [x % rank for x in (dims[0] if len(dims) == 1 else dims)]
    return None


def permuted(x: Any, order: Sequence[int], rank: int | None = None) -> fx.Node:
    """Insert a node of x with its dims, of which there are `rank`, in another order."""
    tensor, node = value(x), x
    for _ in range((rank or 0) - tensor.dim()):
        node, tensor = x.graph.call_method("unsqueeze", (node, 0)), tensor.unsqueeze(0)
        node.meta["example_value"] = tensor
    if list(order) != list(range(len(order))):
        node = x.graph.call_method("permute", (node, list(order)))
        node.meta["example_value"] = tensor.permute(*order)
    return node


def bare(mask: Any) -> tuple[Any, bool]:
    """A mask without negations, and whether their number is odd."""
    odd = False
    while operation(mask) in ("bitwise_not", "logical_not") and not mask.kwargs:
        mask, odd = mask.args[0], not odd
    return mask, odd


def alike(a: Any, b: Any) -> bool:
    """Whether two nodes, or arguments of nodes, are computed alike from the same."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and bool(a == b)
    fixed = operation(a) in _OF_MASKS and operation(a) == operation(b) and not a.kwargs
    return a is b or (fixed and not b.kwargs and alike(a.args, b.args))
