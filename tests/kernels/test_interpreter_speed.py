"""The interpreter's short ways give what Triton's own ways give."""

import math
from collections.abc import Iterator
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

from fastattn.kernels.launch.interpreter import mend

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)

SHAPES = ((), (4,), (4, 1), (1, 4))
DTYPES = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32)
POINTERS = (tl.pointer_type(tl.float32), tl.pointer_type(tl.bfloat16))
ALL = slice(None)
NUMBERS = (True, 0, 3, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**70, -0.0, 2.5, 1e300)
# allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod of sums, products, bits and quotients.
OPERATIONS = {
    "sum": (True, True, True, False),
    "product": (False, False, True, False),
    "bits": (False, False, False, False),
    "quotient": (False, False, True, True),
}

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
GETITEM = tl.tensor.__getitem__
INDICES = [None, ALL, (ALL,), (None, ALL), (ALL, None), (ALL, None, ALL), (ALL, ALL, ALL), (0, ALL)]


@pytest.fixture
def launched() -> Iterator[None]:
    """The language as it is during a launch."""
    mend()
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


def result(function: Any, *given: Any) -> object:
    """Type and numbers of what an operator gives, or that it raises something."""
    try:
        return described(function(*given))
    except Exception:
        return "an error"


def outcome(semantic: TritonSemantic, lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> object:
    """Types and bits of both operands as the operation takes them, or its error."""
    try:
        taken = semantic.binary_op_type_checking_impl(lhs, rhs, *flags)
    except Exception as error:
        return repr(error)
    handles = [x.handle for x in taken]
    return [str(x.type) for x in taken], [
        (str(h.dtype), h.data.dtype, h.data.shape, h.data.tobytes()) for h in handles
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operands_are_promoted_and_broadcast_as_by_triton(launched: None, operation: str) -> None:
    short, stock_way = stock.interpreter_semantic, TritonSemantic(stock.interpreter_builder)
    assert type(short) is not TritonSemantic
    given = operands()
    flags = OPERATIONS[operation]
    differ = [
        (lhs, rhs)
        for lhs, rhs in product(given, given)
        if outcome(short, lhs, rhs, flags) != outcome(stock_way, lhs, rhs, flags)
    ]
    assert differ == []


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


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_new_dims_are_those_of_triton(launched: None, index: Any) -> None:
    stock_way = partial(GETITEM, _semantic=TritonSemantic(stock.interpreter_builder))
    tensors = [x for x in operands() if isinstance(x, tl.tensor)]
    short = [result(tl.tensor.__getitem__, x, index) for x in tensors]
    assert short == [result(stock_way, x, index) for x in tensors]


@triton.jit
def even_ones(x_ptr, y_ptr, N: tl.constexpr, OTHER: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i, i % 2 == 0, other=OTHER))


@pytest.mark.parametrize("other", [0, 0.0, 2.5, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masked_numbers_are_what_the_load_says(dtype: torch.dtype, other: float) -> None:
    mend()
    x, y = torch.randn(8).to(dtype), torch.full((8,), math.nan, dtype=dtype)
    even_ones[(1,)](x, y, 8, other)
    assert torch.equal(y, torch.where(torch.arange(8) % 2 == 0, x, other))


def test_types_are_made_once_and_refused_every_time() -> None:
    mend()
    kept = tl.block_type(tl.float32, [16, 32])
    assert tl.block_type(tl.float32, tl.tuple([tl.constexpr(16), tl.constexpr(32)])) is kept
    assert tl.block_type(tl.float32, [32, 16]) != kept
    assert tl.block_type(tl.int32, [16, 32]) != kept
    for _ in range(2):
        with pytest.raises(TypeError, match="0d block_type"):
            tl.block_type(tl.float32, [])
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


def test_a_tensor_has_what_its_type_says() -> None:
    mend()
    for element, shape in ((tl.float32, [4, 8]), (tl.int32, [4]), (POINTERS[0], [2])):
        for _ in range(2):  # the first tensor of a type, and one that copies from it
            handle = object()
            made = tl.tensor(handle, tl.block_type(element, shape))
            assert made.handle is handle
            assert made.dtype == element and made.type.shape.values == shape
            assert [s.value for s in made.shape] == shape
            assert made.numel.value == np.prod(shape)
