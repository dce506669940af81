"""Dry run of the GPU path on a stub CUDA driver: launches, graphs, streams, devices."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

DRY_RUN = Path(__file__).parent / "dry_run"
# Parts of a process each: Triton's driver in one, fake tensors in the other.
DRIVER = ("launches.attention_calls", "launches.cache_calls", "launches.hopper_calls")
FAKES = ("fakes.direct_path", "fakes.op_path")
PROCESSES = ((*DRIVER, "running.calls", "faults.planted"), (*FAKES, "fakes.planted"))
# The message for each of `tests/dry_run/faults.py`, and of `fakes.py`.
FAULTS = {
    "batch size": r"compiled again for another shape: \['fill'\]",
    "no launch": "launched nothing",
    "grid": "a grid of 1 x 65536 x 1 programs",
    "read while captured": "item while a CUDA graph is captured",
    "descriptor's stride": r"a descriptor's stride \d is 136 bytes",
    "descriptor's address": r"a descriptor's address 0x\w+ is no multiple of 16",
    "shared memory": r"\d+ bytes of shared memory, of 64|out of resource",
}
FAKE_FAULTS = {
    "tensor on the CPU": r"attention_forward_kernel is launched on tensors of \['cpu', 'cuda:0'\]",
    "read on the way": r"DataDependentOutputException: aten\._local_scalar_dense",
    "no fake": r"There was no fake impl registered for <CustomOpDef\(dry_run::double\)>",
}


@cache
def played(parts: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Run parts of the dry run in a process of their own; their records, by part."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("TRITON_INTERPRET", "FASTATTN_BACKEND"):
        environment.pop(name, None)
    command = [sys.executable, str(DRY_RUN), *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def scenes(part: str) -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so the GPU path needs no dry run")
    if missing := [name for name in ("cc", "c++") if shutil.which(name) is None]:
        pytest.skip(f"the dry run builds a driver and a device with {missing}: not here")
    if part.startswith("fakes.") and (torch.version.cuda or torch.version.hip):
        pytest.skip("this torch is built for GPUs, so its devices are none that can be replaced")
    (process,) = (parts for parts in PROCESSES if part in parts)
    return played(process)[part]


@pytest.mark.parametrize("part", [*DRIVER, "running.calls", *FAKES])
def test_every_call_reaches_the_gpu(part: str) -> None:
    assert scenes(part)
    assert {scene["name"]: scene["faults"] for scene in scenes(part) if scene["faults"]} == {}


@pytest.mark.parametrize("part", DRIVER)
def test_no_call_waits_for_the_gpu(part: str) -> None:
    assert {scene["name"]: scene["syncs"] for scene in scenes(part) if scene["syncs"]} == {}


@pytest.mark.parametrize(
    ("part", "fault", "message"),
    [("faults.planted", *fault) for fault in FAULTS.items()]
    + [("fakes.planted", *fault) for fault in FAKE_FAULTS.items()],
)
def test_planted_fault_is_caught(part: str, fault: str, message: str) -> None:
    (faults,) = (scene["faults"] for scene in scenes(part) if scene["name"] == fault)
    assert len(faults) == 1
    assert re.search(message, faults[0]), faults
