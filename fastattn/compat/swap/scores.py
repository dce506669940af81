"""Walk from a softmax up to the product of queries and keys: scale, masks, bias, dims."""

import math
import operator
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..sdpa import LOWEST_BIAS
from .nodes import (
    CASTS,
    Unmatched,
    argument,
    is_number,
    operation,
    order_of,
    permuted,
    rank_of,
    same_shape,
    value,
    words,
)

# A finite number below this, or the lowest of the dtype, is a mask: no score comes near it.
_LOWEST = -1e8
_PRODUCTS = ("matmul", "einsum", "baddbmm")
_STEPS = ("mul", "div", "add", "sub", "masked_fill", "where", "view", "reshape", *CASTS)


class Term(NamedTuple):
    """Something added to scores, in the order of their dims.

    x: a float tensor, added times the number, or a bool one: the number is added where it is True.
    sizes: of the view of the scores, or None. mask: x as the code has it.
    """

    x: fx.Node
    number: float
    sizes: Any = None
    mask: Any = None


@dataclass
class Match:
    """State of the walks from a softmax to both products.

    order: dims of the softmax, of which `dim` is that of keys, as dims of the node that the walk is
    at. viewed: leading dims are grouped in another way in one of the products. scale: of the nodes
    above. factors: tensors that multiply queries. zeroed: masks of weights that become 0, and
    whether they are inverted. extra: other nodes that go. dropped: the slice of the weights that
    stays. further: scores whose weights are dropped, and their scale.
    """

    chain: list[fx.Node]
    dim: int
    order: list[int]
    viewed: bool = False
    dropout: Any = 0.0
    scale: float = 1.0
    factors: list[fx.Node] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    zeroed: list[tuple[Any, bool]] = field(default_factory=list)
    extra: list[fx.Node] = field(default_factory=list)
    dropped: tuple[Any, Any] | None = None
    further: tuple[fx.Node, float] | None = None

    @property
    def keys(self) -> int:
        return self.order[self.dim]

    def permute(self, order: list[int]) -> None:
        """Go on above a node whose dims are those of its operand in this order."""
        if order == sorted(order):
            return
        if self.viewed or any(term.sizes is not None for term in self.terms):
            raise Unmatched("scores are both permuted and viewed")
        back, rank = [order.index(i) for i in range(len(order))], len(order)
        self.terms = [x._replace(x=permuted(x.x, back, rank)) for x in self.terms]
        self.factors = [permuted(x, back, rank) if rank_of(x) else x for x in self.factors]
        self.order = [order[i] for i in self.order]


def product_of_scores(node: Any, match: Match) -> tuple[fx.Node, fx.Node]:
    """Queries [..., T_q, D] and keys [..., D, T_k] of the scores."""
    while True:
        if not isinstance(node, fx.Node) or len({*node.users} - {*match.extra}) != 1:
            raise Unmatched("scores have other uses than their softmax")
        match.chain.append(node)
        name = operation(node).removesuffix("_")
        if name == "einsum":
            return _einsum_scores(node, match)
        if name in _PRODUCTS:
            q, k = _biased_product(node, match) if name == "baddbmm" else node.args[:2]
            return _in_order(q, k, match)
        node = _step(node, name, match)


def _in_order(q: Any, k: Any, match: Match) -> tuple[fx.Node, fx.Node]:
    """Both operands of a product, exchanged where keys are the first."""
    rank = len(match.order)
    if match.keys == rank - 1:
        return q, k
    if match.keys != rank - 2:
        raise Unmatched("a softmax is not over the dim of keys")
    match.permute([*range(rank - 2), rank - 1, rank - 2])
    return _transposed(k), _transposed(q)


def _transposed(x: fx.Node) -> fx.Node:
    rank = value(x).dim()
    return permuted(x, [*range(rank - 2), rank - 1, rank - 2])


def _step(node: fx.Node, name: str, match: Match) -> Any:
    """The input scores of a node, after recording its operation."""
    if name in CASTS:
        return node.args[0]
    if name in ("view", "reshape"):
        return _viewed(node, match)
    if (order := order_of(node)) is not None:
        match.permute(order)
        return node.args[0]
    if name == "cat":
        return _with_further(node, match)
    if name in ("mul", "div", "add", "sub"):
        return _arithmetic(node, name, match)
    if name == "masked_fill":
        scores = node.args[0]
        mask, number = argument(node, 1, "mask"), argument(node, 2, "value")
        _fill(node, mask, number, match, hides=True)
    elif name == "where":
        condition, chosen, other = node.args
        hides = _number(chosen) is not None
        scores, number = (other, chosen) if hides else (chosen, other)
        _fill(node, condition, number, match, hides)
    else:
        raise Unmatched(f"scores are changed by {words(node)}")
    if not same_shape(scores, node):
        raise Unmatched("a mask makes the scores larger")
    return scores


