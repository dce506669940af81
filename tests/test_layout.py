"""The rules of `layout_rules`: kept by this tree, and broken by trees with planted violations."""

import subprocess
import sys
from pathlib import Path

import pytest
from layout_rules import FLOORS, REQUIRED, find_imports, find_modules, find_unused, find_violations

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


def test_every_hard_dependency_is_used():
    modules = find_modules(CHECKOUT)
    arrows = [x for name, path in modules.items() for x in find_imports(name, path, modules)]
    assert {arrow.target.partition(".")[0] for arrow in arrows if arrow.eager} >= REQUIRED


OPS, MASK, FORWARD = "fastattn/ops/attend.py", "kernels/rules/mask.py", "kernels/forward.py"
ATTEND, CHECKS, TEXT = "fastattn/functional/attend.py", "fastattn/checks.py", "fastattn/cli/text.py"
# What a file may keep for itself.
PRIVATE = """
def _step(): ...
class Run:
    _left: int
    def _go(self): ...
"""


VIEW = "fastattn/cache/view.py"
LAZY_RULE = "def f():\n    from .kernels.rules.mask import visible"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (OPS, "from .. import functional", "floor above"),
        (OPS, "def f():\n    import fastattn.modules", "floor above"),
        (CHECKS, "import fastattn", "floor above"),
        (ATTEND, "import fastattn.testing", "floor above"),
        (MASK, "from .. import forward", "floor above"),
        ("fastattn/reference.py", "from . import ops", "stay apart"),
        (OPS, "from .. import reference", "stay apart"),
        ("fastattn/novel/attend.py", "", "has no floor"),
        (ATTEND, "from fastattn.kernels import forward", "only fastattn.ops"),
        (CHECKS, LAZY_RULE, "only fastattn.ops"),
        (FORWARD, "import einops", "kernels/ may import"),
        (FORWARD, "from fastattn.kernels.rules import mask", "relative"),
        (FORWARD, "import fastattn", "relatively"),
        (TEXT, "import tqdm", "import time"),
        (VIEW, "from . import dense", "view -> fastattn"),
        (VIEW, "def f():\n    from .dense import rows", "import each other"),
        (TEXT, "from .run import _step", "imports _step, a private"),
        (TEXT, "from . import run\nrun._step()", "uses run._step"),
        (TEXT, "from . import run\nmock.patch.object(run, '_step', 1)", "uses run._step"),
        (TEXT, "def f(x):\n    x.run._go()", "uses x.run._go, a private"),
        (TEXT, "def f(x):\n    x._kept = 1\n    x._left", "x._left"),
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
    actual = find_violations(plant(tmp_path / "wrong", files | {path: text}))
    assert len(actual) >= 1
    assert any(message in line for line in actual), actual
