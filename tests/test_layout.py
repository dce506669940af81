"""The rules of `layout_rules`: kept by this tree, and broken by trees with planted violations."""

from pathlib import Path

from layout_rules import REQUIRED, find_imports, find_modules, find_unused, find_violations

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


def test_a_planted_none_among_results_is_found(tmp_path):
    kernel = "@triton.jit\ndef f(x):\n    y = None\n    return x, {}\n"
    plant(tmp_path, {"kernels/a.py": kernel.format("y"), "kernels/b.py": kernel.format("x")})
    found = [x for x in find_violations(tmp_path) if "None" in x]
    assert found == ["fastattn.kernels.a:4 returns None among results"]


def test_every_hard_dependency_is_used():
    modules = find_modules(CHECKOUT)
    arrows = [x for name, path in modules.items() for x in find_imports(name, path, modules)]
    assert {arrow.target.partition(".")[0] for arrow in arrows if arrow.eager} >= REQUIRED