def _arithmetic(node: fx.Node, name: str, match: Match) -> Any:
    scores, other = node.args[:2]
    fits, leads = same_shape(scores, node), _leads_to_product
    if name in ("mul", "add") and not (fits and (leads(scores) or not leads(other))):
        scores, other = other, scores
    if name == "sub" and _is_maximum(other, scores, match):
        return scores
    if name in ("add", "sub"):
        _add(scores, other, node, match, 1 if name == "add" else -1)
    else:
        _multiply(scores, other, node, name, match)
    return scores


def _leads_to_product(x: Any, depth: int = 12) -> bool:
    """Whether x may be scores: a product, or what changes and views make of one."""
    name = operation(x).removesuffix("_")
    if name in _PRODUCTS or not name or not depth:
        return name in _PRODUCTS
    if order_of(x) is not None or name in ("masked_fill", *CASTS):
        return _leads_to_product(x.args[0], depth - 1)
    if name == "cat" and isinstance(x.args[0], (tuple, list)):
        return any(_leads_to_product(y, depth - 1) for y in x.args[0])
    return name in _STEPS and any(_leads_to_product(y, depth - 1) for y in x.args)


def _is_maximum(x: Any, scores: Any, match: Match) -> bool:
    """Whether x is the largest score of each row, which a softmax does not depend on."""
    extra = []
    while operation(x) in ("detach", "getitem", "amax", "max", *CASTS):
        extra.append(x)
        if operation(x) in ("amax", "max"):
            keys = argument(x, 1, "dim")
            kept = argument(x, 2, "keepdim", False) is True
            fits = x.args[0] is scores and is_number(keys) and kept
            if not fits or keys % value(scores).dim() != match.keys:
                return False
            match.extra += extra
            return True
        x = x.args[0]
    return False


def _with_further(node: fx.Node, match: Match) -> Any:
    """The scores in a row of scores and further ones, of which the weights are dropped."""
    parts: Any = node.args[0]
    dim = argument(node, 1, "dim", 0)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or match.dropped is None:
        raise Unmatched("scores are joined with others, whose weights are not dropped")
    start, stop = match.dropped
    scores, further = parts if start in (0, None) else parts[::-1]
    number, columns = value(scores).shape[-1], value(further).shape[-1]
    # Either the first columns of the weights stay, or the last.
    first = start in (0, None) and stop in (-columns, number)
    last = stop in (None, number + columns) and start in (columns, -number)
    if match.terms or match.factors or dim not in (-1, match.keys) or not (first or last):
        raise Unmatched("scores are joined with others, and then changed")
    match.further = further, match.scale
    return scores


def _viewed(node: fx.Node, match: Match) -> Any:
    """The input scores of a view; earlier terms keep the view's sizes."""
    sizes: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    fits = all(isinstance(x, (int, fx.Node)) for x in sizes) and match.order == sorted(match.order)
    if match.factors or not fits or match.dim != len(match.order) - 1:
        raise Unmatched("scores are viewed in other sizes after a factor, or permuted")
    match.terms = [x if x.sizes is not None else x._replace(sizes=sizes) for x in match.terms]
    rank = value(node.args[0]).dim()
    match.viewed, match.order, match.dim = True, list(range(rank)), rank - 1
    return node.args[0]


def _multiply(scores: Any, other: Any, node: fx.Node, name: str, match: Match) -> None:
    if node.kwargs or not same_shape(scores, node):
        raise Unmatched(f"scores are changed by {words(node)}")
    if is_number(other):
        match.scale *= 1 / other if name == "div" and other else other
    elif _is_of_rows(other, match):
        if name == "div":
            tensor = other.meta.get("example_value")
            other = node.graph.call_function(operator.truediv, (1.0, other))
            other.meta["example_value"] = 1.0 / tensor
        match.factors.append(other)
    else:
        raise Unmatched("scores are multiplied by a tensor, another for each key")


def _is_of_rows(x: Any, match: Match) -> bool:
    """Whether a node is a dynamic number, or one number per query."""
    tensor = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    if isinstance(tensor, Tensor):
        place = match.keys - len(match.order) + tensor.dim()
        return tensor.is_floating_point() and (place < 0 or tensor.shape[place] == 1)
    return isinstance(tensor, (torch.SymFloat, torch.SymInt))


