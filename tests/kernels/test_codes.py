"""The assembly that makes numbers of codes, run by a few lines of Python: exact for every code."""

import struct

import pytest
import torch

from fastattn.kernels.rules import codes

ASSEMBLY = {
    (torch.int8, torch.bfloat16): codes.INT8_TO_BF16,
    (torch.int8, torch.float16): codes.INT8_TO_FP16,
    (torch.float8_e4m3fn, torch.bfloat16): codes.E4M3_TO_BF16,
    (torch.float8_e4m3fn, torch.float16): codes.E4M3_TO_FP16,
}
HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def halves(register: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([register], dtype=torch.uint32).view(dtype)


def as_register(pair: torch.Tensor) -> int:
    return int(pair.view(torch.uint32).item())


def run(assembly: str, source: int) -> list[int]:
    """The registers $0 and $1 of a piece of PTX whose input is $2."""
    registers: dict[str, int] = {"$2": source}

    def read(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else registers[name]

    for line in assembly.strip("{} \n").split(";"):
        op, _, rest = line.strip().partition(" ")
        if op in ("", ".reg"):
            continue
        if "{" in rest:  # a register and its halves
            names, _, whole = rest.strip("{").partition("}, ")
            low, high = names.split(", ")
            registers[low], registers[high] = read(whole) & 0xFFFF, read(whole) >> 16
            continue
        target, *given = rest.split(", ")
        registers[target] = compute(op, [read(name) for name in given])
    return [registers["$0"], registers["$1"]]


def compute(op: str, given: list[int]) -> int:
    kind = op.split(".")[-1]
    match op.split(".")[0]:
        case "mov":
            return given[0]
        case "and":
            return given[0] & given[1]
        case "xor":
            return given[0] ^ given[1]
        case "prmt":
            source = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            return sum(source[given[2] >> 4 * i & 7] << 8 * i for i in range(4))
        case "sub":
            return as_register(halves(given[0], HALVES[kind]) - halves(given[1], HALVES[kind]))
        case "fma":
            a, b, c = (halves(x, HALVES[kind]).float() for x in given)
            return as_register((a * b + c).to(HALVES[kind]))
    return convert(op, given)


def convert(op: str, given: list[int]) -> int:
    if op == "cvt.rn.f16x2.e4m3x2":
        pair = torch.tensor([given[0]], dtype=torch.uint16).view(torch.float8_e4m3fn)
        return as_register(pair.half())
    if op == "cvt.f32.f16":
        number = torch.tensor([given[0]], dtype=torch.uint16).view(torch.float16)
        return struct.unpack("<I", struct.pack("<f", number.item()))[0]
    assert op == "cvt.rn.bf16x2.f32", op
    # The first source is the upper half.
    upper, lower = (struct.unpack("<f", struct.pack("<I", x))[0] for x in given)
    return as_register(torch.tensor([lower, upper]).bfloat16())


@pytest.mark.parametrize(("stored", "dtype"), ASSEMBLY, ids=str)
def test_every_code_is_exact(stored: torch.dtype, dtype: torch.dtype) -> None:
    assembly = ASSEMBLY[stored, dtype].value
    every = torch.arange(256, dtype=torch.uint8)
    # Each code in each of the four places.
    for place in range(4):
        four = every.roll(place).view(-1, 4)
        found = [run(assembly, int(x)) for x in four.view(torch.uint32).flatten().tolist()]
        numbers = torch.tensor(found, dtype=torch.uint32).view(dtype)
        expected = four.view(stored).to(dtype)
        assert torch.equal(numbers.isnan(), expected.isnan())
        assert torch.equal(numbers.nan_to_num(), expected.nan_to_num())
