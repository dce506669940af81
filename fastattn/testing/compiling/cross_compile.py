"""Cross-compile kernels for absent GPUs: registers, spills, shared memory, instructions.

    with compiling_for("sm_90") as launched:
        launch_forward(q, k, v, ...)      # CPU or meta tensors; compiles, runs nothing
    facts = [describe(kernel) for kernel in launched]

A fake Triton driver reports the target and drops the launch; everything before, specialisation
included, is Triton's own. It needs a process without TRITON_INTERPRET=1, see
`fastattn.testing.compiling.compile_pool`. Valid for Triton 3.6 to 3.9.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from .kept import kept


@dataclass(frozen=True)
class Target:
    """A target GPU, and its shared memory (LDS) per program in bytes."""

    gpu: GPUTarget
    shared_bytes: int


# Opt-in shared memory per block: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; LDS per workgroup: CDNA3 and CDNA4 ISA references.
TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_86": Target(GPUTarget("cuda", 86, 32), 99 * 1024),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 * 1024),
    "sm_121": Target(GPUTarget("cuda", 121, 32), 99 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 160 * 1024),
    "gfx1100": Target(GPUTarget("hip", "gfx1100", 32), 64 * 1024),
    "gfx1201": Target(GPUTarget("hip", "gfx1201", 32), 64 * 1024),
}

# Triton's version, as limits of tests depend on it.
RELEASE = ".".join(triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class PtxasReport:
    """The `ptxas -v` report of a kernel; spills in bytes per thread, summed over functions."""

    registers: int  # vector registers on AMD
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...]  # C75xx: ptxas has serialised wgmma


def read_ptxas(log: str) -> PtxasReport:
    """Parse the log of `ptxas -v`."""

    def numbers(pattern: str) -> list[int]:
        return [int(text) for text in re.findall(pattern, log)]

    return PtxasReport(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_store_bytes=sum(numbers(r"(\d+) bytes spill stores")),
        spill_load_bytes=sum(numbers(r"(\d+) bytes spill loads")),
        warnings=tuple(sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", log)))),
    )


_MATRIX_OPS = {
    "wgmma": "wgmma.mma_async",
    "tcgen05": "tcgen05.mma",
    "mma.sync": "mma.sync",
    "mfma": "v_mfma_",
    "wmma": "v_wmma_",
}


def matrix_ops(assembly: str) -> frozenset[str]:
    """Kinds of matrix instructions in PTX or AMD assembly, e.g. {"wgmma"}."""
    return frozenset(kind for kind, mnemonic in _MATRIX_OPS.items() if mnemonic in assembly)


def wgmma_with_register_a(ptx: str) -> int:
    """Number of wgmma with A operand in registers, as P must be in attention."""
    # The operands are the accumulators in braces, then A: registers in braces, or a descriptor.
    return len(re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\}\s*,\s*\{", ptx))


@dataclass(frozen=True)
class CompiledFacts(PtxasReport):
    """Properties of a kernel compiled for a target; nothing is measured."""

    name: str
    target: str
    num_warps: int
    num_stages: int
    shared_bytes: int
    fits_shared_memory: bool
    mma: frozenset[str]  # of "wgmma", "tcgen05", "mma.sync", "mfma", "wmma"
    wgmma_register_a: int  # wgmma instructions whose A operand is in registers
    code: str | None  # path of the machine code in Triton's cache; assembly for AMD

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


class _Launcher:
    """Replaces Triton's launcher: reports the kernel to the driver."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.src = src
        self.metadata = metadata

    def __call__(self, *args: Any) -> None:
        active = driver.active
        assert isinstance(active, _StubDriver), "launched outside compiling_for"
        kernels = self.src.fn.device_caches[active.get_current_device()][0].values()
        kernel = next(kernel for kernel in kernels if kernel.metadata is self.metadata)
        if kernel not in active.launched:
            active.launched.append(kernel)


