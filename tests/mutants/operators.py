"""Rules by which mutants are made: some of cosmic-ray's operators, and faults of this field.

Each of fastattn's is one line of text to another, so that an example says what it does.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise

import cosmic_ray.plugins
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from parso import parse
from parso.tree import BaseNode, NodeOrLeaf

# Other replacements of an operator by an operator fail at once, or are as likely as these.
_BORROWED = re.compile(
    r"core/(ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is"
    r"|In_NotIn|NotIn_In)|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mod"
    r"|Mod_FloorDiv|BitAnd_BitOr|BitOr_BitAnd|RShift_LShift|LShift_RShift|Pow_Mul)"
    r"|ReplaceUnaryOperator_Delete.*|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak"
    r"|ExceptionReplacer|NumberReplacer|RemoveDecorator|ZeroIterationForLoop)$"
)
# Names that are taken for each other.
_PAIRS = (
    "H_q H_k", "T_q T_k", "BLOCK_M BLOCK_N", "q k", "k v", "dk dv", "q_pos k_pos", "left right",
    "first last", "start end", "min max", "minimum maximum", "any all", "floor ceil", "rows cols",
    "keys values", "queries keys", "shape stride", "zeros ones", "exp exp2", "log log2",
)  # fmt: skip
_TWINS = {a: b for pair in map(str.split, _PAIRS) for a, b in (pair, pair[::-1])}
# Functions whose arguments differ in kind: exchanged, they fail at once.
_OF_KINDS = ("isinstance", "cast", "getattr", "hasattr", "setattr", "partial", "map", "issubclass")
_FOR_READERS = ("help", "description", "metavar", "doc")
_COPIES = ("clone", "contiguous", "detach", "to", "float", "unsqueeze", "broadcast_to", "flip")


class _Rule(Operator):
    """An operator of cosmic-ray by a function from a node to the changes that begin there."""

    changes: Callable[[NodeOrLeaf], Iterable[str]]
    example: tuple[str, str]

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[object, object]]:
        yield from ((node.start_pos, node.end_pos) for _ in type(self).changes(node))

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        text = list(type(self).changes(node))[index]
        new = parse(_prefix(node) + text)
        new.parent = node.parent
        return new

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example(*cls.example),)


def _prefix(node: NodeOrLeaf) -> str:
    return node.get_first_leaf().prefix


def _text(*nodes: NodeOrLeaf) -> str:
    """The source of neighbours, without what stands before the first."""
    return "".join(x.get_code() for x in nodes)[len(_prefix(nodes[0])) :] if nodes else ""


def _entries(node: BaseNode) -> Iterator[tuple[int, NodeOrLeaf]]:
    """Entries of a list, and their places among its commas."""
    return ((i, x) for i, x in enumerate(node.children) if x.type != "operator" or x.value != ",")


def _without(node: BaseNode, place: int) -> str:
    """A list's text without the entry at `place`, and its comma."""
    after = place + 1 < len(node.children)
    gone = {place, place + 1 if after else place - 1}
    return _text(*(x for i, x in enumerate(node.children) if i not in gone))


def swapped_arguments(node: NodeOrLeaf) -> Iterator[str]:
    """Two variables that stand beside each other in a call, by position."""
    if node.type == "arglist" and _text(*node.parent.parent.children[:1]) not in _OF_KINDS:
        plain = [i for i, x in _entries(node) if re.fullmatch(r"\s*[\w.]+", x.get_code())]
        for i, j in pairwise(plain):
            a, b = (_text(node.children[x]) for x in (i, j))
            if j == i + 2 and a != b:
                before, after = _text(*node.children[:i]), _text(*node.children[j + 1 :])
                yield f"{before} {b}, {a}{after}".strip()


def dropped_keyword(node: NodeOrLeaf) -> Iterator[str]:
    """A call without one of its arguments by name."""
    if node.type == "arglist":
        for i, x in _entries(node):
            by_name = x.type == "argument" and _text(x.children[1]) == "="
            if by_name and _text(x.children[0]) not in _FOR_READERS:
                yield _without(node, i)


def dropped_entry(node: NodeOrLeaf) -> Iterator[str]:
    """A tuple or list of three or more without one entry: a key without a part of it."""
    written_out = node.type == "testlist_comp" and node.children[1].type == "operator"
    if written_out and len(list(_entries(node))) > 2:
        yield from (_without(node, i) for i, _ in _entries(node))


