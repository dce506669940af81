"""The environment of a measurement: GPU, clocks, power, driver, versions; never changed."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...tuned.environment import SOURCES as SOURCES
from ...tuned.environment import fingerprints as fingerprints

_PACKAGES = ("fastattn", "torch", "triton", "numpy", "flash-attn")
# Our names of fields of nvidia-smi.
_DEVICE = {
    "driver": "driver_version",
    "max_sm_clock_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
CLOCKS = {"sm_clock_mhz": "clocks.sm", "power_w": "power.draw"}


def output_of(command: list[str]) -> str:
    """Output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def cpu_name() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()


def collect() -> dict[str, Any]:
    """Versions, the current GPU, if any, and $FASTATTN_COMMIT or git's commit, as JSON values."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit, gpu = os.environ.get("FASTATTN_COMMIT"), None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = commit or output_of(["git", "rev-parse", "HEAD"])
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"{properties.major}.{properties.minor}"
        gpu = {"name": properties.name, "capability": capability, **smi(_DEVICE)}
        gpu["sm_count"] = properties.multi_processor_count
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "commit": commit,
        "kernels": fingerprints(),
        "gpu": gpu,
    }


def smi(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the first GPU that have a value, by our names; {} without nvidia-smi."""
    query = f"--query-gpu={','.join(fields.values())}"
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        output = output_of(["nvidia-smi", "--format=csv,noheader,nounits", "--id=0", query])
        texts = dict(zip(fields, output.splitlines()[0].split(", "), strict=True))
        number = re.compile(r"\d+(\.\d+)?")
        return {n: float(x) if number.fullmatch(x) else x for n, x in texts.items() if x[:1] != "["}
    return {}
