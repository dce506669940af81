"""Who may import whom.

The rules are checked on the source text, so that a violation is found even in a branch that no test
runs. The checker is itself tested against trees with planted violations.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

# From the top floor to the bottom. A module belongs to the longest name that it starts with, and
# may import from its own floor and from those below. Files beside the folders are on "fastattn.*".
FLOORS: tuple[str, ...] = (
    "fastattn.testing fastattn.bench",
    "fastattn.cli",
    "fastattn.training fastattn.generation",
    "fastattn.models",
    "fastattn",
    "fastattn.compat",
    "fastattn.modules",
    "fastattn.functional",
    "fastattn.cache",
    "fastattn.dispatch",
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


def floor_of(name: str) -> int:
    """Return the index in FLOORS of the longest entry that covers the module, 0 being the top."""
    found = [
        (len(entry), index)
        for index, floor in enumerate(FLOORS)
        for entry in floor.split()
        if name == entry
        or (entry != "fastattn" and name.startswith(entry.removesuffix("*").rstrip(".") + "."))
    ]
    return max(found)[1]


def check_inside(arrow: Import) -> Iterator[str]:
    """Rules for an import of the project's own modules."""
    if arrow.typing and arrow.target == TYPED_BY_KERNELS and within(arrow.importer, KERNELS):
        return
    source, target = floor_of(arrow.importer), floor_of(arrow.target)
    if target < source:
        yield f"{arrow}, which is on a floor above"
    if (arrow.importer, arrow.target) in APART:
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
    """Report modules that reach themselves over imports that run at import time."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for arrow in arrows:
        if arrow.eager and arrow.target in modules and arrow.target != arrow.importer:
            graph[arrow.importer].add(arrow.target)
    for start in graph:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack.extend(graph[name])
        if start in seen:
            yield f"{start} imports itself by way of other modules"


def find_violations(root: Path) -> list[str]:
    """Return every broken import rule of the tree under root, as readable lines."""
    modules = find_modules(root)
    arrows: list[Import] = []
    for name, path in modules.items():
        arrows += find_imports(name, path, modules)
    found = []
    for arrow in arrows:
        inside = within(arrow.target, "fastattn")
        found.extend(check_inside(arrow) if inside else check_outside(arrow))
    found.extend(find_cycles(arrows, modules))
    return found


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a small source tree."""
    for package in ("fastattn", "kernels"):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_imports_follow_the_floors():
    assert find_violations(CHECKOUT) == []


def test_every_floor_entry_exists():
    modules = find_modules(CHECKOUT)
    entries = [entry for floor in FLOORS for entry in floor.split() if entry != "fastattn.*"]
    assert [entry for entry in entries if entry not in modules] == []


def test_permitted_imports_are_accepted(tmp_path):
    files = {
        "fastattn/__init__.py": "from .functional import attention",
        "fastattn/functional/attend.py": "from . import checks, ops\nattention = ops.launch",
        "fastattn/checks.py": "import math",
        "fastattn/ops/attention.py": "import torch\nfrom fastattn.kernels.forward import launch",
        "fastattn/modules/layer.py": "from ..functional import attend\nfrom .. import cache",
        "fastattn/cache/dense.py": "import typing\nif typing.TYPE_CHECKING:\n    import numpy",
        "fastattn/cli/main.py": "def train():\n    import tqdm\n    from fastattn import attention",
        "kernels/forward.py": "import triton.language as tl\nfrom .mask import visible\nlaunch = 1",
        "kernels/rules/mask.py": "import triton\nvisible = 1",
    }
    assert find_violations(plant(tmp_path, files)) == []


def test_every_hard_dependency_is_used():
    modules = find_modules(CHECKOUT)
    arrows = [x for name, path in modules.items() for x in find_imports(name, path, modules)]
    assert {arrow.target.partition(".")[0] for arrow in arrows if arrow.eager} >= REQUIRED


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        pytest.param(
            "fastattn/ops/attention.py", "from . import functional", "floor above", id="upward"
        ),
        pytest.param(
            "fastattn/ops/attention.py",
            "def f():\n    import fastattn.modules",
            "floor above",
            id="upward-lazy",
        ),
        pytest.param("fastattn/checks.py", "import fastattn", "floor above", id="package-root"),
        pytest.param(
            "fastattn/cli/main.py", "import fastattn.testing", "floor above", id="testing"
        ),
        pytest.param(
            "kernels/rules/mask.py", "from . import forward", "floor above", id="kernel-upward"
        ),
        pytest.param("fastattn/reference.py", "from . import ops", "stay apart", id="oracle"),
        pytest.param(
            "fastattn/ops/attention.py", "from . import reference", "stay apart", id="oracle-used"
        ),
        pytest.param("fastattn/novel.py", "", "has no floor", id="no-floor"),
        pytest.param("kernels/novel.py", "", "has no floor", id="kernel-no-floor"),
        pytest.param(
            "fastattn/functional/attend.py",
            "from fastattn.kernels import forward",
            "only fastattn.ops",
            id="importer",
        ),
        pytest.param(
            "fastattn/dispatch.py",
            "def f():\n    from .kernels.mask import x",
            "only fastattn.ops",
            id="lazy-importer",
        ),
        pytest.param(
            "kernels/forward.py", "import einops", "kernels/ may import", id="kernel-deps"
        ),
        pytest.param(
            "kernels/forward.py",
            "from fastattn.kernels import mask",
            "relatively",
            id="kernel-absolute",
        ),
        pytest.param("kernels/forward.py", "import fastattn", "relatively", id="kernel-package"),
        pytest.param(
            "fastattn/training/data/text.py", "import tqdm", "import time", id="eager-extra"
        ),
        pytest.param(
            "fastattn/cache/dense.py", "from . import modules", "imports itself", id="cycle"
        ),
    ],
)
def test_planted_violation_is_found(tmp_path, path, text, message):
    files = {
        "fastattn/functional/attend.py": "",
        "fastattn/checks.py": "",
        "fastattn/reference.py": "",
        "fastattn/ops/attention.py": "",
        "fastattn/modules/self_attention.py": "from . import cache",
        "fastattn/cache/dense.py": "",
        "fastattn/testing/__init__.py": "",
        "kernels/forward.py": "",
        "kernels/rules/mask.py": "",
    }
    found = find_violations(plant(tmp_path, files | {path: text}))
    assert len(found) >= 1
    assert any(message in line for line in found), found