def dropped_copy(node: NodeOrLeaf) -> Iterator[str]:
    """A tensor in place of its copy, or in another dtype, layout or shape than was requested."""
    if node.type == "atom_expr":
        for i, (name, call) in enumerate(zip(node.children, node.children[1:], strict=False)):
            if name.get_code().strip(". ") in _COPIES and call.get_code().startswith("("):
                yield _text(*node.children[:i], *node.children[i + 2 :])


def dropped_statement(node: NodeOrLeaf) -> Iterator[str]:
    """Nothing in place of a call whose result is not used, or of an addition to a variable."""
    alone = node.parent is not None and node.parent.type == "simple_stmt"
    added = node.type == "expr_stmt" and node.children[1].type == "operator"
    added = added and node.children[1].get_code().strip() not in ("=", ":")
    if alone and (added or (node.type == "atom_expr" and node.get_code().endswith(")"))):
        yield "pass"


def truth_for_none(node: NodeOrLeaf) -> Iterator[str]:
    """A number that is 0, or a list that is empty, taken for one that is absent."""
    if node.type == "comparison" and node.get_code().endswith(" None"):
        words = node.children[1].get_code().split()
        if words[0] == "is":
            yield ("" if words[1:] else "not ") + _text(node.children[0])


def twin_name(node: NodeOrLeaf) -> Iterator[str]:
    """The name beside it: keys' heads for queries', the right side for the left."""
    if node.type == "name" and node.value in _TWINS and not _defines(node):
        yield _TWINS[node.value]


def _defines(name: NodeOrLeaf) -> bool:
    """The name of a parameter, an argument or a variable that is set here, not of a value."""
    of, first = name.parent, name.parent.children[0] is name
    named = ("param", "tfpdef", "funcdef", "classdef", "testlist_star_expr", "exprlist")
    if of.type in named or of.type.startswith("import"):
        return True
    return first and of.type in ("argument", "expr_stmt", "annassign")


_OURS = {
    swapped_arguments: ("f(a, b, c=1)", "f(b, a, c=1)"),
    dropped_keyword: ("f(a, b=1)", "f(a)"),
    dropped_entry: ("x = (a, b, c)", "x = (b, c)"),
    dropped_copy: ("x = y.clone() + 1", "x = y + 1"),
    dropped_statement: ("if x:\n    x += 1\n", "if x:\n    pass\n"),
    truth_for_none: ("if x is not None: pass", "if x: pass"),
    twin_name: ("x = T_q", "x = T_k"),
}


class OwnOperators(dict[str, type[_Rule]]):
    """cosmic-ray's provider of the operators above, by their names."""

    def __init__(self) -> None:
        for rule, example in _OURS.items():
            parts = {"changes": staticmethod(rule), "example": example, "__doc__": rule.__doc__}
            self[rule.__name__] = type(rule.__name__, (_Rule,), parts)


@cache
def operators() -> dict[str, Operator]:
    """Every operator by its name, after each of fastattn's has made its example."""
    provider = cosmic_ray.plugins.OPERATOR_PROVIDERS["fastattn"] = OwnOperators()
    for kind in provider.values():
        for example in kind.examples():
            made = mutate_code(example.pre_mutation_code, kind(), example.occurrence)
            assert made == example.post_mutation_code, (kind.__name__, made)
    names = cosmic_ray.plugins.operator_names()
    chosen = [x for x in names if x.startswith("fastattn/") or _BORROWED.match(x)]
    return {name: cosmic_ray.plugins.get_operator(name)() for name in chosen}


def changes_nothing(node: NodeOrLeaf) -> bool:
    """Is it part of a type hint, of an overload or of what only type checkers read, or a bare *?"""
    part: NodeOrLeaf | None = node
    while part is not None and (of := part.parent) is not None:
        before = part.get_previous_sibling()
        hint = of.type in ("annassign", "tfpdef") and before is not None and _text(before) == ":"
        returned = of.type == "funcdef" and of.annotation is part
        checked = part.type == "if_stmt" and "TYPE_CHECKING" in part.children[1].get_code()
        bare = of.type == "parameters" and part.type == "operator"
        overload = part.type == "decorated" and "@overload" in _text(part)
        if hint or returned or checked or bare or overload:
            return True
        part = of
    return False
