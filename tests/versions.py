"""Checks fastattn on other versions of Python, torch, Triton, transformers: `make test-versions`.

Each row of ROWS has a virtual environment under build/versions/, kept until pyproject.toml changes.
Interpreters are looked for as python3.10 and so on in the folders of $PYTHON_DIRS, which are
separated like those of $PATH, and then in those of $PATH. A row without its interpreter fails.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

# What runs on each row, as pytest takes it; of what is cross-compiled, some of each kind.
CHECKS = {
    "numerics": [
        "kernels/test_interpreter.py", "functional/test_attention.py",
        "functional/test_generated_calls.py", "kernels/test_mask.py",
        "kernels/test_key_extents.py", "functional/test_decode.py",
        "functional/test_decode_codes.py", "functional/test_few_queries.py",
        "kernels/test_descriptors.py", "cache/test_append.py",
        # These take longer than the rest together.
        "-k", "not test_plans and not test_operators",
    ],
    "compile": [
        "kernels/test_compile.py", "kernels/test_new_sizes.py", "testing/test_cross_compile.py",
    ],
    "emulator": [
        "testing/test_gluon_emulator.py", "kernels/test_hopper_attention.py",
        "kernels/test_hopper_parts.py",
    ],
    "torch": [
        "compat/test_sdpa.py", "functional/test_nan.py", "torch_backend/test_torch_attention.py",
        "ops/test_tracing.py", "jit_functions/test_python_functions.py", "compat/test_swap.py",
        "compat/test_flex_attention.py",
    ],
    "transformers": [
        "compat/test_transformers.py", "compat/test_transformers_batching.py",
        "compat/test_transformers_flash.py", "compat/test_transformers_forward.py",
        "compat/test_transformers_masks.py", "compat/test_transformers_packed.py",
        # Of families that older releases lack, or that take no registered function there.
        "-k", "not indexer and not relative_bias and not encoder_with_window",
    ],
    "tools": ["bench/tune/test_candidates.py", "bench/tune/test_tuner.py", "test_packaging.py"],
}  # fmt: skip


@dataclass(frozen=True)
class Versions:
    """One row: releases of Python and these packages that go together."""

    python: str
    torch: str
    triton: str
    transformers: str

    @property
    def name(self) -> str:
        packages = f"torch{self.torch}-triton{self.triton}-transformers{self.transformers}"
        return f"python{self.python}-{packages}"

    @property
    def folder(self) -> Path:
        return CHECKOUT / "build" / "versions" / self.name


# Every release of torch and Triton, the oldest and the newest of the others, in as few rows as it
# takes.
ROWS = (
    Versions("3.10", "2.11", "3.6", "5.4"),
    Versions("3.12", "2.12", "3.7", "5.10"),
    Versions("3.13", "2.13", "3.9", "5.16"),
    Versions("3.13", "2.14", "3.8", "5.22"),
    Versions("3.13", "2.15", "3.9", "5.24"),
)


class RowError(Exception):
    """Why a row cannot be checked."""


def run(command: list[str | Path], failed: str) -> None:
    """Run a command in the checkout, with its output shown.

    Raises:
        RowError: it did not exit with 0; `failed` is the message.
    """
    sys.stdout.flush()
    if subprocess.run(command, cwd=CHECKOUT).returncode:
        raise RowError(failed)


def interpreter(version: str) -> str:
    """The path of a Python of this version that runs."""
    name = f"python{version}"
    folders = [os.environ.get("PYTHON_DIRS", ""), os.environ.get("PATH", os.defpath)]
    for folder in filter(None, os.pathsep.join(folders).split(os.pathsep)):
        actual = shutil.which(name, path=folder)
        # Version managers put names on PATH that stand for no interpreter.
        if actual and not subprocess.run([actual, "-c", ""], capture_output=True).returncode:
            return actual
    raise RowError(f"no {name} in PYTHON_DIRS or PATH")


def environment(row: Versions) -> Path:
    """The Python of the row's environment, which is made if it is not there."""
    python, made = row.folder / "bin" / "python", row.folder / "installed"
    if made.exists() and made.stat().st_mtime > (CHECKOUT / "pyproject.toml").stat().st_mtime:
        return python
    run([interpreter(row.python), "-m", "venv", "--clear", row.folder], "no environment made")
    pip = [python, "-m", "pip", "install", *shlex.split(os.environ.get("PIP_ARGS", ""))]
    run([*pip, f"torch=={row.torch}.*", "-e", ".[test]"], "not installed")
    # torch names the one release of Triton that it was built with.
    run([*pip, "--no-deps", f"triton=={row.triton}.*"], "Triton not installed")
    run([*pip, f"transformers=={row.transformers}.*"], "transformers not installed")
    made.touch()
    return python


def check(python: Path, kind: str) -> str:
    """Run the tests of one kind, and return the verdict."""
    chosen = [f"tests/{name}" if name.endswith(".py") else name for name in CHECKS[kind]]
    options = ["-q", "--dist", "loadfile", "-n", os.environ.get("TEST_WORKERS", "auto")]
    extra = shlex.split(os.environ.get("PYTEST_ARGS", ""))
    command = [python, "-m", "pytest", *options, *extra, *chosen]
    return "FAILED" if subprocess.run(command, cwd=CHECKOUT).returncode else "passed"


def check_row(row: Versions) -> dict[str, str]:
    """The verdict on each kind of tests of a row, or why there is none."""
    sys.stdout.write(f"\n==== {row.name}\n")
    try:
        python = environment(row)
        run([python, "-c", "import fastattn, fastattn.kernels.hopper.forward"], "import fails")
    except RowError as error:
        return {"FAILED": str(error)}
    return {kind: check(python, kind) for kind in CHECKS}


def main() -> int:
    """Check the rows named as arguments, or all; 0 if every one passed."""
    requested = sys.argv[1:]
    unknown = set(requested) - {row.name for row in ROWS}
    if unknown:
        sys.exit(f"no rows {sorted(unknown)}; there are {[row.name for row in ROWS]}")
    results = {row.name: check_row(row) for row in ROWS if not requested or row.name in requested}
    lines = (" ".join((name, *map(": ".join, of_row.items()))) for name, of_row in results.items())
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return int(any("FAILED" in (*x, *x.values()) for x in results.values()))


if __name__ == "__main__":
    sys.exit(main())
