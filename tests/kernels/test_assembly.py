"""Rules that compiled kernels have in assembly: it computes what the interpreter's code does."""

import math
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from interpreted_ptx import assembly_interpreted, run

from fastattn.kernels.hopper.pipeline import ANY_FACTOR, times_factors
from fastattn.kernels.launch import interpreter
from fastattn.kernels.rules import integers, operands, tile

interpreter.patch_interpreter()


@pytest.fixture(autouse=True)
def assembly(device: str) -> Iterator[None]:
    """On a GPU the compiler's is run."""
    if device != "cpu":
        yield
        return
    with assembly_interpreted(integers, tile):
        yield


@triton.jit
def at_most_kernel(x_ptr, limit_ptr, also_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    """x [M, 1] against limits [1, N]; also [1, N] or None."""
    cols = tl.arange(0, N)[None, :]
    rows = tl.arange(0, M)[:, None]
    also = None
    if also_ptr is not None:
        also = tl.load(also_ptr + cols) != 0
    actual = integers.at_most(tl.load(x_ptr + rows), tl.load(limit_ptr + cols), also)
    tl.store(out_ptr + rows * N + cols, actual)


@pytest.mark.parametrize("given", [False, True])
def test_at_most(given: bool, device: str) -> None:
    numbers = [-(2**31), -(2**28), -2, -1, 0, 1, 2**28, 2**31 - 1]
    x = torch.tensor(numbers, dtype=torch.int32, device=device)
    limit = x.flip(0).repeat(2)
    also = torch.arange(16, dtype=torch.int32, device=device) % 3 if given else None
    out = torch.empty(8, 16, dtype=torch.bool, device=device)
    at_most_kernel[(1,)](x, limit, also, out, 8, 16)
    expected = x[:, None] <= limit
    assert torch.equal(out, expected if also is None else expected & (also != 0))


@triton.jit
def load_block_kernel(
    x_ptr, out_ptr, strides, first, length, h,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    x = operands.head(x_ptr, 1, h, 1, strides, tl.int32)
    rows = tl.arange(0, ROWS)
    x = tile.load_block(x, first, first + rows < length, ROWS, COLS, WIDTH)
    tl.store(out_ptr + rows[:, None] * COLS + tl.arange(0, COLS)[None, :], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("first", [0, 8, -1])
def test_load_block(first: int, dtype: torch.dtype, device: str) -> None:
    """Rows of head 2 of batch row 1, whose row 0 is the second in memory, 11 that exist."""
    x = torch.randn(2, 20, 3, 24, device=device).to(dtype).transpose(1, 2)
    out = torch.empty(8, 32, dtype=dtype, device=device)
    strides = tuple(map(integers.runtime_int, x.stride()[:3]))
    load_block_kernel[(1,)](x, out, strides, first, 11, 2, 8, 32, 24)
    expected = torch.zeros_like(out)
    there = min(8, 11 - first)
    expected[:there, :24] = x[1, 2, 1 + first :][:there]
    assert torch.equal(out, expected)


@triton.jit
def load_in_place_kernel(x_ptr, out_ptr, length, N: tl.constexpr):
    cols = tl.arange(0, N)
    tl.store(out_ptr + cols, tile.load_in_place(x_ptr + N - 1 - cols, None))
    inside = cols < length
    tl.store(out_ptr + N + cols, tile.load_in_place(x_ptr + cols, inside))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32], ids=str
)
def test_load_in_place(dtype: torch.dtype, device: str) -> None:
    x = (100 * torch.randn(16, device=device)).to(dtype)
    out = torch.empty(2, 16, dtype=dtype, device=device)
    load_in_place_kernel[(1,)](x, out, 11, 16)
    assert torch.equal(out[0], x.flip(0))
    assert torch.equal(out[1, :11], x[:11])
    assert not out[1, 11:].any()


def bits(*numbers: float) -> list[int]:
    actual: list[int] = torch.tensor(numbers, dtype=torch.float32).view(torch.uint32).tolist()
    return actual


def test_any_factor() -> None:
    """The thread is alone in its warp."""
    nan = math.nan
    for factors in ((1, 1), (1, 0.5), (0.5, 1), (0, 0), (1, nan), (nan, 1)):
        assert run(ANY_FACTOR.value, bits(*factors), 2) == [factors != (1, 1)] * 2


@pytest.mark.parametrize("flag", [0, 1])
def test_numbers_are_multiplied_all_or_not_at_all(flag: int) -> None:
    numbers, factors = [3.0, -0.0, 1e-30, math.inf], [0.5, 0.25, 3.0, 1.0]
    inputs = [*bits(*numbers), *bits(*factors), *[flag] * 4]
    products = [x * y for x, y in zip(numbers, factors, strict=True)] if flag else numbers
    assert run(times_factors(4), inputs, outputs=4, tied=4) == bits(*products)
