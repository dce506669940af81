"""Rewrite product, softmax and product in a captured graph as one call of attention.

Scale, mask and bias are nodes of the graph. A softmax in any other context stays unchanged, with
the reason.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from .effects import PURE, is_changed, is_in_place, name_of, why_not_moved
from .fused import fused
from .nodes import OPERANDS, Unmatched, alike, argument, bare, operation, permuted, rank_of, value
from .scores import Match, product_of_scores
from .weights import product_of_weights, values

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NEW = {"new_zeros": torch.zeros, "new_ones": torch.ones, "new_full": torch.full}
_COPIES = ("reshape", "flatten", "contiguous", "linear", "matmul", "setitem")
_IN_PLACE = ("mul_", "div_", "add_", "sub_", "masked_fill_")


def rewrite(module: fx.GraphModule) -> tuple[int, list[tuple[fx.Node, str]]]:
    """Rewrite attention in a graph and its subgraphs.

    Returns:
        The number of rewritten attentions, and each other softmax with the reason.
    """
    count, left = 0, []
    for part in [x for x in module.modules() if isinstance(x, fx.GraphModule)]:
        _in_one_form(part.graph)
        _without_unread(part.graph)
        _without_in_place(part.graph)
        for node in [x for x in part.graph.nodes if operation(x) == "softmax"]:
            before = set(part.graph.nodes)
            try:
                _replace(part.graph, node)
                count += 1
            except Unmatched as reason:
                left.append((node, str(reason)))
                for inserted in reversed([x for x in part.graph.nodes if x not in before]):
                    part.graph.erase_node(inserted)
        part.recompile()
    return count, left


def _in_one_form(graph: fx.Graph) -> None:
    """Give operands their places, and scores no use that asks for their dtype or size alone."""
    for node in [x for x in graph.nodes if x.op in ("call_function", "call_method")]:
        name = operation(node, placed=False)
        names = OPERANDS.get(name, ("input",) if name else ())
        while len(node.args) < len(names) and names[len(node.args)] in node.kwargs:
            moved, rest = names[len(node.args)], dict(node.kwargs)
            node.args, node.kwargs = (*node.args, rest.pop(moved)), rest
        if operation(node) == "einsum" and isinstance(node.args[1], (tuple, list)):
            node.args = (node.args[0], *node.args[1])
        name, other = str(node.target), node.args[1] if len(node.args) > 1 else None
        like = other.meta.get("example_value") if isinstance(other, fx.Node) else None
        if node.op == "call_method" and name in ("type_as", "to") and isinstance(like, Tensor):
            node.target, node.args = "to", (node.args[0], like.device, like.dtype, *node.args[2:])
        elif node.op == "call_method" and name == "where" and len(node.args) == 3:
            node.op, node.target = "call_function", torch.where
            node.args = (node.args[1], node.args[0], node.args[2])
        elif node.op == "call_method" and name in _NEW and isinstance(node.args[0], fx.Node):
            like = value(node.args[0])
            node.op, node.target, node.args = "call_function", _NEW[name], node.args[1:]
            node.kwargs = {"dtype": like.dtype, "device": like.device, **node.kwargs}
        elif name == "size" and len(node.args) == 2 and operation(x := node.args[0]) == "matmul":
            operand = x.args[(node.args[1] + 1) % rank_of(x) == 0]
            if value(operand).shape[:-2] == value(x).shape[:-2]:
                node.args = (operand, node.args[1])


def _without_unread(graph: fx.Graph) -> None:
    """Remove what no node reads, as code that checks sizes leaves, from the last on."""
    for node in reversed(graph.nodes):
        of_numbers = getattr(node.target, "__module__", "") == "_operator"
        pure = of_numbers or operation(node, placed=False) in PURE
        if pure and not (node.users or is_in_place(node) or "out" in node.kwargs):
            graph.erase_node(node)


def _without_in_place(graph: fx.Graph) -> None:
    """Make later nodes use the result of an in-place change, which is its operand."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        x: Any = node.args[0] if node.args else None
        if operation(node) not in _IN_PLACE or not rank_of(x):  # numbers do not change
            continue
        if all(order[user] >= order[node] for user in x.users):
            x.replace_all_uses_with(node, delete_user_cb=lambda user, kept=node: user is not kept)


