"""A model of speed from machine code: how long a loop keeps each unit of a multiprocessor.

Nothing here is measured. Counts come from SASS or AMD's assembly, clocks from the rates of the
units. Latencies, bank conflicts, broadcasts and caches are left out. A loop that keeps a unit for
much longer than its formula needs can be called slow without a GPU; which of two good loops is
faster, only a GPU says.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cross_compile import TARGETS, CompiledFacts
from .sass import Loop, is_matrix_op

# Warp instructions a clock: one for each of four schedulers (CUDA C++ Programming Guide,
# "Multiprocessor level"); all targets from sm_80 on.
_ISSUE = 4
# Results of MUFU a clock (ibid., "Arithmetic Instructions"), and bytes of shared memory. What
# threads add to global memory leaves their registers by the same unit of loads and stores, as
# NVIDIA's forum has it (developer.nvidia.com, 273699); that it does so at the same rate is assumed.
_MUFU_LANES = 16
_REGISTERS = 65536
_SHARED_BYTES = 128
# Multiply-adds of 16-bit numbers with fp32 sums a clock, from the dense rates in white papers of
# the GPUs: A100, GeForce RTX 3090, 4090 and 5090, H100. What is not asynchronous gets half of it on
# sm_90 (Luo et al., arXiv 2402.13499); on sm_100 nobody says, and as much is assumed. Cards of
# these generations that are no GeForce (A40, L40S) do 512.
_WGMMA = 2048
_MMA_SYNC = {
    "sm_80": 1024,
    "sm_86": 256,
    "sm_89": 256,
    "sm_90": 1024,
    "sm_100": 1024,
    "sm_120": 256,
}
# Of fp32 in vector instructions, by which IEEE products are computed (CUDA C++ Programming Guide,
# "Arithmetic Instructions").
_FFMA = {"sm_80": 64, "sm_86": 128, "sm_89": 128, "sm_90": 128, "sm_100": 128, "sm_120": 128}
# HGX B200: 2.25 PFLOPS of 148 multiprocessors at 1.86 GHz. Products of 64 rows keep half of the
# unit as long as 128 rows keep all of it.
_TCGEN05, _TCGEN05_ROWS = 4096, 128
_TENSOR_COLUMNS = 512
# Of a compute unit of AMD's: multiply-adds of v_mfma a clock (MI300X: 1307 TFLOPS of 304 at 2.1
# GHz; MI355X: 2.5 PFLOPS of 256 at 2.4), and of 32-bit numbers; and how long one of its SIMDs is
# kept by a vector instruction of 64 threads, and by an exponential (CDNA3 ISA). Its registers are
# twice as many, for waves of twice the threads.
_MFMA, _MFMA_FP32 = {"gfx942": 1024, "gfx950": 2048}, 128
_SIMDS, _VECTOR, _TRANSCENDENTAL = 4, 4, 16
_TRANSCENDENTALS = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos")


@dataclass(frozen=True)
class Clocks:
    """How long each unit of one multiprocessor is kept, in clocks.

    Attributes:
        issue: by instructions of every kind.
        tensor: by matrix products, of matrix units or, in loops without those, of FFMA.
        shared: by bytes to and from shared memory, and additions to global memory.
        exponentials: by MUFU: exp2, reciprocals, tanh.
        overlap: the share of the exponentials beside which products are in flight.
    """

    issue: float
    tensor: float
    shared: float
    exponentials: float
    overlap: float = 1.0

    @property
    def bound(self) -> float:
        """The busiest unit, as units work side by side; what waits for products comes after."""
        products = max(self.tensor, self.shared)
        others = max(self.issue, self.exponentials)
        return max(products, others) + (1 - self.overlap) * min(products, others)

    def __truediv__(self, pairs: float) -> Clocks:
        """A pair of query and key, of so many pairs."""
        return Clocks(
            self.issue / pairs,
            self.tensor / pairs,
            self.shared / pairs,
            self.exponentials / pairs,
            self.overlap,
        )


def programs_at_once(fact: CompiledFacts) -> int:
    """How many programs of a kernel share a multiprocessor, by their registers and its memories.

    One where neither is known.
    """
    by_registers = _REGISTERS // (32 * fact.num_warps * max(1, fact.registers))
    by_memory = TARGETS[fact.target].shared_bytes // max(1, fact.shared_bytes)
    by_columns = _TENSOR_COLUMNS // max(1, fact.tensor_columns)
    return max(1, min(by_registers, by_memory, by_columns))


def loop_clocks(
    loop: Loop, target: str, warps: int, *, programs: int = 1, streamed_bytes: int = 0
) -> Clocks:
    """The clocks of one pass of a loop by all warps of a program.

    Args:
        loop: of one warp; every warp runs the same.
        target: one of `cross_compile.TARGETS`. AMD's compute units have the exponential among the
            vector instructions, "issue", and their scalar ones beside them.
        warps: of the program.
        programs: that share a multiprocessor, see `programs_at_once`. A second one, or a second
            group of four warps, works while the first waits for its products; for those of tensor
            memory all warps of a program wait together.
        streamed_bytes: what TMA moves to and from shared memory in a pass, which the code does not
            say.
    """
    if target.startswith("gfx"):
        return _compute_unit_clocks(loop, target, warps, programs)
    groups = programs if loop.count("UTCHMMA") else programs * warps / 4
    return Clocks(
        issue=loop.total * warps / _ISSUE,
        tensor=_product_clocks(loop, target) * warps + _tensor_memory_clocks(loop),
        shared=(loop.shared_bytes * warps + loop.once_bytes + streamed_bytes) / _SHARED_BYTES,
        exponentials=32 * loop.count("MUFU") * warps / _MUFU_LANES,
        overlap=1.0 if groups > 1 or loop.overlap is None else loop.overlap,
    )


def _product_clocks(loop: Loop, target: str) -> float:
    """Of one warp. "HGMMA.64x128x16" is done by four warps together, "HMMA.16816" by one.

    FFMA counts where it does the products, and FFMA2 as two.
    """
    if not any(map(is_matrix_op, loop.opcodes)):
        return 32 * (loop.count("FFMA") + 2 * loop.count("FFMA2")) / _FFMA[target]
    clocks = 0.0
    for opcode, number in loop.opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind.endswith("GMMA"):
            M, N, K = map(int, modifiers[0].split("x"))
            rate = _WGMMA * K // 16  # 8-bit numbers come by 32
            clocks += number * M * N * K / rate / 4
        elif kind == "HMMA" and modifiers[0] == "16816":
            clocks += number * 16 * 8 * 16 / _MMA_SYNC.get(target, 1024)
    return clocks


def _tensor_memory_clocks(loop: Loop) -> float:
    """Of a program: "UTCHMMA.128x64x16" is issued by one warp for all."""
    clocks = 0.0
    for opcode, number in loop.opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind == "UTCHMMA":
            _, N, K = map(int, modifiers[-1].split("x"))
            clocks += number * _TCGEN05_ROWS * N * K / _TCGEN05
    return clocks


def _compute_unit_clocks(loop: Loop, target: str, waves: int, programs: int) -> Clocks:
    vector = matrix = 0.0
    for opcode, number in loop.opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind == "v_mfma":
            shape, numbers = modifiers[0].split("_")[1:3]
            M, N, K = map(int, shape.split("x"))
            rate = _MFMA_FP32 if numbers == "f32" else _MFMA[target]
            matrix += number * M * N * K / rate
        elif kind.startswith("v_"):
            vector += number * (_TRANSCENDENTAL if kind in _TRANSCENDENTALS else _VECTOR)
    return Clocks(
        issue=vector * waves / _SIMDS,
        tensor=matrix * waves,
        shared=loop.shared_bytes * waves / _SHARED_BYTES,
        exponentials=0.0,
        overlap=1.0 if programs * waves > _SIMDS else 0.0,
    )