def _add(scores: Any, other: Any, node: fx.Node, match: Match, sign: int) -> None:
    fits = not node.kwargs and same_shape(scores, node) and isinstance(other, fx.Node)
    if not fits or not value(other).is_floating_point() or match.factors:
        raise Unmatched("the scores get an addend that is no bias")
    match.terms.append(Term(other, sign * match.scale))


def _number(x: Any) -> float | None:
    """A number, also one that the code makes a tensor of."""
    if is_number(x):
        return float(x)
    if operation(x) in CASTS and value(x).is_floating_point():
        cast, lowest = _number(x.args[0]), torch.finfo(value(x).dtype).min
        return cast if cast is None or cast >= lowest else -math.inf
    if isinstance(x, fx.Node) and str(getattr(x.target, "__name__", "")) in ("tensor", "full"):
        number = x.args[-1] if x.target is not torch.full else argument(x, 1, "fill_value")
        return float(number) if is_number(number) else None  # type: ignore[arg-type]
    return None


def _fill(node: fx.Node, mask: Any, filled: Any, match: Match, hides: bool) -> None:
    number = _number(filled)
    if number is None or value(mask).dtype != torch.bool or match.factors:
        raise Unmatched("scores are filled by a tensor, or scaled by one later")
    if number > max(_LOWEST, torch.finfo(value(node).dtype).min):
        raise Unmatched(f"scores are filled with {filled}, and not with -inf")
    number = number if number == -math.inf else number * match.scale
    inverted = mask
    if not hides:
        inverted = node.graph.call_function(operator.invert, (mask,))
        inverted.meta["example_value"] = ~value(mask)
    # A later factor of the scores could overflow a finite number.
    number = number if number == -math.inf else max(number, LOWEST_BIAS)
    match.terms.append(Term(inverted, number, None, inverted))


def _biased_product(node: fx.Node, match: Match) -> tuple[fx.Node, fx.Node]:
    bias: Any
    bias, q, k = node.args[:3]
    beta: Any = node.kwargs.get("beta", 1)
    alpha: Any = node.kwargs.get("alpha", 1)
    if not is_number(beta) or not is_number(alpha) or (match.factors and beta):
        raise Unmatched("a product is scaled by a tensor")
    if beta:
        match.terms.append(Term(bias, match.scale * beta))
    match.scale *= alpha
    return q, k  # type: ignore[return-value]


def letters(node: fx.Node) -> tuple[str, str, str]:
    """Index letters of the operands and result of a torch.einsum product."""
    equation = node.args[0]
    if not isinstance(equation, str) or len(node.args) != 3:
        raise Unmatched("torch.einsum is called in another way")
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    free = "".join(x for x in ascii_letters if x not in equation)
    # Letters for the dims that an ellipsis stands for, the last of the longest.
    dims = [value(x).dim() + 3 - len(n) for x, n in zip(node.args[1:], names, strict=False)]
    dots = [free[:n][::-1] if "..." in x else "" for x, n in zip(names, dims, strict=True)]
    first, second = (x.replace("...", y) for x, y in zip(names, dots, strict=True))
    result = result.replace("...", max(dots, key=len))
    if not arrow or any(len(set(x)) < len(x) for x in (first, second, result)):
        raise Unmatched("torch.einsum repeats an index or has no result")
    return first, second, result


def _einsum_scores(node: fx.Node, match: Match) -> tuple[fx.Node, fx.Node]:
    first, second, result = letters(node)
    q, k = node.args[1:]
    j = result[match.keys]
    if j in first:
        first, second, q, k = second, first, k, q
    inner = set(first) & set(second) - set(result)
    rows = [x for x in result if x not in second]
    if len(inner) != 1 or j in first or not rows:
        raise Unmatched("torch.einsum of scores is not queries by keys")
    (d,), i = inner, result[-2] if result[-2] in rows else rows[-1]
    batch = "".join(x for x in result if x not in (i, j))
    match.permute([(batch + i + j).index(x) for x in result])
    return by_letters(q, first, batch + i + d), by_letters(k, second, batch + d + j)


def by_letters(x: Any, names: str, wanted: str) -> fx.Node:
    """Node with dims in the wanted order; missing batch dims become 1."""
    if not set(names) <= set(wanted):
        raise Unmatched("torch.einsum sums over an index of one operand")
    node = permuted(x, [names.index(name) for name in wanted if name in names])
    tensor = value(node)
    for dim, name in enumerate(wanted):
        if name not in names:
            node, tensor = x.graph.call_method("unsqueeze", (node, dim)), tensor.unsqueeze(dim)
            node.meta["example_value"] = tensor
    return node
