"""Source of a lambda with its numbers as constants, for Triton."""

import ast
import inspect
import sys
from types import FunctionType
from typing import Any


def parts_of(function: FunctionType) -> tuple[list[str], str, dict[str, Any]]:
    """Parameters of a lambda, its expression, and the other objects in the expression.

    Numbers of the lambda's scope become constants of the expression.

    Raises:
        TypeError: it has statements, or its source is missing.
    """
    tree = _tree(function) if function.__name__ == "<lambda>" else None
    if tree is None:
        raise TypeError(
            f"a mask must be a @triton.jit function or a lambda in a file, got {function}"
        )
    closure = inspect.getclosurevars(function)
    scope = {**closure.globals, **closure.nonlocals}
    numbers = {name: x for name, x in scope.items() if isinstance(x, (bool, int, float))}
    body = ast.unparse(_Constants(numbers).visit(tree.body))
    rest = {name: x for name, x in scope.items() if name not in numbers}
    return list(inspect.signature(function).parameters), body, rest


class _Constants(ast.NodeTransformer):
    def __init__(self, numbers: dict[str, float]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.numbers[node.id]) if node.id in self.numbers else node


def _tree(function: FunctionType) -> ast.Lambda | None:
    """The lambda in the syntax tree of its file; None if it is missing or ambiguous."""
    code = function.__code__
    try:
        lines, _ = inspect.findsource(function)
    except OSError:
        return None
    lambdas = (x for x in ast.walk(ast.parse("".join(lines))) if isinstance(x, ast.Lambda))
    here = [x for x in lambdas if x.lineno == code.co_firstlineno]
    if sys.version_info >= (3, 11):
        places = set(code.co_positions())
        here = [x for x in here if _place(x.body) in places]
    return here[0] if len(here) == 1 else None


def _place(node: ast.expr) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
