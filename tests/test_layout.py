"""The rules of `layout_rules`: kept by this tree, and broken by trees with planted violations."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from layout_rules import (
    FLOORS,
    MOST_FILES,
    REQUIRED,
    find_imports,
    find_modules,
    find_unused,
    find_violations,
)

CHECKOUT = Path(__file__).resolve().parents[1]


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


def test_every_module_is_used_and_a_planted_one_is_found(tmp_path):
    assert list(find_unused(CHECKOUT)) == []
    plant(tmp_path, {"fastattn/checks.py": "", "fastattn/a.py": "from . import checks"})
    assert list(find_unused(tmp_path)) == ["fastattn.a is imported by nothing"]


def test_every_planted_fault_still_applies():
    listed = [sys.executable, str(CHECKOUT / "tests" / "faults"), "--list"]
    done = subprocess.run(listed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
