"""Walk from a softmax down to the product of weights and values, and what it puts in its place."""

from typing import Any

import torch
from torch import fx

from .nodes import (
    CASTS,
    Unmatched,
    argument,
    bare,
    is_number,
    operation,
    order_of,
    permuted,
    value,
    words,
)
from .scores import Match, by_letters, letters

_ALONG = "weights and values are multiplied along another dim than that of the softmax"


def product_of_weights(softmax: fx.Node, match: Match) -> tuple[fx.Node, fx.Node, list[int]]:
    """The product of weights and values, its weights, and their dims as dims of the softmax."""
    node, order = softmax, list(match.order)
    while True:
        user = _only_user(node, match)
        name = operation(user).removesuffix("_")
        plain = name in CASTS or (name == "nan_to_num" and not argument(user, 1, "nan"))
        if name in ("matmul", "einsum"):
            return user, node, order
        if (dims := order_of(user)) is not None:
            order = [order[i] for i in dims]
        elif name in ("view", "reshape", "flatten", "unflatten") and user.args[0] is node:
            _view(user, order, match)
            rank, swapped = value(user).dim(), order[-1] < order[-2]
            order = [*range(rank - 2), *((rank - 1, rank - 2) if swapped else (rank - 2, rank - 1))]
        elif name == "dropout" and user.args[0] is node:
            _drop(user, match)
        elif not (plain and user.args[0] is node):
            _zero(node, user, name, order, match)
        match.chain.append(user)
        node = user


def _only_user(node: fx.Node, match: Match) -> fx.Node:
    users = list(node.users)
    if len(users) == 2:
        # Rows of NaN that become 0.
        for nan, user in (users, users[::-1]):
            fills = operation(user) in ("masked_fill", "masked_fill_", "where")
            if operation(nan) == "isnan" and [*nan.users] == [user] and fills:
                match.extra.append(nan)
                return user
    if any(user.op == "output" for user in users):
        raise Unmatched("attention weights are kept or returned by its forward")
    if len(users) != 1:
        raise Unmatched("attention weights have other uses than their product with values")
    return users[0]


def _view(user: fx.Node, order: list[int], match: Match) -> None:
    """Check that a view groups leading dims alone."""
    leading = order[:-2]
    if value(user).shape[-2:] != value(user.args[0]).shape[-2:] or leading != sorted(leading):
        raise Unmatched("attention weights are viewed in other sizes")
    if {*order[-2:]} != {len(order) - 1, len(order) - 2}:
        raise Unmatched("attention weights are both permuted and viewed")
    match.viewed = True


def _drop(user: fx.Node, match: Match) -> None:
    p, training = argument(user, 1, "p", 0.5), argument(user, 2, "training", True)
    training = user.kwargs.get("train", training)
    if not isinstance(training, bool) or user.kwargs.get("inplace"):
        raise Unmatched("dropout is decided by a tensor, or in place")
    if training and p != 0:
        if match.dropout != 0 or p == 1:
            raise Unmatched("weights are dropped twice, or all of them")
        match.dropout = p


def _zero(node: fx.Node, user: fx.Node, name: str, order: list[int], match: Match) -> None:
    """Record weights that are set to 0, or dropped from the last dim."""
    plain = not match.viewed and order == sorted(order)
    if name == "getitem" and user.args[0] is node and plain and match.dropped is None:
        match.dropped = _slice(user.args[1], len(order))
        return
    mask: Any = None
    kept = False
    if name == "masked_fill" and user.args[0] is node:
        mask = argument(user, 1, "mask")
        fill = argument(user, 2, "value")
    elif name == "where":
        condition, chosen, other = user.args
        kept = chosen is node
        mask, fill = condition, other if kept else chosen
    elif name == "mul":
        kept, fill = True, 0
        mask = user.args[0] if user.args[1] is node else user.args[1]
        while operation(mask) in CASTS:
            mask = mask.args[0]
    fits = isinstance(mask, fx.Node) and value(mask).dtype == torch.bool and is_number(fill)
    if not fits or fill != 0 or not plain:
        raise Unmatched(f"attention weights are changed by {words(user)}")
    if operation(mask) != "isnan":
        mask, odd = bare(mask)
        match.zeroed.append((mask, kept != odd))


def _slice(index: Any, rank: int) -> tuple[Any, Any]:
    """Start and stop of a slice of the last dim alone."""
    index = index if isinstance(index, tuple) else (index,)
    leading, last = index[:-1], index[-1]
    whole = all(x is Ellipsis or x == slice(None) for x in leading)
    full = Ellipsis in leading or len(index) == rank
    if not (whole and full and isinstance(last, slice) and last.step in (None, 1)):
        raise Unmatched("attention weights are changed by indexing")
    size = [
        x.meta["example_value"] if isinstance(x, fx.Node) else x for x in (last.start, last.stop)
    ]
    return size[0], size[1]


def values(product: fx.Node, weights: fx.Node, order: list[int]) -> tuple[fx.Node, list[int]]:
    """Values [..., T_k, D_v], and the dims of the product as dims of [..., T_q, D_v].

    order: dims of the weights as dims of [..., T_q, T_k].
    """
    if operation(product) == "einsum":
        return _einsum_values(product, weights, order)
    more = value(product).dim() - len(order)  # leading dims of values alone
    order = [*range(more), *(i + more for i in order)]
    rank = len(order)
    side = 0 if product.args[0] is weights else 1
    v: Any = product.args[1 - side]
    if v is weights or order[-1 - side] != rank - 1 or order[side - 2] != rank - 2:
        raise Unmatched(_ALONG)
    last = [rank - 1, rank - 2] if side else [rank - 2, rank - 1]
    return permuted(v, [*(order.index(i) for i in range(rank - 2)), *last], rank), order


def _einsum_values(
    product: fx.Node, weights: fx.Node, order: list[int]
) -> tuple[fx.Node, list[int]]:
    first, second, result = letters(product)
    v: Any = product.args[2]
    if product.args[1] is not weights:
        first, second, v = second, first, product.args[1]
    plain = "".join(first[order.index(i)] for i in range(len(order)))
    batch, i, j = plain[:-2], plain[-2], plain[-1]
    inner = [x for x in second if x not in first]
    if v is weights or len(inner) != 1 or j not in second or j in result or i in second:
        raise Unmatched(_ALONG)
    plain = batch + i + inner[0]
    if set(result) != set(plain):
        raise Unmatched("torch.einsum of weights is not weights by values")
    return by_letters(v, second, batch + j + inner[0]), [plain.index(x) for x in result]
