"""Alias analysis of in-place changes in a graph."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .nodes import CASTS

# Operations whose result shares no memory.
FRESH = frozenset((
    "matmul", "bmm", "baddbmm", "einsum", "linear", "mul", "div", "truediv", "add", "sub", "where",
    "masked_fill", "softmax", "layer_norm", "neg", "exp", "sigmoid", "clone", "cat", "stack",
    "arange", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full",
))  # fmt: skip
# Operations that change nothing, whether or not code reads their result.
PURE = FRESH | {*CASTS, "view", "reshape", "flatten", "detach", "size", "getitem"}
_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
             "iand", "ior", "ixor", "ilshift", "irshift")  # fmt: skip


def why_not_moved(graph: fx.Graph, chain: Iterable[fx.Node]) -> str | None:
    """Reason that nodes cannot move to the position of the last one, or None.

    A node between them may change memory that one of them reads, or global state.
    """
    moved = set(chain)
    waiting, read, at = len(moved), set[Any](), None
    # Whether gradients are recorded, and what autocast is entered, as each node finds it.
    state: tuple[Any, ...] = (torch.is_grad_enabled(),)
    for node in graph.nodes:
        name = name_of(node)
        if node in moved:
            at = state if at is None else at
            if state != at:
                return "gradients or autocast are switched between the products"
            waiting -= 1
            read.update(*(_memory(x) for x in node.all_input_nodes if x not in moved))
        elif name == "_set_grad_enabled":
            state = (node.args[0], *state[1:])
        elif name == "_enter_autocast":
            state = state if _switches_off_what_is_off(node, state) else (*state, node)
        elif name == "_exit_autocast":
            state = tuple(x for x in state if x is not node.args[0])
        elif waiting and read and node.op in ("call_function", "call_method"):
            if "autocast" in name or name.startswith("_set_") or "out" in node.kwargs:
                return f"{name} is between the products"
            x = node.args[0] if node.args else None
            changed = _memory(x) if isinstance(x, fx.Node) else read
            if is_in_place(node) and not changed.isdisjoint(read):
                return f"{name} is between the products"
    return None


def _switches_off_what_is_off(enter: fx.Node, state: tuple[Any, ...]) -> bool:
    """Whether autocast is entered to be off, and nothing in the graph or around it is on."""
    device, _, enabled, *_ = enter.args
    return not enabled and len(state) == 1 and not torch.is_autocast_enabled(str(device))


def name_of(node: fx.Node) -> str:
    """Name of a function or method."""
    return str(getattr(node.target, "__name__", node.target))


def is_in_place(node: fx.Node) -> bool:
    name, is_call = name_of(node), node.op in ("call_function", "call_method")
    if getattr(node.target, "__module__", "") == "_operator":  # or_ is none
        return name in _IN_PLACE
    # A set flag may mean in-place. Names of inputs, such as L_x_, end as those of methods do.
    flags = node.args[3 if name == "dropout" else 1 :]
    flagged = any(x is True for x in (*flags, node.kwargs.get("inplace")))
    mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return is_call and bool(flagged or name.endswith("_") or mutable)


def is_changed(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether an operation in place may change a node's memory."""
    changing = (x for x in graph.nodes if is_in_place(x) and x.all_input_nodes)
    return any(node in _memory(x.all_input_nodes[0]) for x in changing)


def _memory(node: fx.Node) -> set[Any]:
    """Nodes whose memory a node may share; "given" for all graph inputs."""
    storages: set[Any] = set()
    waiting = [node]
    while waiting:
        x = waiting.pop()
        if x in storages:
            continue
        storages.add(x)
        if x.op in ("placeholder", "get_attr"):
            storages.add("given")
        # einsum of one tensor returns a view.
        elif name_of(x) not in FRESH or name_of(x) == "einsum":
            waiting += x.all_input_nodes
    return storages
