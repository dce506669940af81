"""The oldest Triton that is supported compiles the kernels that training and decoding run most.

`make test` installs that release in a folder of its own; `make test-versions` runs more of the
suite with it, and other releases.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = "3.6"
TESTS = Path(__file__).resolve().parents[1]
# What they allow of spills and instructions, and what of it this release passes over, is theirs.
KERNELS = (
    "test_hopper_compile.py::test_forward_compiles_well[128-causal]",
    "test_hopper_compile.py::test_backward_compiles_well[128-causal]",
    "test_compile.py::test_compiles_well[sm_90-forward-128-bf16-causal]",
    "test_compile.py::test_compiles_well[sm_90-backward-128-bf16-causal]",
    "test_compile.py::test_full_blocks_take_few_instructions[forward-128-bf16]",
    "test_decode_compile.py::test_compiles_well[sm_90-contiguous-128-bf16-None-1-plain]",
)


def test_the_oldest_triton_compiles_the_kernels() -> None:
    folder = Path(sys.prefix) / f"triton-{OLDEST}"
    if not folder.exists():
        pytest.skip(f"no Triton {OLDEST} in {folder}: make test installs it there")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [str(TESTS / "kernels" / name) for name in KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"triton {OLDEST}." in done.stdout
    assert f"{len(KERNELS)} passed" in done.stdout
