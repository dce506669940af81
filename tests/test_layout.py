"""Who may import whom, what names files may take from each other, and how full a folder may be.

The rules are checked on the source text, so that a violation is found even in a branch that no test
runs. The checker is itself tested against trees with planted violations.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

# From the top floor to the bottom. A module belongs to the longest name that it starts with, and
# may import from its own floor and from those below. "fastattn.*" are the files beside the folders.
FLOORS: tuple[str, ...] = (
    "fastattn.cli fastattn.__main__",
    "fastattn.testing fastattn.bench",
    "fastattn.training fastattn.generation",
    "fastattn.models",
    "fastattn",
    "fastattn.compat",
    "fastattn.modules",
    "fastattn.parallel",
    "fastattn.functional",
    "fastattn.cache",
    "fastattn.dispatch",
    "fastattn.tuned",
    "fastattn.ops",
    "fastattn.torch_backend fastattn.reference",
    "fastattn.*",
    "fastattn.kernels",
    "fastattn.kernels.launch",
    "fastattn.kernels.rules",
)
# Folders, and what they are installed as.
PACKAGES = {
    "fastattn": "fastattn",
    "kernels": "fastattn.kernels",
    "bench/harness": "fastattn.bench",
}
# The oracle and what it judges share no code and never stand in for each other.
APART = {
    ("fastattn.reference", "fastattn.torch_backend.formula"),
    ("fastattn.torch_backend.formula", "fastattn.reference"),
    ("fastattn.reference", "fastattn.ops"),
    ("fastattn.reference", "fastattn.dispatch"),
    ("fastattn.ops", "fastattn.reference"),
}
KERNELS = "fastattn.kernels"
# The record of a call, whose fields launchers read. They name its type and do not import it.
TYPED_BY_KERNELS = "fastattn.options"
KERNEL_IMPORTERS = ("fastattn.ops", "fastattn.testing", "fastattn.bench")
KERNEL_DEPENDENCIES = {"torch", "triton", "numpy"}
MOST_FILES = 14  # directly in one folder
# What a plain install has; everything else is imported inside the function that needs it.
REQUIRED = {"torch", "triton", "einops"}


@dataclass(frozen=True)
class Import:
    """One import statement's arrow: `importer` uses `target`."""

    importer: str
    target: str
    line: int
    relative: bool
    eager: bool  # runs when the module is imported
    typing: bool = False  # under TYPE_CHECKING: never runs

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def find_modules(root: Path) -> dict[str, Path]:
    """Map every module to its file, under the name that it is installed by."""
    modules = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            modules[".".join((package, *parts))] = path
    return modules


def absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    base = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join(base + ([statement.module] if statement.module else []))


def find_imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Yield the imports of one module, those inside functions and TYPE_CHECKING blocks included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, eager: bool, typing: bool = False) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, False, eager, typing)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, package)
            for alias in node.names:
                member = f"{source}.{alias.name}"
                target = member if member in modules else source
                yield Import(name, target, node.lineno, node.level > 0, eager, typing)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False, True)
            for child in node.orelse:
                yield from visit(child, eager)
        else:
            inner = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, typing)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


def floor_of(name: str, modules: dict[str, Path]) -> int | None:
    """Return the index in FLOORS of the longest entry that covers the module, 0 being the top."""
    file = name.count(".") == 1 and modules[name].name != "__init__.py"
    found = [
        (len(entry), index)
        for index, floor in enumerate(FLOORS)
        for entry in floor.split()
        if name == entry
        or (entry == "fastattn.*" and file)
        or (entry != "fastattn" and name.startswith(entry + "."))
    ]
    return max(found)[1] if found else None


def check_inside(arrow: Import, modules: dict[str, Path]) -> Iterator[str]:
    """Rules for an import of the project's own modules."""
    if arrow.typing and arrow.target == TYPED_BY_KERNELS and within(arrow.importer, KERNELS):
        return
    source, target = (floor_of(name, modules) for name in (arrow.importer, arrow.target))
    if source is not None and target is not None and target < source:
        yield f"{arrow}, which is on a floor above"
    if any(within(arrow.importer, a) and within(arrow.target, b) for a, b in APART):
        yield f"{arrow}; the oracle and what it judges stay apart"
    in_kernels = within(arrow.importer, "fastattn.kernels")
    if in_kernels and not arrow.relative:
        yield f"{arrow}; inside kernels/ import relatively"
    permitted = in_kernels or any(within(arrow.importer, entry) for entry in KERNEL_IMPORTERS)
    if within(arrow.target, "fastattn.kernels") and not permitted:
        yield f"{arrow}; only {' and '.join(KERNEL_IMPORTERS)} may"


