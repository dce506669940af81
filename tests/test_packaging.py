"""Contents of an install, and effects of `import fastattn`."""

import fnmatch
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import foreign
from layout_rules import PACKAGES

import fastattn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch._dynamo",
    "tokenizers",
    "safetensors",
    "tqdm",
    "matplotlib",
    "transformers",
    "sacrebleu",
)


def find_packages(root: Path) -> dict[str, Path]:
    """Map every package to its folder, under the name that it is installed by."""
    packages = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("__init__.py")):
            parts = path.parent.relative_to(root / folder).parts
            packages[".".join((package, *parts))] = path.parent
    return packages


def find_unpackaged(root: Path, settings: dict) -> list[str]:
    """Return what an install would leave out: packages not named, data files no pattern covers."""
    packages = find_packages(root)
    missing = sorted(set(packages) - set(settings["packages"]))
    for path in (path for folder in PACKAGES for path in (root / folder).rglob("*")):
        if path.is_dir() or path.suffix == ".pyc":
            continue
        name = path.relative_to(root).as_posix()
        if path.suffix == ".py":
            if path.parent not in packages.values():
                missing.append(f"{name} (its folder has no __init__.py)")
            continue
        homes = [item for item in packages.items() if item[1] in path.parents]
        owner, home = max(homes, key=lambda item: len(item[1].parts))
        patterns = settings["package-data"].get(owner, [])
        relative = path.relative_to(home).as_posix()
        if not any(fnmatch.fnmatch(relative, pattern) for pattern in patterns):
            missing.append(name)
    return missing


def setuptools_settings() -> dict:
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["tool"]["setuptools"]


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_everything_is_packaged():
    assert find_unpackaged(CHECKOUT, setuptools_settings()) == []


def test_every_named_package_exists():
    assert set(setuptools_settings()["packages"]) <= set(find_packages(CHECKOUT))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param("fastattn/extra/__init__.py", "fastattn.extra", id="package"),
        pytest.param("fastattn/extra/module.py", "no __init__", id="namespace"),
        pytest.param("kernels/hopper/__init__.py", "fastattn.kernels.hopper", id="kernel-package"),
        pytest.param("bench/harness/time/__init__.py", "fastattn.bench.time", id="bench-package"),
        pytest.param(
            "kernels/launch/tuning/table.csv", "kernels/launch/tuning/table.csv", id="data"
        ),
    ],
)
def test_planted_gap_in_the_packages_is_found(tmp_path, path, message):
    settings = {
        "packages": ["fastattn", "fastattn.kernels"],
        "package-data": {"fastattn.kernels": ["launch/tuning/*.json"]},
    }
    for name in ("fastattn/__init__.py", "kernels/__init__.py", "kernels/launch/tuning/table.json"):
        touch(tmp_path / name)
    assert find_unpackaged(tmp_path, settings) == []
    touch(tmp_path / path)
    assert any(message in line for line in find_unpackaged(tmp_path, settings))


def test_kernels_is_not_a_top_level_package():
    # Other libraries probe for a package of this name and would take ours for it.
    assert importlib.util.find_spec("kernels") is None
    assert importlib.util.find_spec("fastattn.kernels") is not None


