"""AMD's assembly in the terms of `sass`: its instructions, so that its loops are found and counted.

An opcode is split after its second word, "v_mfma.f32_32x32x8_bf16", "scratch_load.dword", to be
counted by its start. Jumps are called as they are there.
"""

import re
from collections.abc import Iterator

from .sass import Instruction

_LABEL = re.compile(r"^(\.LBB\w+):")
_INSTRUCTION = re.compile(r"^\s+(?P<opcode>[sv]_\w+|(?:ds|global|buffer|flat|scratch)_\w+)\s*(.*)$")
_JUMPS = {"s_branch": "BRA", "s_endpgm": "EXIT", "s_setpc_b64": "RET"}


def read_amdgcn(text: str) -> list[Instruction]:
    """Parse an assembly file of one kernel: its instructions, numbered in place of addresses."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        code = line.split(";")[0].rstrip()
        if label := _LABEL.match(code):
            labels[label[1]] = len(lines)
        elif match := _INSTRUCTION.match(code):
            lines.append((match[1], match[2]))
    return list(_instructions(lines, labels))


def _instructions(lines: list[tuple[str, str]], labels: dict[str, int]) -> Iterator[Instruction]:
    for number, (opcode, operands) in enumerate(lines):
        predicated = opcode.startswith("s_cbranch")
        if operands in labels:
            operands = hex(labels[operands])
        jump = "BRA" if predicated else _JUMPS.get(opcode)
        name = jump or re.sub(r"^([a-z]+_[a-z0-9]+)_", r"\1.", opcode)
        yield Instruction(number, name, operands, predicated)