class _StubDriver:
    """Fake driver, with the methods that Triton calls at a launch."""

    launcher_cls = _Launcher

    def __init__(self, target: str) -> None:
        self.target = target
        self.launched: list[Any] = []
        self.utils = SimpleNamespace(
            # Too much shared memory is a fact to report; Triton would raise at the launch.
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},
            # Module, function, registers, spills and most threads.
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> int:
        # Kernels cache by device number: one per target, other than real GPUs'.
        return 1000 + list(TARGETS).index(self.target)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[list[Any]]:
    """Launches in the block compile for `target`, one of TARGETS, and run nothing.

    Yields the list of Triton's CompiledKernel objects launched, each once, in order.

    Raises:
        ValueError: `target` is not one of TARGETS.
        RuntimeError: this process interprets its kernels (TRITON_INTERPRET=1).
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET=1 binds kernels to the interpreter when they are imported; "
            "compile them in a fastattn.testing.compiling.compile_pool.CompilePool"
        )
    stand_in = _StubDriver(target)
    before = driver._active
    driver.set_active(stand_in)
    try:
        with _keeping_ptxas_reports():
            yield stand_in.launched
    finally:
        driver.set_active(before)


def count_compilations(function: Callable[[], Any]) -> int:
    """Count the kernels that `function()` compiled or loaded from Triton's disk cache.

    0: every kernel was in this process's cache.
    """
    compiled: list[Any] = []
    # Not jit's hooks: for them Triton 3.6 dumps constants as JSON, which fails for functions.
    knobs: Any = triton.knobs.compilation
    with knobs.scope():
        knobs.listener = lambda **details: compiled.append(details)
        function()
    return len(compiled)


def describe(kernel: Any) -> CompiledFacts:
    """Get the facts of a kernel from `compiling_for`, compiled or cached."""
    gpu = kernel.metadata.target
    target = next(name for name, kind in TARGETS.items() if kind.gpu == gpu)
    is_cuda = gpu.backend == "cuda"
    assembly = kernel.asm["ptx" if is_cuda else "amdgcn"]
    report = _ptxas_report(kernel) if is_cuda else _amd_report(assembly)
    return CompiledFacts(
        **asdict(report),
        name=kernel.metadata.name,
        target=target,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        fits_shared_memory=kernel.metadata.shared <= TARGETS[target].shared_bytes,
        mma=matrix_ops(assembly),
        wgmma_register_a=wgmma_with_register_a(assembly),
        code=_code(kernel),
    )


_READER = Path(__file__).read_bytes()
_NVIDIA = type(make_backend(TARGETS["sm_90"].gpu))
_assemble = _NVIDIA.make_cubin
_reports: dict[bytes, PtxasReport] = {}  # by the digest of the PTX


@contextlib.contextmanager
def _keeping_ptxas_reports() -> Iterator[None]:
    """Keep the ptxas logs, which Triton drops, in `_reports`."""

    def assemble(backend: Any, ptx: str, *arguments: Any) -> Any:
        log = io.StringIO()
        try:
            with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
                triton.knobs.nvidia.dump_ptxas_log = True
                cubin = _assemble(backend, ptx, *arguments)
        except Exception:
            sys.stdout.write(log.getvalue())
            raise
        _reports[_digest(ptx)] = read_ptxas(log.getvalue())
        return cubin

    with mock.patch.object(_NVIDIA, "make_cubin", assemble):
        yield


def _digest(ptx: str) -> bytes:
    return sha256(ptx.encode()).digest()


def _ptxas_report(kernel: Any) -> PtxasReport:
    """ptxas's report of a kernel; a kernel made by another process is assembled again."""
    ptx, gpu = kernel.asm["ptx"], kernel.metadata.target

    def read() -> dict[str, Any]:
        if _digest(ptx) not in _reports:
            with _keeping_ptxas_reports():
                make_backend(gpu).make_cubin(ptx, {}, kernel.metadata, gpu.arch)
        return asdict(_reports[_digest(ptx)])

    report = kept(_code(kernel), "ptxas", read, _READER)
    return PtxasReport(**report | {"warnings": tuple(report["warnings"])})


def _amd_report(amdgcn: str) -> PtxasReport:
    def largest(key: str) -> int:
        return max(map(int, re.findall(rf"\.{key}:\s+(\d+)", amdgcn)), default=0)

    spilled = 4 * largest("vgpr_spill_count")
    return PtxasReport(largest("vgpr_count"), spilled, spilled, ())


def _code(kernel: Any) -> str:
    paths: Iterator[str] = iter(kernel.metadata_group.values())
    return next(path for path in paths if path.endswith((".cubin", ".amdgcn")))