def _replace(graph: fx.Graph, softmax: fx.Node) -> None:
    scores: Any = softmax.args[0]
    rank = value(scores).dim()
    dim = argument(softmax, 1, "dim")
    if not isinstance(dim, int) or rank < 2:
        raise Unmatched("a softmax is of one dim, or names none")
    match = Match([softmax], dim % rank, list(range(rank)))
    product, weights, below = product_of_weights(softmax, match)
    with graph.inserting_before(product):
        q, k = product_of_scores(scores, match)
        _check(graph, product, scores, match)
        v, order = values(product, weights, _joined(match, below))
        if match.viewed and value(v).shape[:-2] != value(weights).shape[:-2]:
            raise Unmatched("values are broadcast to weights that are viewed")
        if any(not value(x).is_floating_point() for x in (q, k, v)):
            raise Unmatched("queries, keys and values are no floats")
        terms = [term[:3] for term in match.terms]
        scaled = (match.scale, match.dropout, match.factors, terms, match.further)
        out = graph.call_function(fused, (q, k, v, *scaled, match.viewed, value(product).dtype))
        back = [order.index(i) for i in range(len(order))]
        out.meta["example_value"] = value(product).permute(back)
        out = permuted(out, order)
        if value(product).is_contiguous() and _depends_on_strides(product):
            out = graph.call_method("contiguous", (out,))
        if is_changed(graph, product):
            out = graph.call_method("clone", (out,))  # gradients read the result
    out.meta = dict(product.meta)
    product.replace_all_uses_with(out)
    for node in sorted({*match.chain, *match.extra, product}, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _depends_on_strides(node: fx.Node) -> bool:
    """Whether a user may view a node, as code may view a product; kernels have queries' strides."""
    users = [x for x in node.users if name_of(x) not in _COPIES]
    return any(name_of(x) not in ("transpose", "permute") or _depends_on_strides(x) for x in users)


def _check(graph: fx.Graph, product: fx.Node, scores: fx.Node, match: Match) -> None:
    if (reason := why_not_moved(graph, (*match.chain, product))) is not None:
        raise Unmatched(reason)
    if any(value(x).dtype not in _FLOATS for x in match.chain):
        raise Unmatched("scores or weights are rounded to something else than 16, 32 or 64 bits")
    if (match.dropped is None) != (match.further is None):
        raise Unmatched("attention weights are changed by indexing")
    sizes = value(match.chain[-1]).shape[-2:], value(scores).shape[-2:]
    if match.viewed and (match.further is not None or sizes[0] != sizes[1]):
        raise Unmatched("scores have another shape in their softmax than in their product")
    if not 0 < match.scale < math.inf:
        raise Unmatched(f"scores are multiplied by {match.scale}")
    for mask, inverted in match.zeroed:
        _hide_for_good(mask, inverted, match, any(map(is_in_place, graph.nodes)))


def _hide_for_good(mask: Any, inverted: bool, match: Match, in_place: bool) -> None:
    """Make a mask of scores hide rows that it hides whole too, as their weights become 0."""
    for i, term in enumerate(match.terms):
        base, odd = bare(term.mask)
        same = base is mask or (not in_place and alike(base, mask))
        others = [x for x in match.terms if x.mask is not None and x is not term]
        if same and odd == inverted and all(x.number == -math.inf for x in others):
            match.terms[i] = term._replace(number=-math.inf)
            return
    raise Unmatched("weights are set to 0 by another mask than that of the scores")


def _joined(match: Match, below: list[int]) -> list[int]:
    """Dims of the weights as dims of [..., T_q, T_k]."""
    above = match.order
    if not match.viewed:
        return [above[i] for i in below]
    if above[:-2] != sorted(above[:-2]) or below[:-2] != sorted(below[:-2]):
        raise Unmatched("scores are both permuted and viewed")
    rank, last = len(below), [len(below) - 2, len(below) - 1]
    swapped = (above[-1] < above[-2]) != (below[-1] < below[-2])
    return [*range(rank - 2), *(last[::-1] if swapped else last)]