def test_tests_of_another_checkout_do_not_run_this_ones_code(tmp_path):
    assert list(foreign(CHECKOUT)) == []
    (tmp_path / "tests").mkdir()
    shutil.copy(CHECKOUT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    helpers = f"pythonpath={CHECKOUT / 'tests' / 'helpers'}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", helpers, "--rootdir", tmp_path, tmp_path / "tests"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    for folder, name in PACKAGES.items():
        line = f"{name} comes from {CHECKOUT / folder}, not from {tmp_path / folder}"
        assert line in done.stdout + done.stderr
    assert "-m pip install -e ." in done.stdout + done.stderr


# Runs in a process of its own. torch and triton are imported first: what they do is not ours.
# Each module comes after those before it, and writes to files of its own.
IMPORT_PROBE = """
import importlib, json, os, sys
import torch, triton
queries = []
def record(name, function):
    def wrapper(*args, **kwargs):
        queries.append(name)
        return function(*args, **kwargs)
    return wrapper
for name in ("_lazy_init", "is_available", "device_count", "current_device",
             "get_device_properties", "get_device_capability", "get_device_name"):
    setattr(torch.cuda, name, record(name, getattr(torch.cuda, name)))
for module in json.loads(sys.argv[1]):
    heavy = [name for name in json.loads(sys.argv[2]) if name not in sys.modules]
    environment = dict(os.environ)
    del queries[:]
    output = os.open(module + ".txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1), os.dup2(output, 2)
    importlib.import_module(module)
    sys.stdout.flush(), sys.stderr.flush()
    report = {
        "queries": queries,
        "initialized": torch.cuda.is_initialized(),
        "heavy": [name for name in heavy if name in sys.modules],
        "environment": dict(os.environ) != environment,
    }
    with open(module + ".json", "w", encoding="utf-8") as file:
        json.dump(report, file)
"""


def probe_imports(modules: list[str], folder: Path) -> list[dict]:
    """Import modules in a new interpreter; return what each did and printed."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, json.dumps(modules), json.dumps(HEAVY)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.[jt]*")}
    assert done.returncode == 0, (done.stderr, outputs)
    return [
        json.loads(outputs[f"{module}.json"]) | {"printed": outputs[f"{module}.txt"]}
        for module in modules
    ]


QUIET = {"queries": [], "initialized": False, "heavy": [], "environment": False, "printed": ""}
# By what each does, that one thing alone.
PLANTED = {
    "queries": "import torch; torch.cuda.is_available()",
    "heavy": "import matplotlib",
    "environment": "import os; os.environ['FASTATTN_X'] = '1'",
    "printed": "print('hello')",
}


def test_import_has_no_side_effects_and_planted_ones_are_found(tmp_path):
    for key, text in PLANTED.items():
        (tmp_path / f"planted_{key}.py").write_text(text, encoding="utf-8")
    ours, *planted = probe_imports(["fastattn", *(f"planted_{key}" for key in PLANTED)], tmp_path)
    assert ours == QUIET
    for key, report in zip(PLANTED, planted, strict=True):
        assert {name for name in QUIET if report[name] != QUIET[name]} == {key}


def find_undocumented_methods(value: type) -> list[str]:
    """Return a class's public methods without a docstring; an overriding one may inherit it."""
    own = {
        key: member
        for key, member in vars(value).items()
        if inspect.isfunction(member) and not key.startswith("_")
    }
    # torch.nn.Module.forward is documented, but says nothing about any module's own arguments.
    inherited = {key for base in value.__mro__[1:] for key in vars(base)} - {"forward"}
    return [key for key, member in own.items() if not member.__doc__ and key not in inherited]


def find_undocumented(names: dict[str, object]) -> list[str]:
    """Return the names, and Class.method names, that have no docstring of their own."""
    missing = []
    for name, value in names.items():
        if not (callable(value) or inspect.ismodule(value)):
            continue
        text = value.__doc__ or ""
        # A dataclass without a docstring is given its own signature as one.
        if not text or text.startswith(f"{name}("):
            missing.append(name)
        if inspect.isclass(value):
            missing += [f"{name}.{key}" for key in find_undocumented_methods(value)]
    return missing


def test_public_names_are_documented():
    assert find_undocumented({name: getattr(fastattn, name) for name in fastattn.__all__}) == []


def test_planted_undocumented_names_are_found():
    @dataclass
    class Plain:
        x: int

    class Documented:
        """Documented."""

        def method(self):
            pass

    class Derived(Documented):
        """Documented; `method` is the base class's to document."""

        def method(self):
            pass

        def forward(self):
            pass

    def bare():
        pass

    found = find_undocumented(
        {"Plain": Plain, "Documented": Documented, "Derived": Derived, "bare": bare, "n": 1}
    )
    assert found == ["Plain", "Documented.method", "Derived.forward", "bare"]