def check_outside(arrow: Import) -> Iterator[str]:
    """Rules for an import of a third party."""
    top = arrow.target.partition(".")[0]
    if top in sys.stdlib_module_names:
        return
    if within(arrow.importer, "fastattn.kernels"):
        if top not in KERNEL_DEPENDENCIES:
            yield f"{arrow}; kernels/ may import {', '.join(sorted(KERNEL_DEPENDENCIES))} only"
    elif arrow.eager and top not in REQUIRED:
        yield f"{arrow} at import time; import it in the function that needs it"


def find_cycles(arrows: list[Import], modules: dict[str, Path]) -> Iterator[str]:
    """Report a circle of modules, over imports inside functions and for type checkers as well."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for arrow in arrows:
        if arrow.target in modules and arrow.target != arrow.importer:
            graph[arrow.importer].add(arrow.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import each other: {' -> '.join(reversed(error.args[1]))}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_members(tree: ast.Module) -> set[str]:
    """The private methods and attributes of a file's classes."""
    found: set[str] = set()
    for node in (part for x in ast.walk(tree) if isinstance(x, ast.ClassDef) for part in x.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = (x for x in ast.walk(node) if isinstance(x, ast.Attribute))
            found |= {node.name, *(x.attr for x in stored if isinstance(x.ctx, ast.Store))}
        else:
            found |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return set(filter(is_private, found))


def find_private_uses(modules: dict[str, Path]) -> Iterator[str]:
    """Report private names of modules, and private members of classes, that another file uses.

    A member is an attribute of something that is not the object itself, under a name that classes
    of other files have and none of this file has.
    """
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    members = {name: private_members(tree) for name, tree in trees.items()}
    of_others = set().union(*members.values())
    for name, tree in trees.items():
        package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
        imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = absolute(node, package)
                for alias in node.names:
                    if f"{source}.{alias.name}" in modules:
                        imported.add(alias.asname or alias.name)
                    elif within(source, "fastattn") and is_private(alias.name):
                        yield f"{name}:{node.lineno} imports {alias.name}, a private name"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                other = node.attr in of_others and node.attr not in members[name]
                if owner in imported or (other and owner not in ("self", "cls", "super()")):
                    yield f"{name}:{node.lineno} uses {owner}.{node.attr}, a private name"
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                owner, attribute = node.args[:2]
                value = attribute.value if isinstance(attribute, ast.Constant) else None
                if ast.unparse(owner) in imported and is_private(str(value)):
                    yield f"{name}:{node.lineno} uses {ast.unparse(owner)}.{value}, a private name"


def find_full_folders(modules: dict[str, Path]) -> Iterator[str]:
    """Report folders with more files than a reader takes in; a command's name is none to read."""
    files = [path for path in modules.values() if path.name != "__main__.py"]
    for folder, count in Counter(path.parent for path in files).items():
        if count > MOST_FILES:
            yield f"{folder.name}/ has {count} files, more than {MOST_FILES}"


def find_violations(root: Path) -> list[str]:
    """Return every broken rule of the tree under root, as readable lines."""
    modules = find_modules(root)
    arrows: list[Import] = []
    found = []
    for name, path in modules.items():
        arrows += find_imports(name, path, modules)
        if floor_of(name, modules) is None:
            found.append(f"{name} has no floor")
    for arrow in arrows:
        inside = within(arrow.target, "fastattn")
        found.extend(check_inside(arrow, modules) if inside else check_outside(arrow))
    found.extend(find_cycles(arrows, modules))
    found.extend(find_private_uses(modules))
    found.extend(find_full_folders(modules))
    return found


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a small source tree."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in list(path.relative_to(root).parents)[:-1]:
            (root / folder / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return root


def test_the_package_keeps_the_rules():
    assert find_violations(CHECKOUT) == []


def test_every_floor_entry_exists():
    modules = find_modules(CHECKOUT)
    entries = [entry for floor in FLOORS for entry in floor.split() if entry != "fastattn.*"]
    assert [entry for entry in entries if entry not in modules] == []


def test_permitted_imports_are_accepted(tmp_path):
    files = {
        "fastattn/__init__.py": "from .functional.attend import attention",
        "fastattn/functional/attend.py": "from .. import checks, ops\nattention = ops.launch",
        "fastattn/checks.py": "import math",
        "fastattn/ops/attend.py": "import torch\nfrom fastattn.kernels.forward import launch",
        "fastattn/modules/self_attention.py": "from ..functional.attend import attention",
        "fastattn/cache/dense.py": "import typing\nif typing.TYPE_CHECKING:\n    import numpy",
        "fastattn/cli/main.py": "def train():\n    import tqdm\n    from fastattn import attention",
        "kernels/forward.py": "import triton.language as tl\nfrom .rules.mask import visible",
        "kernels/rules/mask.py": "import triton\nvisible = 1",
        "bench/harness/cases.py": "from ..kernels import forward",
    }
    assert find_violations(plant(tmp_path, files)) == []


def test_own_private_names_and_those_of_libraries_are_accepted(tmp_path):
    text = """
import torch
from . import checks
class A:
    _size: int
    def __init__(self, other: "A"):
        self._kept = other._kept + other._size
def count(module, a: A):
    return a._kept, module._buffers, torch._C, checks.__name__, (1, 2)._replace()
"""
    files = {
        "fastattn/checks.py": "class B:\n    def __init__(self):\n        self._kept = 1",
        "fastattn/positions.py": text,
    }
    assert find_violations(plant(tmp_path, files)) == []


def test_every_hard_dependency_is_used():
    modules = find_modules(CHECKOUT)
    arrows = [x for name, path in modules.items() for x in find_imports(name, path, modules)]
    assert {arrow.target.partition(".")[0] for arrow in arrows if arrow.eager} >= REQUIRED


def planted(name: str, path: str, text: str, message: str) -> Any:
    return pytest.param(path, text, message, id=name)


OPS, MASK, FORWARD = "fastattn/ops/attend.py", "kernels/rules/mask.py", "kernels/forward.py"
ATTEND, CHECKS, TEXT = "fastattn/functional/attend.py", "fastattn/checks.py", "fastattn/cli/text.py"
# What a file may keep for itself.
PRIVATE = """
def _step(): ...
class Run:
    _left: int
    def _go(self): ...
"""


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        planted("upward", OPS, "from .. import functional", "floor above"),
        planted("upward-lazy", OPS, "def f():\n    import fastattn.modules", "floor above"),
        planted("package-root", CHECKS, "import fastattn", "floor above"),
        planted("testing", ATTEND, "import fastattn.testing", "floor above"),
        planted("kernel-upward", MASK, "from .. import forward", "floor above"),
        planted("oracle", "fastattn/reference.py", "from . import ops", "stay apart"),
        planted("oracle-used", OPS, "from .. import reference", "stay apart"),
        planted("no-floor", "fastattn/novel/attend.py", "", "has no floor"),
        planted("importer", ATTEND, "from fastattn.kernels import forward", "only fastattn.ops"),
        planted(
            "lazy-importer",
            "fastattn/dispatch.py",
            "def f():\n    from .kernels.rules.mask import visible",
            "only fastattn.ops",
        ),
        planted("kernel-deps", FORWARD, "import einops", "kernels/ may import"),
        planted("kernel-absolute", FORWARD, "from fastattn.kernels.rules import mask", "relative"),
        planted("kernel-package", FORWARD, "import fastattn", "relatively"),
        planted("eager-extra", TEXT, "import tqdm", "import time"),
        planted("circle", "fastattn/cache/view.py", "from . import dense", "view -> fastattn"),
        planted(
            "circle-lazy",
            "fastattn/cache/view.py",
            "def f():\n    from .dense import rows",
            "import each other",
        ),
        planted("private-import", TEXT, "from .run import _step", "imports _step, a private"),
        planted("private-of-module", TEXT, "from . import run\nrun._step()", "uses run._step"),
        planted(
            "private-by-name",
            TEXT,
            "from . import run\nmock.patch.object(run, '_step', 1)",
            "uses run._step",
        ),
        planted("private-method", TEXT, "def f(x):\n    x.run._go()", "uses x.run._go, a private"),
        planted("private-attribute", TEXT, "def f(x):\n    x._kept = 1\n    x._left", "x._left"),
    ],
)
def test_planted_violation_is_found(tmp_path, path, text, message):
    files = {
        ATTEND: "",
        CHECKS: "",
        OPS: "",
        FORWARD: "",
        MASK: "",
        "fastattn/reference.py": "",
        "fastattn/modules/self_attention.py": "from .. import cache",
        "fastattn/cache/dense.py": "from . import view",
        "fastattn/cache/view.py": "",
        "fastattn/testing/__init__.py": "",
        "fastattn/cli/run.py": PRIVATE,
    }
    assert find_violations(plant(tmp_path / "right", files)) == []
    found = find_violations(plant(tmp_path / "wrong", files | {path: text}))
    assert len(found) >= 1
    assert any(message in line for line in found), found


@pytest.mark.parametrize("count", [MOST_FILES, MOST_FILES + 1])
def test_full_folder_is_found(tmp_path, count):
    files = {f"bench/harness/file_{i}.py": "" for i in range(count - 1)}
    found = find_violations(plant(tmp_path, files))
    assert found == ([] if count == MOST_FILES else ["harness/ has 15 files, more than 14"])
