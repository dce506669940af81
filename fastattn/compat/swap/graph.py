"""Rewrite product, softmax and product in a captured graph as one call of attention.

Scale, mask and bias are nodes of the graph. A softmax in any other context stays unchanged, with
the reason.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...functional.attend import attention
from ..calls import running
from ..sdpa import LOWEST_BIAS, bounded_bias
from .effects import FRESH, why_not_moved

# A finite number below this is a mask: adding a score in fp32 does not change it.
_LOWEST = -1e30
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.matmul, operator.matmul, torch.bmm), "matmul"),
    **dict.fromkeys((torch.mul, torch.multiply, operator.mul), "mul"),
    **dict.fromkeys((torch.div, torch.true_divide, operator.truediv), "div"),
    **dict.fromkeys((torch.add, operator.add), "add"),
    **dict.fromkeys((torch.softmax, F.softmax), "softmax"),
    **dict.fromkeys((torch.dropout, F.dropout), "dropout"),
    **{getattr(torch, name): name for name in ("masked_fill", "where", "einsum", "baddbmm")},
    **{operator.imul: "mul_", operator.itruediv: "div_", operator.iadd: "add_"},
}
_METHODS = {"bmm": "matmul", "multiply": "mul", "true_divide": "div"}
# Number of positional operands of each known operation.
_OPERANDS = {"matmul": 2, "mul": 2, "div": 2, "add": 2, "where": 3, "einsum": 2, "baddbmm": 3}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS = ("to", "type_as", "float", "half", "bfloat16", "double", "type", "contiguous")


class Unmatched(Exception):
    """A softmax, or a whole graph, is not rewritten; the reason."""


@dataclass
class _Match:
    """State of the walk from a softmax up to the product of the scores.

    scale: of the nodes above. factors: tensors that multiply queries. terms: (tensor, number,
    sizes): a float tensor times the number is added, or the number where a bool tensor is True;
    sizes: of the view of the scores, or None.
    """

    chain: list[fx.Node]
    dropout: Any = 0.0
    scale: float = 1.0
    factors: list[fx.Node] = field(default_factory=list)
    terms: list[tuple[fx.Node, float, Any]] = field(default_factory=list)


def rewrite(module: fx.GraphModule) -> tuple[int, list[str]]:
    """Rewrite attention in a graph and its subgraphs.

    Returns:
        The number of rewritten attentions, and the reason for each other softmax.
    """
    count, reasons = 0, []
    for part in [x for x in module.modules() if isinstance(x, fx.GraphModule)]:
        _without_in_place(part.graph)
        for node in [x for x in part.graph.nodes if _name(x) == "softmax"]:
            try:
                _replace(part.graph, node)
                count += 1
            except Unmatched as reason:
                reasons.append(str(reason))
        part.recompile()
    return count, reasons


def _name(node: Any) -> str:
    """Name of a node's operation, equal for function, method and operator; "" for others."""
    name = ""
    if isinstance(node, fx.Node) and node.op == "call_function":
        name = _FUNCTIONS.get(node.target, "")
    elif isinstance(node, fx.Node) and node.op == "call_method":
        name = _METHODS.get(str(node.target), str(node.target))
    return name if name and len(node.args) >= _OPERANDS.get(name, 1) else ""


