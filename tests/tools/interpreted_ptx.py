"""Pieces of PTX run by a few lines of Python, and kernels that are interpreted with theirs.

Triton's interpreter knows no assembly, so rules that have some in compiled kernels have other code
there. `assembly_interpreted` lets it run the assembly: as slow as it is, for tests of those rules.
"""

import contextlib
import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl

_COMBINED = {"and": operator.and_, "or": operator.or_}
_MEMORY = {"b16": ctypes.c_uint16, "b32": ctypes.c_uint32}


def run(assembly: str, inputs: Sequence[int], outputs: int, tied: int = 0) -> list[int]:
    """The bits of the registers $0, $1, ... of the outputs; the inputs' are numbered after them.

    tied: so many inputs are in the registers of the first outputs. A warp is one thread.

    Raises:
        NotImplementedError: an instruction that no rule of the kernels has needed so far.
    """
    registers = {f"${outputs + i}": bits for i, bits in enumerate(inputs)}
    registers |= {f"${i}": bits for i, bits in enumerate(inputs[:tied])}
    label = None

    def read(name: str) -> int:
        name = name.strip("[]")
        if name.startswith("0f"):
            return int(name[2:], 16)
        return registers[name] if name in registers else int(name, 0)

    for line in assembly.strip("{} \n").split(";"):
        line = line.strip()
        if label is not None and not line.startswith(f"{label}:"):
            continue
        label = None
        if line.startswith("@"):
            predicate, _, line = line.partition(" ")
            if not registers[predicate[1:]]:
                continue
        op, _, rest = line.partition(" ")
        if op in ("", ".reg") or op.endswith(":"):
            continue
        if op == "bra.uni":
            label = rest
            continue
        if "{" in rest:  # a register and its halves
            names, _, whole = rest.strip("{").partition("}, ")
            low, high = names.split(", ")
            registers[low], registers[high] = read(whole) & 0xFFFF, read(whole) >> 16
            continue
        target, *given = rest.split(", ")
        registers[target] = _compute(op, [read(name) for name in given])
    return [registers[f"${i}"] for i in range(outputs)]


def _compute(op: str, given: list[int]) -> int:
    name, *details = op.split(".")
    match name:
        case "mov" | "vote":
            return given[0]
        case "and":
            return given[0] & given[1]
        case "shl":
            return given[0] << given[1] & 0xFFFFFFFF
        case "shr":
            return given[0] >> given[1]
        case "lop3":
            bits = zip(*([x >> i & 1 for i in range(32)] for x in given[:3]), strict=True)
            return sum((given[3] >> 4 * a + 2 * b + c & 1) << i for i, (a, b, c) in enumerate(bits))
        case "prmt":
            source = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            return sum(source[given[2] >> 4 * i & 7] << 8 * i for i in range(4))
        case "setp":
            comparison, *combined, kind = details
            if (kind == "f32") != (comparison == "neu"):  # the others are False of NaN
                raise NotImplementedError(f"what {op} computes")
            compare = getattr(operator, comparison.replace("neu", "ne"))
            actual = compare(*map(_NUMBERS[kind], given[:2]))
            assert len(given) == 2 + len(combined), op
            return int(_COMBINED[combined[0]](actual, given[2]) if combined else actual)
        case "selp":
            return given[0] if given[2] else given[1]
        case "ld":
            return int(_MEMORY[details[-1]].from_address(given[0]).value)
    match op:
        case "sub.rn.f16x2" | "mul.rn.f16x2":
            a, b = (torch.tensor([x], dtype=torch.uint32).view(torch.float16) for x in given)
            return _as_register(a - b if name == "sub" else a * b)
        case "mul.f32":
            return _as_register(_float(given[0]) * _float(given[1]))
        case "mul.wide.s32":
            return _signed(given[0]) * _signed(given[1]) & 0xFFFFFFFFFFFFFFFF
        case "cvt.rn.f16x2.e4m3x2":
            pair = torch.tensor([given[0]], dtype=torch.uint16).view(torch.float8_e4m3fn)
            return _as_register(pair.half())
    raise NotImplementedError(f"what {op} computes")


def _signed(bits: int) -> int:
    return bits - (bits >> 31 << 32)


def _float(register: int) -> torch.Tensor:
    return torch.tensor([register], dtype=torch.uint32).view(torch.float32)


def _as_register(numbers: torch.Tensor) -> int:
    return int(numbers.view(torch.uint32).item())


_NUMBERS: dict[str, Callable[[int], Any]] = {"b32": int, "s32": _signed, "f32": _float}


def _create_inline_asm(
    builder: object, assembly: str, constraints: str, values: Sequence[Any],
    types: Sequence[Any], is_pure: bool, pack: int,
) -> SimpleNamespace:  # fmt: skip
    """Run assembly as Triton's builders do: `pack` neighbours share the registers of 32 bits."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    inputs = [_registers(x.data, pack) for x in values]
    shape = np.broadcast_shapes(*(x.data.shape for x in values))
    outputs = [run(assembly, bits, len(types)) for bits in zip(*inputs, strict=True)]
    results = []
    for bits, block in zip(zip(*outputs, strict=True), types, strict=True):
        kept = np.dtype(_get_np_dtype(block.scalar))
        numbers = np.array(bits, dtype=np.uint64)
        if block.scalar == tl.int1:
            numbers = numbers != 0
        else:
            numbers = numbers.astype(f"u{pack * kept.itemsize}").view(kept)
        results.append(TensorHandle(numbers.reshape(shape), block.scalar))
    return SimpleNamespace(get_result=results.__getitem__)


def _registers(numbers: Any, pack: int) -> list[int]:
    """The bits of each `pack` numbers of an array that follow one another."""
    flat = numbers.reshape(-1)
    kind = "u1" if flat.dtype == bool else f"u{pack * flat.itemsize}"
    bits: list[int] = flat.view(kind).tolist()
    return bits


@contextlib.contextmanager
def assembly_interpreted(*rules: ModuleType) -> Iterator[None]:
    """In the block, kernels that are interpreted run the assembly of these modules' rules."""
    from triton.runtime.interpreter import InterpreterBuilder

    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(InterpreterBuilder, "create_inline_asm", _create_inline_asm)
        )
        for module in rules:
            stack.enter_context(
                mock.patch.object(module, "cuda_capability_geq", lambda *version: True)
            )
        yield
