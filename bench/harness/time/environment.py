"""The environment of a measurement: GPU, clocks, power, driver, versions. Read only, never set."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from ...training.usage import dense_bf16_tflops

_PACKAGES = ("fastattn", "torch", "triton", "numpy", "flash-attn", "xformers", "flashinfer-python")
# Fields of nvidia-smi; older drivers lack some.
_FIELDS = {
    "driver_version": "driver",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz",
    "power.limit": "power_limit_w",
    "clocks_event_reasons.active": "clock_limits",
    "temperature.gpu": "temperature_c",
    "persistence_mode": "persistence_mode",
}
Run = Callable[[list[str]], str]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def collect(run: Run = _run) -> dict[str, Any]:
    """Versions, and the GPU if there is one, as JSON values.

    Args:
        run: returns what a read-only command prints; raises if it fails.
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "commit": _commit(run),
        "gpu": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = gpu(run)
    return found


def versions() -> dict[str, str]:
    """Installed versions of fastattn, its dependencies and its peers."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def gpu(run: Run = _run) -> dict[str, Any]:
    """The current CUDA device: properties from torch and from nvidia-smi."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_mib": properties.total_memory >> 20,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "dense_bf16_tflops": dense_bf16_tflops(properties.name),
    }
    return found | smi(run)


def smi(run: Run = _run) -> dict[str, Any]:
    """nvidia-smi's _FIELDS, one by one: a field that the driver lacks is left out."""
    found: dict[str, Any] = {}
    for field, key in _FIELDS.items():
        with contextlib.suppress(OSError, IndexError, subprocess.SubprocessError):
            found[key] = number(query(run, field)[0])
    return found


def query(run: Run, *fields: str) -> list[str]:
    """Ask nvidia-smi for fields of the first GPU."""
    names = f"--query-gpu={','.join(fields)}"
    said = run(["nvidia-smi", "--format=csv,noheader,nounits", "--id=0", names])
    return said.splitlines()[0].split(", ")


def number(text: str) -> float | str | None:
    """Parse a value of nvidia-smi: a number, text, or None if it has no value."""
    text = text.strip()
    if text in ("", "[N/A]", "N/A", "[Not Supported]"):
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return text


class ClockReader:
    """Reads SM clock (MHz) and power (W) while the device works.

    torch reads them by NVML where its bindings are installed, in microseconds; else nvidia-smi is
    asked once, since the device falls idle meanwhile.
    """

    def __init__(self, run: Run = _run, nvml: bool | None = None) -> None:
        self._run, self._nvml = run, find_spec("pynvml") is not None if nvml is None else nvml
        self.readings: list[tuple[float, float]] = []

    def __call__(self) -> None:
        """Take a reading; one that fails is left out."""
        if self.readings and not self._nvml:
            return
        with contextlib.suppress(Exception):
            if self._nvml:
                clock, power = float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
            else:
                clock, power = map(float, query(self._run, "clocks.sm", "power.draw"))
            self.readings.append((clock, power))

    def take(self) -> dict[str, float]:
        """Least and most sm_clock_mhz and most power_w since the last call; {} without readings."""
        readings, self.readings = self.readings, []
        if not readings:
            return {}
        clocks, powers = zip(*readings, strict=True)
        return {
            "sm_clock_mhz": max(clocks),
            "least_sm_clock_mhz": min(clocks),
            "power_w": max(powers),
        }


def _commit(run: Run) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return run(["git", "rev-parse", "HEAD"])
    return None


def command_line() -> str:
    """The command of this process, without the paths of its interpreter and folder."""
    arguments = [a.rsplit("/", 1)[-1] if i == 0 else a for i, a in enumerate(sys.argv)]
    return " ".join(["python", *arguments])
