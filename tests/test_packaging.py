"""Contents of an install, and effects of `import fastattn`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from checkout import foreign
from layout_rules import PACKAGES

CHECKOUT = Path(__file__).resolve().parents[1]
HEAVY = ("tokenizers", "safetensors", "tqdm", "matplotlib", "transformers", "sacrebleu")
HEAVY += ("torch._dynamo",)


def test_kernels_is_not_a_top_level_package():
    # Other libraries probe for a package of this name and would take ours for it.
    assert importlib.util.find_spec("kernels") is None
    assert importlib.util.find_spec("fastattn.kernels") is not None


def test_tests_of_another_checkout_do_not_run_this_ones_code(tmp_path):
    assert list(foreign(CHECKOUT)) == []
    assert list(foreign(tmp_path)) == [
        f"{name} comes from {CHECKOUT / folder}, not from {tmp_path / folder}"
        for folder, name in PACKAGES.items()
    ]


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
