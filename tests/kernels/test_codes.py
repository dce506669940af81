"""The assembly that makes numbers of codes, run by a few lines of Python: exact for every code."""

import pytest
import torch

from fastattn.kernels.rules import codes

# What each piece makes of the codes of one kind: the numbers, and what is added to them.
ASSEMBLY = {
    "INT8_TO_FP16": (torch.int8, 0.0),
    "INT8_TO_RAISED": (torch.int8, codes.RAISED_BY.value),
    "E4M3_TO_FP16": (torch.float8_e4m3fn, 0.0),
    "E4M3_BITS_TO_FP16": (torch.float8_e4m3fn, 0.0),
}
# As `from_e4m3` reads it; the conversion of sm_89 makes it NaN.
NAN_CODE = 480.0


def halves(register: int) -> torch.Tensor:
    return torch.tensor([register], dtype=torch.uint32).view(torch.float16)


def as_register(pair: torch.Tensor) -> int:
    return int(pair.view(torch.uint32).item())


def run(assembly: str, source: int) -> list[int]:
    """The registers $0 and $1 of a piece of PTX whose input is $2."""
    registers: dict[str, int] = {"$2": source}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

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
    match op.split(".")[0]:
        case "mov":
            return given[0]
        case "and":
            return given[0] & given[1]
        case "shl":
            return given[0] << given[1] & 0xFFFFFFFF
        case "shr":
            return given[0] >> given[1]
        case "lop3":
            a, b, c, table = given
            places = (
                table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) for i in range(32)
            )
            return sum((bit & 1) << i for i, bit in enumerate(places))
        case "prmt":
            source = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            return sum(source[given[2] >> 4 * i & 7] << 8 * i for i in range(4))
        case "sub":
            return as_register(halves(given[0]) - halves(given[1]))
        case "mul":
            return as_register(halves(given[0]) * halves(given[1]))
    assert op == "cvt.rn.f16x2.e4m3x2", op
    pair = torch.tensor([given[0]], dtype=torch.uint16).view(torch.float8_e4m3fn)
    return as_register(pair.half())


@pytest.mark.parametrize("name", ASSEMBLY)
def test_every_code_is_exact(name: str) -> None:
    stored, added = ASSEMBLY[name]
    every = torch.arange(256, dtype=torch.uint8)
    # Each code in each of the four places.
    for place in range(4):
        four = every.roll(place).view(-1, 4)
        registers = four.view(torch.uint32).flatten().tolist()
        found = [run(getattr(codes, name).value, int(x)) for x in registers]
        numbers = torch.tensor(found, dtype=torch.uint32).view(torch.float16).float()
        # Even columns of two keys, then odd ones.
        expected = four[:, [0, 2, 1, 3]].view(stored).float() + added
        if name == "E4M3_BITS_TO_FP16":
            signs = 1 - 2 * (four[:, [0, 2, 1, 3]] >> 7).float()
            expected = torch.where(expected.isnan(), NAN_CODE * signs, expected)
        assert torch.equal(numbers.isnan(), expected.isnan())
        assert torch.equal(numbers.nan_to_num(), expected.nan_to_num())
