"""Sizes where torch traces: there they are symbols, or tensors, in place of numbers."""

import torch
from torch import Tensor


def decided(condition: bool | torch.SymBool) -> bool:
    """The truth of a comparison of sizes as Python's own; where they are symbols, for this graph.

    By a branch: what is traced takes bool() of a symbol for the symbol.
    """
    if condition:  # noqa: SIM103
        return True
    return False


def always(comparison: bool | torch.SymBool | Tensor) -> bool:
    """Whether a comparison of sizes holds; where torch traces, whether it holds for all sizes.

    A traced comparison that is used as a bool becomes a condition of the graph: other sizes trace
    it again, or are refused, or (torch.jit.trace) computed as if it still held. This asks nothing
    of the sizes, so the code behind True is for what is known, and that behind False serves any.
    """
    if isinstance(comparison, Tensor):
        return False
    if not torch.compiler.is_compiling() and isinstance(comparison, bool):
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)