def _value(node: Any) -> Tensor:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        raise Unmatched(f"{node} is no tensor")
    return value


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _without_in_place(graph: fx.Graph) -> None:
    """Make later nodes use the result of an in-place change, where no other node sees it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        x: Any = node.args[0] if node.args else None
        name = _name(node)
        if name not in ("mul_", "div_", "add_", "masked_fill_") or _name(x) not in FRESH:
            continue
        if all(order[user] >= order[node] for user in x.users):
            x.replace_all_uses_with(node, delete_user_cb=lambda user, kept=node: user is not kept)


def _replace(graph: fx.Graph, softmax: fx.Node) -> None:
    match = _Match([softmax])
    scores: Any = softmax.args[0]
    rank = _value(scores).dim()
    if _argument(softmax, 1, "dim") not in (-1, rank - 1) or rank not in (3, 4):
        raise Unmatched("a softmax is not of the last of 3 or 4 dims")
    product = _product_of_weights(softmax, match)
    q, k = _product_of_scores(scores, match)
    if (reason := why_not_moved(graph, match.chain)) is not None:
        raise Unmatched(reason)
    if any(_value(x).dtype not in _FLOATS for x in match.chain):
        raise Unmatched("scores or weights are rounded to something else than 16, 32 or 64 bits")
    if _value(match.chain[-1]).shape != _value(scores).shape:
        raise Unmatched("scores have another shape in their softmax than in their product")
    with graph.inserting_before(product):
        v, order = _values(product)
        _check_sizes(q, k, v)
        if not 0 < match.scale < math.inf:
            raise Unmatched(f"scores are multiplied by {match.scale}")
        dtype = _value(product).dtype
        arguments = (q, k, v, match.scale, match.dropout, match.factors, match.terms, dtype)
        out = graph.call_function(fused, arguments)
        if order is not None:
            out = graph.call_method("permute", (out, order))
    out.meta = dict(product.meta)
    product.replace_all_uses_with(out)
    for node in sorted({*match.chain, product}, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _product_of_weights(softmax: fx.Node, match: _Match) -> fx.Node:
    """Node of the product of weights and values."""
    node = softmax
    while True:
        if len(node.users) != 1:
            raise Unmatched("attention weights have other uses than their product with values")
        (user,) = node.users
        name = _name(user)
        if name in ("matmul", "einsum") and user.args[name == "einsum"] is node:
            return user
        if name in _CASTS and user.args[0] is node:
            pass
        elif name == "dropout" and user.args[0] is node:
            p, training = _argument(user, 1, "p", 0.5), _argument(user, 2, "training", True)
            training = user.kwargs.get("train", training)
            if not isinstance(training, bool) or user.kwargs.get("inplace"):
                raise Unmatched("dropout is decided by a tensor, or in place")
            if training and p != 0:
                if match.dropout != 0 or p == 1:
                    raise Unmatched("weights are dropped twice, or all of them")
                match.dropout = p
        else:
            raise Unmatched(f"attention weights are changed by {user.target}")
        match.chain.append(user)
        node = user


def _product_of_scores(node: Any, match: _Match) -> tuple[fx.Node, fx.Node]:
    """Queries [..., T_q, D] and keys [..., D, T_k] of the scores."""
    while True:
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            raise Unmatched("scores have other uses than their softmax")
        match.chain.append(node)
        name = _name(node).removesuffix("_")
        if name == "matmul":
            q, k = node.args[:2]
            return q, k  # type: ignore[return-value]
        if name == "einsum":
            return _einsum_scores(node)
        if name == "baddbmm":
            return _biased_product(node, match)
        node = _step(node, name, match)


def _step(node: fx.Node, name: str, match: _Match) -> Any:
    """The input scores of a node, after recording its operation."""
    if name in _CASTS:
        return node.args[0]
    if name in ("view", "reshape"):
        return _viewed(node, match)
    if name in ("mul", "div", "add"):
        scores, other = node.args[:2]
        if name != "div" and (not isinstance(scores, fx.Node) or not _same(scores, node)):
            scores, other = other, scores
        if name == "add":
            _add(scores, other, node, match)
        else:
            _multiply(scores, other, node, name, match)
        return scores
    if name == "masked_fill":
        scores = node.args[0]
        mask, value = _argument(node, 1, "mask"), _argument(node, 2, "value")
        _fill(node, mask, value, match, hides=True)
    elif name == "where":
        condition, chosen, other = node.args
        if node.op == "call_method":
            condition, chosen = chosen, condition
        hides = _is_number(chosen)
        scores, value = (other, chosen) if hides else (chosen, other)
        _fill(node, condition, value, match, hides)
    else:
        raise Unmatched(f"scores are changed by {node.target}")
    if not _same(scores, node):
        raise Unmatched("a mask makes the scores larger")
    return scores


def _viewed(node: fx.Node, match: _Match) -> Any:
    """The input scores of a view; earlier terms keep the view's sizes."""
    sizes: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    if match.factors or not all(isinstance(x, (int, fx.Node)) for x in sizes):
        raise Unmatched(f"scores are changed by {node.target}")
    match.terms = [(x, number, sizes if of is None else of) for x, number, of in match.terms]
    return node.args[0]


