"""A model of speed from machine code: how long a loop keeps each unit of an NVIDIA multiprocessor.

Nothing here is measured. Counts come from SASS, clocks from the rates of the units. Latencies, bank
conflicts, broadcasts and caches are left out. A loop that keeps a unit for much longer than its
formula needs can be called slow without a GPU; which of two good loops is faster, only a GPU says.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cross_compile import TARGETS, CompiledFacts
from .sass import Loop

# Warp instructions a clock: one for each of four schedulers (CUDA C++ Programming Guide,
# "Multiprocessor level"); all targets from sm_80 on.
_ISSUE = 4
# Results of MUFU a clock (ibid., "Arithmetic Instructions"), and bytes of shared memory.
_MUFU_LANES = 16
_REGISTERS = 65536
_SHARED_BYTES = 128
# Multiply-adds of 16-bit numbers with fp32 sums a clock, from the dense rates in white papers of
# the GPUs. What is not asynchronous gets half of it on sm_90 (Luo et al., arXiv 2402.13499).
_WGMMA = 2048
_MMA_SYNC = {"sm_80": 1024, "sm_86": 256, "sm_89": 256, "sm_90": 1024, "sm_100": 1024}


@dataclass(frozen=True)
class Clocks:
    """How long each unit of one multiprocessor is kept, in clocks.

    Attributes:
        issue: by instructions of every kind.
        tensor: by matrix products.
        shared: by bytes to and from shared memory.
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
    """How many programs of a kernel share a multiprocessor, by their registers and shared memory.

    One where neither is known.
    """
    by_registers = _REGISTERS // (32 * fact.num_warps * max(1, fact.registers))
    by_memory = TARGETS[fact.target].shared_bytes // max(1, fact.shared_bytes)
    return max(1, min(by_registers, by_memory))


def loop_clocks(
    loop: Loop, target: str, warps: int, *, programs: int = 1, streamed_bytes: int = 0
) -> Clocks:
    """The clocks of one pass of a loop by all warps of a program.

    Args:
        loop: of one warp; every warp runs the same.
        target: "sm_80" to "sm_100". The products of sm_100's own matrix units are not counted:
            their instructions do not name their shapes.
        warps: of the program.
        programs: that share a multiprocessor, see `programs_at_once`. A second one, or a second
            group of four warps, works while the first waits for its products.
        streamed_bytes: what TMA writes to shared memory in a pass, which the code does not say.
    """
    return Clocks(
        issue=loop.total * warps / _ISSUE,
        tensor=_matrix_clocks(loop, target) * warps,
        shared=(loop.shared_bytes * warps + streamed_bytes) / _SHARED_BYTES,
        exponentials=32 * loop.count("MUFU") * warps / _MUFU_LANES,
        overlap=1.0 if warps * programs > 4 or loop.overlap is None else loop.overlap,
    )


def _matrix_clocks(loop: Loop, target: str) -> float:
    """Of one warp. "HGMMA.64x128x16" is done by four warps together, "HMMA.16816" by one."""
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
