"""Loops of machine code that was compiled for an absent GPU: SASS of NVIDIA's, assembly of AMD's.

AMD's is in the terms of SASS: an opcode is split after its second word, "v_mfma.f32_32x32x8_bf16",
"scratch_load.dword", to be counted by its start, and jumps are called as they are there.
"""

import itertools
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton

from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.kept import kept

_READER = Path(__file__).read_bytes()


def loops(fact: CompiledFacts) -> "tuple[Loop, ...]":
    """The innermost loops of a kernel that multiply tiles: see `product_loops`."""
    return () if fact.code is None else _loops(fact.code)


@cache
def _loops(code: str) -> "tuple[Loop, ...]":
    def read() -> list[dict[str, Any]]:
        amd = code.endswith(".amdgcn")
        functions = [read_amdgcn(Path(code).read_text("utf-8"))] if amd else sass_of(code)
        return [asdict(loop) for function in functions for loop in product_loops(function)]

    return tuple(Loop(**loop) for loop in kept(code, "loops", read, _READER))


def sass_of(code: str) -> "list[list[Instruction]]":
    """The instructions of each function of a cubin, in the order of their addresses."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", code]
    sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = read_sass(sass)
    assert functions, f"no instructions in what {command[0]} printed"
    return functions


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction of a function; `address` is its byte offset there."""

    address: int
    opcode: str  # with its modifiers: "HGMMA.64x128x16.F32.BF16"
    operands: str
    predicated: bool

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def is_matrix_op(self) -> bool:
        return self.base.endswith("MMA") or self.base in ("v_mfma", "v_wmma")

    @property
    def target(self) -> int | None:
        """Target address of a direct jump."""
        if self.base not in ("BRA", "JMP"):
            return None
        match = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(match[1], 16) if match else None

    @property
    def falls_through(self) -> bool:
        if self.predicated or self.base not in ("BRA", "JMP", "BRX", "JMX", "EXIT", "RET"):
            return True
        # A condition may also be the first operand: BRA P0, 0x80; BRA.DIV UR4, 0x80.
        return self.target is not None and not self.operands.startswith("0x")


# Some versions end the operands with scheduling notes (&wr=0x1 ?trans1) in place of a semicolon.
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;&?/]*)")


def read_sass(text: str) -> list[list[Instruction]]:
    """Parse `cuobjdump -sass`: the instructions of each function, in address order.

    Products of tensor memory get their shape as a modifier, as those of other units have:
    "UTCHMMA.128x64x16".
    """
    functions: list[list[Instruction]] = [[]]
    for line in text.splitlines():
        if "Function :" in line:
            functions.append([])
        elif match := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = match.groups()
            functions[-1].append(
                Instruction(int(address, 16), opcode, operands.strip(), predicate is not None)
            )
    return [_with_shapes(function) for function in functions if function]


def _with_shapes(function: list[Instruction]) -> list[Instruction]:
    """The shapes that UTCHMMA reads from a register: the constant that was put there last.

    PTX ISA, "Instruction descriptor" of tcgen05: N / 8 from bit 17 on, M / 16 from bit 24 on.
    """
    constants: dict[str, int] = {}
    shaped = []
    for instruction in function:
        if move := re.match(r"(UR\d+), 0x([0-9a-f]+)$", instruction.operands):
            constants[move[1]] = int(move[2], 16)
        elif use := re.search(r"idesc\[(UR\d+)\]", instruction.operands):
            number = constants.get(use[1], 0)
            M, N = 16 * (number >> 24 & 31), 8 * (number >> 17 & 63)
            instruction = replace(instruction, opcode=f"{instruction.opcode}.{M}x{N}x16")
        shaped.append(instruction)
    return shaped