def _same(x: Any, node: fx.Node) -> bool:
    return isinstance(x, fx.Node) and _value(x).shape == _value(node).shape


def _multiply(scores: Any, other: Any, node: fx.Node, name: str, match: _Match) -> None:
    if node.kwargs or not _same(scores, node):
        raise Unmatched(f"scores are changed by {node.target}")
    if _is_number(other):
        match.scale *= 1 / other if name == "div" and other else other
    elif _is_of_rows(other):
        if name == "div":
            with node.graph.inserting_before(node):
                other = node.graph.call_function(operator.truediv, (1.0, other))
        match.factors.append(other)
    else:
        raise Unmatched("scores are multiplied by a tensor, another for each key")


def _is_of_rows(x: Any) -> bool:
    """Whether a node is a dynamic number, or one number per query."""
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    if isinstance(value, Tensor):
        return value.is_floating_point() and (value.dim() == 0 or value.shape[-1] == 1)
    return isinstance(value, (torch.SymFloat, torch.SymInt))


def _add(scores: Any, other: Any, node: fx.Node, match: _Match) -> None:
    fits = not node.kwargs and _same(scores, node) and isinstance(other, fx.Node)
    if not fits or not _value(other).is_floating_point() or match.factors:
        raise Unmatched("something else than a bias is added to scores")
    # With two tensors of equal shape, the scores are the one from a product.
    match.terms.append((other, match.scale, None))


def _fill(node: fx.Node, mask: Any, value: Any, match: _Match, hides: bool) -> None:
    if not _is_number(value) or _value(mask).dtype != torch.bool or match.factors:
        raise Unmatched("scores are filled by a tensor, or scaled by one later")
    number = value if value == -math.inf else value * match.scale
    if not hides:
        if value != -math.inf:
            raise Unmatched(f"scores are filled with {value} where a mask is False")
        with node.graph.inserting_before(node):
            mask = node.graph.call_function(operator.invert, (mask,))
    elif number > _LOWEST:
        raise Unmatched(f"scores are filled with {value}, and not with -inf")
    # A later factor of the scores could overflow a finite number.
    match.terms.append((mask, number if number == -math.inf else max(number, LOWEST_BIAS), None))


def _biased_product(node: fx.Node, match: _Match) -> tuple[fx.Node, fx.Node]:
    bias: Any
    bias, q, k = node.args[:3]
    beta: Any = node.kwargs.get("beta", 1)
    alpha: Any = node.kwargs.get("alpha", 1)
    if not _is_number(beta) or not _is_number(alpha) or (match.factors and beta):
        raise Unmatched("a product is scaled by a tensor")
    if beta:
        match.terms.append((bias, match.scale * beta, None))
    match.scale *= alpha
    return q, k  # type: ignore[return-value]


def _letters(node: fx.Node) -> tuple[str, str, str]:
    """Index letters of the operands and result of a torch.einsum product."""
    equation = node.args[0]
    if not isinstance(equation, str) or len(node.args) != 3 or "." in equation:
        raise Unmatched("torch.einsum is called in another way")
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if not arrow or any(len(set(x)) < len(x) for x in (first, second, result)):
        raise Unmatched("torch.einsum repeats an index or has no result")
    return first, second, result


