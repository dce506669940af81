"""Rules besides the layers: imports, names of other files, and how full a folder may be.

The rules are checked on the source text, so that a violation is found even in a branch that no test
runs. `test_layout.py` asks them of this tree, and of trees with planted violations.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Folders, and what they are installed as.
PACKAGES = {
    "fastattn": "fastattn",
    "kernels": "fastattn.kernels",
    "bench/harness": "fastattn.bench",
}
KERNELS = "fastattn.kernels"
KERNEL_DEPENDENCIES = {"torch", "triton", "numpy"}
MOST_FILES = 15  # directly in one folder
# What a user or a script imports, and what a process is started with.
ENTRIES = {
    "fastattn.__main__",
    "fastattn.bench.results.charts",
    "fastattn.bench.results.tables",
    "fastattn.bench.results.verdicts",
    "fastattn.bench.time.jobs",
    "fastattn.bench.time.prebuilt",
    "fastattn.compat.diffusers",
    "fastattn.compat.flash_mla",
    "fastattn.compat.flex_attention",
    "fastattn.compat.hub",
    "fastattn.compat.llama",
    "fastattn.compat.sglang",
    "fastattn.compat.torch_flash",
    "fastattn.compat.vllm",
    "fastattn.compat.xformers",
    "fastattn.models.context_parallel",
    "fastattn.models.tensor_parallel",
    "fastattn.mods",
    "fastattn.testing.compiling.calls",
    "fastattn.testing.verify.child",
}
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

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """The tree of a file, and all that is in it."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def find_modules(root: Path) -> dict[str, Path]:
    """Map every module to its file, under the name that it is installed by."""
    modules = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py*")):
            if path.suffix not in (".py", ".pyi") or path.name == "__init__.pyi":
                continue
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

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, False, eager)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, package)
            for alias in node.names:
                member = f"{source}.{alias.name}"
                target = member if member in modules else source
                yield Import(name, target, node.lineno, node.level > 0, eager)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, eager)
        else:
            inner = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner)

    yield from visit(parsed(path)[0], True)


def check_import(arrow: Import) -> Iterator[str]:
    """Rules for an import inside kernels/, and for one of a third party."""
    top = arrow.target.partition(".")[0]
    if top in sys.stdlib_module_names:
        return
    if top == "fastattn":
        if within(arrow.importer, KERNELS) and not arrow.relative:
            yield f"{arrow}; inside kernels/ import relatively"
    elif within(arrow.importer, KERNELS):
        if top not in KERNEL_DEPENDENCIES:
            yield f"{arrow}; kernels/ may import {', '.join(sorted(KERNEL_DEPENDENCIES))} only"
    elif arrow.eager and top not in REQUIRED:
        yield f"{arrow} at import time; import it in the function that needs it"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_members(tree: tuple[ast.AST, ...]) -> set[str]:
    """The private methods and attributes of a file's classes."""
    names: set[str] = set()
    for node in (part for x in tree if isinstance(x, ast.ClassDef) for part in x.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = (x for x in ast.walk(node) if isinstance(x, ast.Attribute))
            names |= {node.name, *(x.attr for x in stored if isinstance(x.ctx, ast.Store))}
        else:
            names |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return set(filter(is_private, names))


def find_private_uses(modules: dict[str, Path]) -> Iterator[str]:
    """Report private names of modules, and private members of classes, that another file uses.

    A member is an attribute of something that is not the object itself, under a name that classes
    of other files have and none of this file has.
    """
    trees = {name: parsed(path) for name, path in modules.items()}
    members = {name: private_members(tree) for name, tree in trees.items()}
    of_others = set().union(*members.values())
    for name, tree in trees.items():
        package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
        imported: set[str] = set()
        for node in tree:
            if isinstance(node, ast.ImportFrom):
                source = absolute(node, package)
                for alias in node.names:
                    if f"{source}.{alias.name}" in modules:
                        imported.add(alias.asname or alias.name)
                    elif within(source, "fastattn") and is_private(alias.name):
                        yield f"{name}:{node.lineno} imports {alias.name}, a private name"
        for node in tree:
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                other = node.attr in of_others and node.attr not in members[name]
                if owner in imported or (other and owner not in ("self", "cls", "super()")):
                    yield f"{name}:{node.lineno} uses {owner}.{node.attr}, a private name"
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                owner, attribute = node.args[:2]
                value = attribute.value if isinstance(attribute, ast.Constant) else None
                if is_private(str(value)) and ast.unparse(owner) in imported:
                    yield f"{name}:{node.lineno} uses {ast.unparse(owner)}.{value}, a private name"


def find_full_folders(modules: dict[str, Path]) -> Iterator[str]:
    """Report folders with more files than a reader takes in; a command's name is none to read."""
    files = [path for path in modules.values() if path.name != "__main__.py"]
    for folder, count in Counter(path.parent for path in files).items():
        if count > MOST_FILES:
            yield f"{folder.name}/ has {count} files, more than {MOST_FILES}"


def find_none_results(modules: dict[str, Path]) -> Iterator[str]:
    """Report kernels' functions that return None in a tuple or record, which Triton 3.6 refuses."""
    for name in (name for name in modules if within(name, KERNELS)):
        for function in parsed(modules[name]):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any("jit" in ast.unparse(x) for x in function.decorator_list):
                continue
            assigned = [x for x in ast.walk(function) if isinstance(x, ast.Assign)]
            absent = {ast.unparse(x.targets[0]) for x in assigned if ast.unparse(x.value) == "None"}
            for node in ast.walk(function):
                value = node.value if isinstance(node, ast.Return) else None
                parts = value.elts if isinstance(value, ast.Tuple) else []
                parts = value.args if isinstance(value, ast.Call) else parts
                if (absent | {"None"}) & set(map(ast.unparse, parts)):
                    yield f"{name}:{node.lineno} returns None among results"


def find_unused(root: Path) -> Iterator[str]:
    """Report modules that nothing imports: tools of tests belong into tests/tools/.

    The command loads the file of each subcommand by its name.
    """
    modules = find_modules(root)
    used = {
        arrow.target
        for name, path in modules.items()
        for arrow in find_imports(name, path, modules)
        if arrow.target != name
    }
    for name, path in modules.items():
        if path.name == "__init__.py" or within(name, "fastattn.cli"):
            continue
        if name not in used | ENTRIES:
            yield f"{name} is imported by nothing"


def find_violations(root: Path) -> list[str]:
    """Return every broken rule of the tree under root, as readable lines."""
    modules = find_modules(root)
    violations = []
    for name, path in modules.items():
        for arrow in find_imports(name, path, modules):
            violations.extend(check_import(arrow))
    violations.extend(find_private_uses(modules))
    violations.extend(find_full_folders(modules))
    violations.extend(find_none_results(modules))
    return violations
