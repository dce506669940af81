"""The environment of a measurement: GPU, clocks, power, driver, versions. Read only, never set."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch

from ..training.usage import dense_bf16_tflops

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
    """nvidia-smi's _FIELDS; a field that the driver lacks is left out."""
    query = ["nvidia-smi", "--format=csv,noheader,nounits", "--id=0"]
    try:
        values = run([*query, f"--query-gpu={','.join(_FIELDS)}"]).splitlines()[0].split(", ")
        if len(values) == len(_FIELDS):
            return {key: number(v) for key, v in zip(_FIELDS.values(), values, strict=True)}
    except (OSError, IndexError, subprocess.SubprocessError):
        pass
    found: dict[str, Any] = {}
    for field, key in _FIELDS.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found[key] = number(run([*query, f"--query-gpu={field}"]).strip())
    return found


def number(text: str) -> float | str | None:
    """Parse a value of nvidia-smi: a number, text, or None if it has no value."""
    text = text.strip()
    if text in ("", "[N/A]", "N/A", "[Not Supported]"):
        return None
    try:
        return float(text)
    except ValueError:
        return text


class ClockReader:
    """Reads SM clock (MHz) and power (W) while the device works.

    Uses NVML where its bindings are installed, which takes microseconds, else nvidia-smi.
    """

    def __init__(self, run: Run = _run) -> None:
        self._run = run
        self._nvml, self._handle = _open_nvml()
        self.readings: list[tuple[float, float]] = []

    def __call__(self) -> None:
        """Take a reading; one that fails is left out."""
        if self._nvml is None and self.readings:
            return  # nvidia-smi is slow, and the device falls idle meanwhile: one reading only
        with contextlib.suppress(Exception):
            self.readings.append(self._read())

    def _read(self) -> tuple[float, float]:
        if self._nvml is not None:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            return float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        fields = "--query-gpu=clocks.sm,power.draw"
        text = self._run(["nvidia-smi", fields, "--format=csv,noheader,nounits", "--id=0"])
        clock, power = text.splitlines()[0].split(",")
        return float(clock), float(power)

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


def _open_nvml() -> tuple[Any, Any]:
    """NVML's bindings and the handle of torch's device 0; (None, None) if not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nvml = import_module("pynvml")
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except Exception:
        return None, None


def _commit(run: Run) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return run(["git", "rev-parse", "HEAD"])
    return None


def command_line() -> str:
    """The command of this process, without the paths of its interpreter and folder."""
    arguments = [a.rsplit("/", 1)[-1] if i == 0 else a for i, a in enumerate(sys.argv)]
    return " ".join(["python", *arguments])