def _einsum_scores(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second, result = _letters(node)
    batch, i, j = result[:-2], result[-2], result[-1]
    inner = set(first) & set(second) - set(result)
    if len(inner) != 1 or i in second or j in first:
        raise Unmatched("torch.einsum of scores is not queries by keys")
    (d,) = inner
    with node.graph.inserting_before(node):
        q = _permuted(node.args[1], first, batch + i + d)
        return q, _permuted(node.args[2], second, batch + d + j)


def _values(product: fx.Node) -> tuple[fx.Node, list[int] | None]:
    """Values [..., T_k, D_v], and the permutation of the result, if any."""
    if _name(product) == "matmul":
        return product.args[1], None  # type: ignore[return-value]
    first, second, result = _letters(product)
    batch, i, j = first[:-2], first[-2], first[-1]
    inner = [x for x in second if x not in first]
    if len(inner) != 1 or j not in second or j in result or i in second:
        raise Unmatched("torch.einsum of weights is not weights by values")
    v = _permuted(product.args[2], second, batch + j + inner[0])
    plain = batch + i + inner[0]
    if set(result) != set(plain):
        raise Unmatched("torch.einsum of weights is not weights by values")
    return v, None if result == plain else [plain.index(x) for x in result]


def _permuted(x: Any, letters: str, wanted: str) -> fx.Node:
    """Node with dims in the wanted order; missing batch dims become 1."""
    if not set(letters) <= set(wanted):
        raise Unmatched("torch.einsum sums over an index of one operand")
    shape = _value(x)
    order = [letters.index(name) for name in wanted if name in letters]
    node: fx.Node = x.graph.call_method("permute", (x, order))
    value = shape.permute(order)
    for dim, name in enumerate(wanted):
        if name not in letters:
            node = x.graph.call_method("unsqueeze", (node, dim))
            value = value.unsqueeze(dim)
        node.meta["example_value"] = value
    return node


def _check_sizes(q: fx.Node, k: fx.Node, v: fx.Node) -> None:
    sizes = [_value(x).shape for x in (q, k, v)]
    ranks = {len(x) for x in sizes}
    if not ranks <= {3, 4} or len(ranks) > 1:
        raise Unmatched("queries, keys and values differ in dims")
    if any(not _value(x).is_floating_point() for x in (q, k, v)):
        raise Unmatched("queries, keys and values are no floats")
    (B, H), (B_k, H_k), (B_v, H_v) = ((1, *x)[-4:-2] for x in sizes)
    if not (B == B_k == B_v and H_k == H_v and H_k in (1, H)):
        raise Unmatched("queries, keys and values broadcast")


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    factors: list[Tensor],
    terms: list[tuple[Tensor, float, Any]],
    dtype: torch.dtype,
) -> Tensor:
    """Attention of q [..., T_q, D] and k [..., D, T_k], replacing product, softmax and product."""
    running.fused = True
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    shape = (*q.shape[:-1], k.shape[-1])
    for factor in factors:
        q = q * factor
    if dropout >= 1:  # a dynamic number
        return F.dropout(q @ k @ v, 1.0)
    mask, bias, filled = _masks(terms, shape)
    options: dict[str, Any] = {
        "attn_mask": mask,
        "attn_bias": None if bias is None else bounded_bias(bias),
    }
    if filled is not None:
        # A fully masked row depends on no score and gives no score a gradient.
        hidden = filled | (bias == -math.inf)
        hidden = hidden if mask is None else hidden | ~mask
        q = q.masked_fill(hidden.all(-1, keepdim=True), 0)
    four = q.dim() == 4
    q, k, wide = ((x if four else x[None]).to(common) for x in (q, k.transpose(-2, -1), v))
    o = attention(q, k, wide, scale=scale, dropout=dropout, **options)
    return (o if four else o[0]).to(dtype)


def _masks(
    terms: list[tuple[Tensor, float, Any]], shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The mask (True = visible), the bias, and the positions masked by a finite number."""
    mask = bias = filled = None
    for x, number, sizes in reversed(terms):  # in order, as fills overwrite
        x = x if sizes is None else _as_scores(x, sizes, shape)
        x = x if x.dim() >= 2 else x.reshape(1, -1)
        if x.dtype != torch.bool:
            x = bounded_bias(x if number == 1 else x * number)
            bias = x if bias is None else bias + x
        elif number == -math.inf:
            mask = ~x if mask is None else mask & ~x
        else:
            bias = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias
            bias = torch.where(x, x.new_full((1, 1), number, dtype=torch.float32), bias)
            mask = mask if mask is None else mask | x
            filled = x if filled is None else filled | x
    return mask, bias, filled


def _as_scores(x: Tensor, sizes: list[int], shape: tuple[int, ...]) -> Tensor:
    """Reshape a bias or mask of a view of the scores to [..., T_q, T_k]."""
    explicit = math.prod(n for n in sizes if n != -1)
    return x.expand([math.prod(shape) // explicit if n == -1 else n for n in sizes]).reshape(shape)