@dataclass(frozen=True)
class Loop:
    """The instructions of one loop, counted by opcode with its modifiers.

    overlap: the share of its exponentials that are issued while a wgmma is in flight; None without
    exponentials or matrix instructions.
    least: instructions of its shortest pass, where jumps pass over what is needed now and then.
    """

    address: int
    opcodes: dict[str, int] = field(hash=False)
    overlap: float | None = None
    least: int = 0

    @property
    def total(self) -> int:
        return sum(self.opcodes.values())

    @property
    def spills(self) -> int:
        """Instructions that move spilled registers, of NVIDIA's and of AMD's."""
        return self.count("LDL", "STL", "scratch_load", "scratch_store")

    def of_pair(self, pairs: int, warps: int) -> float:
        """Instructions of a thread for a (query, key) pair, if all warps of a program take them."""
        return 32 * self.total * warps / pairs

    def count(self, *names: str) -> int:
        """Instructions named by any of `names`, whatever modifiers follow: "FFMA", "MUFU.EX2"."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if any(opcode == name or opcode.startswith(name + ".") for name in names)
        )


# In a loop that multiplies tiles without matrix instructions, at least one instruction of so many.
_ONE_FFMA_OF = 4


def product_loops(function: list[Instruction]) -> tuple[Loop, ...]:
    """The innermost loops of a function that multiply tiles, by address.

    They hold matrix instructions; in a function that has none, as for products of IEEE fp32 on
    NVIDIA GPUs, many FFMA. A natural loop: all instructions that reach a backward jump without
    passing its target.
    """
    index = {instruction.address: i for i, instruction in enumerate(function)}
    targets = [index.get(-1 if x.target is None else x.target) for x in function]
    predecessors: list[list[int]] = [[] for _ in function]
    for i, target in enumerate(targets):
        if target is not None:
            predecessors[target].append(i)
        if function[i].falls_through and i + 1 < len(function):
            predecessors[i + 1].append(i)
    bodies: dict[int, set[int]] = {}
    for last, first in enumerate(targets):
        if first is not None and first < last:
            bodies.setdefault(first, {first}).update(_reaching(last, first, predecessors))
    by_ffma = not any(instruction.is_matrix_op for instruction in function)

    def multiplies(body: set[int]) -> bool:
        if by_ffma:
            ffma = sum(function[i].base in ("FFMA", "FFMA2") for i in body)
            return _ONE_FFMA_OF * ffma >= len(body)
        return any(function[i].is_matrix_op for i in body)

    # A loop is entered at its first instruction only, so the function's entry can only be that.
    results = {
        first: body
        for first, body in bodies.items()
        if multiplies(body) and (first == 0 or 0 not in body)
    }
    return tuple(
        _count([function[i] for i in sorted(results[first])])
        for first in sorted(results)
        if not any(other < results[first] for other in results.values())
    )


def _reaching(last: int, first: int, predecessors: list[list[int]]) -> set[int]:
    """Instructions that reach `last` without passing `first`; both included."""
    actual, pending = {first, last}, [last]
    while pending:
        new = set(predecessors[pending.pop()]) - actual
        actual |= new
        pending += new
    return actual


def _count(body: list[Instruction]) -> Loop:
    opcodes = dict(sorted(Counter(instruction.opcode for instruction in body).items()))
    matrix = any(instruction.is_matrix_op for instruction in body)
    overlap = exponentials_under_wgmma(body) if matrix else None
    return Loop(body[0].address, opcodes, overlap, _shortest_pass(body))


def _shortest_pass(body: list[Instruction]) -> int:
    """How many instructions of a loop, in address order, lead back to its first one at least."""
    at = {instruction.address: instruction for instruction in body}
    after = dict(itertools.pairwise(at))  # the address behind an address
    actual, pending, steps = {body[0].address}, [body[0]], 1
    while pending and body[0].address not in (x.target for x in pending):
        following = [x.target for x in pending]
        following += [after.get(x.address) for x in pending if x.falls_through]
        reached = {address for address in following if address in at} - actual
        actual |= reached
        pending, steps = [at[address] for address in reached], steps + 1
    return steps


def exponentials_under_wgmma(body: list[Instruction]) -> float | None:
    """Share of the MUFU.EX2 of a loop, in address order, that find a wgmma group in flight.

    A group ends with the HGMMA that names a scoreboard (gsb0). WARPGROUP.DEPBAR waits until at most
    so many groups are in flight. Groups in flight at the loop's end are in flight at its start.
    """
    in_flight = hidden = total = 0
    for counting in (False, True):
        for instruction in body:
            if instruction.base.endswith("GMMA"):
                in_flight += "gsb0" in instruction.operands
            elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
                in_flight = min(in_flight, int(instruction.operands.split(",")[-1], 16))
            elif counting and instruction.opcode.startswith("MUFU.EX2"):
                total += 1
                hidden += in_flight > 0
    return hidden / total if total else None


_LABEL = re.compile(r"^(\.LBB\w+):")
_AMD_INSTRUCTION = re.compile(r"^\s+([sv]_\w+|(?:ds|global|buffer|flat|scratch)_\w+)\s*(.*)$")
_JUMPS = {"s_branch": "BRA", "s_endpgm": "EXIT", "s_setpc_b64": "RET"}


def read_amdgcn(text: str) -> list[Instruction]:
    """Parse an assembly file of one kernel: its instructions, numbered in place of addresses."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        code = line.split(";")[0].rstrip()
        if label := _LABEL.match(code):
            labels[label[1]] = len(lines)
        elif match := _AMD_INSTRUCTION.match(code):
            lines.append((match[1], match[2]))
    instructions = []
    for number, (opcode, operands) in enumerate(lines):
        predicated = opcode.startswith("s_cbranch")
        operands = hex(labels[operands]) if operands in labels else operands
        jump = "BRA" if predicated else _JUMPS.get(opcode)
        name = jump or re.sub(r"^([a-z]+_[a-z0-9]+)_", r"\1.", opcode)
        instructions.append(Instruction(number, name, operands, predicated))
    return instructions
