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
    mend()
    x, y = torch.randn(8).to(dtype), torch.full((8,), math.nan, dtype=dtype)
    even_ones[(1,)](x, y, 8, other)
    assert torch.equal(y, torch.where(torch.arange(8) % 2 == 0, x, other))
