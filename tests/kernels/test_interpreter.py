"""The interpreter's repairs, seen through small kernels that a GPU would run the same, its short
ways beside Triton's own, and what it refuses: accesses outside of all arguments or misaligned.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from fastattn import attention
from fastattn.kernels.launch import emulation
from fastattn.kernels.launch.emulation import MisalignedError, OutOfBoundsError
from fastattn.kernels.launch.interpreter import patch_interpreter

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)


@pytest.fixture(autouse=True)
def _mended() -> None:
    patch_interpreter()


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, x.numel())
    return out


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    c = tl.load(c_ptr + offs)
    c = tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), c, input_precision=PRECISION)
    tl.store(c_ptr + offs, c)


@pytest.mark.parametrize(("precision", "product"), [("ieee", 1 + 2**-11), ("tf32", 1.0)])
def test_float32_dot_keeps_the_bits_its_precision_keeps(precision: str, product: float) -> None:
    a = torch.eye(16)
    b = torch.full((16, 16), 1 + 2**-11)
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, c, precision, 16)
    assert torch.equal(c, torch.full((16, 16), product))


# Bits of float32 and of the nearest bfloat16: ties to even, infinities, a subnormal, minus zero.
ROUNDED = {
    0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x3F817FFF: 0x3F81,
    0xBF818000: 0xBF82, 0x7F7FFFFF: 0x7F80, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80,
    0x00018000: 0x0002, 0x80000000: 0x8000,
}  # fmt: skip
NANS = [0x7FC00000, 0xFFFFFFFF, 0x7F800001]


def test_float32_rounds_to_the_nearest_bfloat16() -> None:
    bits = torch.tensor([*ROUNDED, *NANS, 0, 0, 0]).to(torch.int32)
    actual = cast(bits.view(torch.float32), torch.bfloat16)
    numbers, nans, _ = actual.split((len(ROUNDED), len(NANS), 3))
    assert [x & 0xFFFF for x in numbers.view(torch.int16).tolist()] == [*ROUNDED.values()]
    assert nans.isnan().all()


def test_a_launch_leaves_the_language_as_it_found_it() -> None:
    def language() -> tuple[Any, ...]:
        functions = (tl.load, tl.core.load, tl.range, tl.reduce, tl.core.reduce)
        return (*functions, tl.tensor.__dict__.copy())

    before = language()
    cast(torch.ones(8), torch.float16)
    with pytest.raises(OutOfBoundsError):
        cast_kernel[(1,)](torch.zeros(1), torch.zeros(2), 2)
    assert language() == before


@triton.jit
def half_kernel(out_ptr, x):
    tl.store(out_ptr, x >> 1)


@pytest.mark.parametrize("x", [2**31 - 2, 2**31, 2**32 - 2, 2**32, -(2**31) - 2])
def test_whole_numbers_arrive(x: int) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    half_kernel[(1,)](out, x)
    assert out.item() == x // 2


def test_threads_launch_one_after_another() -> None:
    """Forward in some threads and backward, which autograd runs in threads of its own, at once."""
    q, k, v = (torch.randn(1, 1, 20, 16) for _ in range(3))

    def gradient(row: int) -> torch.Tensor:
        leaf = (q * row).requires_grad_()
        return torch.autograd.grad(attention(leaf, k, v, backend="triton").sum(), leaf)[0]

    expected = [gradient(row) for row in range(8)]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(gradient, range(8)))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_a_launch_starts_another_from_its_own_thread() -> None:
    """A hook of the first launch starts another; the lock is held already."""
    inner = torch.zeros(4)

    def hook(*_: object, **__: object) -> None:
        cast_kernel.pre_run_hooks.remove(hook)
        cast_kernel[(1,)](torch.ones(4), inner, 4)

    cast_kernel.add_pre_run_hook(hook)
    outer = cast(torch.full((4,), 2.0), torch.float32)
    assert inner.tolist() == [1.0] * 4 and outer.tolist() == [2.0] * 4


def test_compiled_kernels_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "install", lambda: pytest.fail("installed for compiled kernels"))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        patch_interpreter()


@triton.jit
def access_kernel(x_ptr, out_ptr, offset, KIND: tl.constexpr):
    if KIND == "load":
        tl.store(out_ptr, tl.load(x_ptr + offset))
    elif KIND == "store":
        tl.store(out_ptr + offset, tl.load(x_ptr))
    elif KIND == "atomic":
        tl.atomic_add(out_ptr + offset, tl.load(x_ptr))
    else:
        tl.atomic_cas(out_ptr + offset, tl.load(x_ptr), 1)


@pytest.mark.parametrize("kind", ["load", "store", "atomic", "atomic compare"])
@pytest.mark.parametrize("offset", [-1, 4])
def test_an_access_outside_every_argument_raises(kind: str, offset: int) -> None:
    x, out = (x.clone() for x in torch.zeros(2, 4, dtype=torch.int32))
    argument = "x_ptr" if kind == "load" else "out_ptr"
    message = (
        rf"access_kernel: {kind.split()[0]} of 1 element\(s\) outside every tensor argument, "
        rf"in program \(0, 0, 0\); the first is at byte {4 * offset} of the storage of {argument}, "
        "which has 16"
    )
    with pytest.raises(OutOfBoundsError, match=message):
        access_kernel[(1,)](x, out, offset, kind)


@triton.jit
def rows_kernel(x_ptr, out_ptr, stride, rows, N: tl.constexpr):
    start = x_ptr + rows * tl.multiple_of(stride.to(tl.int64), 4)
    tl.store(out_ptr + tl.arange(0, N), tl.load(start + tl.arange(0, N)))


def test_a_broken_promise_reads_elsewhere() -> None:
    """Kept as on a GPU, whose loads of 16 bytes want it; of what is multiplied by 0 none is."""
    x, out = torch.arange(32.0), torch.empty(4)
    for stride, rows, first in ((8, 2, 16), (9, 2, 16), (9, 0, 0)):
        rows_kernel[(1,)](x, out, stride, rows, 4)
        assert out.tolist() == [first, first + 1, first + 2, first + 3]


@triton.jit
def halves_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr.to(tl.pointer_type(tl.int16))))


def test_elements_between_multiples_of_their_size_are_refused() -> None:
    x, out = torch.zeros(8, dtype=torch.int8), torch.empty(1, dtype=torch.int16)
    halves_kernel[(1,)](x[2:], out)
    with pytest.raises(MisalignedError, match="load of elements of 2 bytes between"):
        halves_kernel[(1,)](x[1:], out)


def test_a_kernel_compiled_for_other_tensors_is_refused() -> None:
    x, out = torch.arange(16.0), torch.empty(4)
    compiled = rows_kernel[(1,)](x, out, 4, 1, 4)[(1,)]
    compiled(x[4:], out, 4, 1, 4)
    assert out.tolist() == [8, 9, 10, 11]
    for wrong in (x[1:], x.int()):
        with pytest.raises(MisalignedError, match=r"tensor 0 of torch\.float32 at a multi"):
            compiled(wrong, out, 4, 1, 4)


@triton.jit
def copy_kernel(ptrs, n, MASKED: tl.constexpr, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    mask = offs < n
    if MASKED:
        tl.store(ptrs[1] + offs, tl.load(ptrs[0] + offs, mask=mask), mask=mask)
    else:
        tl.store(ptrs[1] + offs, tl.load(ptrs[0] + offs))


def test_tensors_in_a_tuple_have_bounds() -> None:
    """Bounds of their storage, whose rest is inside; masked lanes may point anywhere."""
    x, out = torch.arange(20.0), torch.zeros(32)
    with pytest.raises(OutOfBoundsError, match=r"load of 12 element.*program \(1, 0, 0\).*ptrs"):
        copy_kernel[(2,)]((x, out), 20, False, 16)
    copy_kernel[(2,)]((x, out[:20]), 20, True, 16)
    assert torch.equal(out[:20], x)
    copy_kernel[(1,)]((x[4:8], out), 20, False, 16)
    assert torch.equal(out[:16], x[4:])


SHAPES = ((), (4,), (4, 1), (1, 4))
DTYPES = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32)
POINTERS = (tl.pointer_type(tl.float32), tl.pointer_type(tl.bfloat16))
NUMBERS = (True, 0, 3, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**70, -0.0, 2.5, 1e300)
# By tensors and numbers, as Triton has them outside a launch.
ARITHMETIC = ("add", "sub", "mul", "truediv", "and", "or", "xor", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
OPERATORS = {
    name: getattr(tl.tensor, name)
    for name in (
        *(f"__{operator}__" for operator in (*ARITHMETIC, *COMPARISONS)),
        *(f"__r{operator}__" for operator in ARITHMETIC),
    )
}


@pytest.fixture
def launched() -> Iterator[None]:
    """The language as it is during a launch."""
    scope = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl}))
    yield
    scope.restore()


def operands() -> list[Any]:
    made: list[Any] = list(NUMBERS)
    for dtype, shape in product((*DTYPES, *POINTERS), SHAPES):
        sizes = shape or (1,)
        data = np.resize([3, 0, -2, 7], sizes).astype(np.int64).astype(stock._get_np_dtype(dtype))
        of = tl.block_type(dtype, list(shape)) if shape else dtype
        made.append(tl.tensor(stock.TensorHandle(data, dtype), of))
    return made


def described(x: Any) -> object:
    return str(x.type), str(x.handle.dtype), x.handle.data.dtype, x.handle.data.tolist()


def result(function: Any, *arguments: Any) -> object:
    """Type and numbers of what an operator gives, or that it raises something."""
    try:
        return described(function(*arguments))
    except Exception:
        return "an error"


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore")
def test_operators_give_the_numbers_of_triton(launched: None, name: str) -> None:
    stock_way = partial(OPERATORS[name], _semantic=TritonSemantic(stock.interpreter_builder))
    short = getattr(tl.tensor, name)
    given = operands()
    tensors = [x for x in given if isinstance(x, tl.tensor)]
    with np.errstate(all="ignore"):
        differ = [
            (x, y)
            for x, y in product(tensors, [*given, tl.constexpr(3), tl.constexpr(-0.5)])
            if repr(result(short, x, y)) != repr(result(stock_way, x, y))
        ]
    assert differ == []


@triton.jit
def even_ones(x_ptr, y_ptr, N: tl.constexpr, OTHER: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i, i % 2 == 0, other=OTHER))


@pytest.mark.parametrize("other", [0, 0.0, 2.5, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masked_numbers_are_what_the_load_says(dtype: torch.dtype, other: float) -> None:
    x, y = torch.randn(8).to(dtype), torch.full((8,), math.nan, dtype=dtype)
    even_ones[(1,)](x, y, 8, other)
    assert torch.equal(y, torch.where(torch.arange(8) % 2 == 0, x, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_masked_numbers_of_which_the_load_says_nothing(dtype: torch.dtype) -> None:
    """On a GPU they are what a register held."""
    x, y = torch.randn(8).to(dtype), torch.zeros(8, dtype=dtype)
    even_ones[(1,)](x, y, 8, None)
    assert torch.equal(y[::2], x[::2])
    assert (y[1::2] != y[1::2]).all() if x.is_floating_point() else (y[1::2] == -1).all()
