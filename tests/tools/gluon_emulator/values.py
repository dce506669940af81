"""Register tensors and scalars: torch tensors that follow Triton's rules where torch's differ.

Scalars are tensors without dimensions, so that integers divide as on the GPU, toward zero.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor as TorchTensor

from .errors import IllegalError

_TORCH = {
    tl.int1: torch.bool,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    **{getattr(tl, name): getattr(torch, name) for name in (
        "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    )},
}  # fmt: skip
_TRITON = {ours: theirs for theirs, ours in _TORCH.items()}


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype of a Triton dtype."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[dtype]


def from_torch(dtype: torch.dtype) -> Any:
    """The Triton dtype of a torch dtype."""
    return _TRITON[dtype]


class Tensor:
    """Values in registers, and the layout they were last given (None where nobody asked)."""

    def __init__(self, data: TorchTensor, layout: Any = None) -> None:
        self._data = data
        self.layout = layout

    @property
    def data(self) -> TorchTensor:
        return self._data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return from_torch(self.data.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        if bitcast:
            return Tensor(self.data.view(to_torch(dtype)), self.layout)
        return Tensor(self.data.to(to_torch(dtype)), self.layout)

    def reshape(self, shape: list[int]) -> "Tensor":
        return Tensor(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Tensor":
        return Tensor(self.data.permute(order))

    def __getitem__(self, key: Any) -> "Tensor":
        return Tensor(self.data[key])

    def __neg__(self) -> "Tensor":
        return Tensor(-self.data, self.layout)

    def __invert__(self) -> "Tensor":
        return Tensor(~self.data, self.layout)

    def __bool__(self) -> bool:
        return bool(self._only("a condition"))

    def __index__(self) -> int:
        return int(self._only("an index"))

    def __float__(self) -> float:
        return float(self._only("a number"))

    def _only(self, use: str) -> Any:
        if self.data.ndim:
            raise IllegalError(f"a tensor of shape {self.shape} is no {use.split()[-1]}")
        return self.data.item()

    __hash__ = None  # type: ignore[assignment]


class InFlight(Tensor):
    """The accumulator of a product that has not been waited for: any use of it is an error."""

    def __init__(self, shape: list[int], layout: Any, refuse: Callable[[], TorchTensor]) -> None:
        self._shape = shape
        self.layout = layout
        self._refuse = refuse

    @property
    def data(self) -> TorchTensor:
        return self._refuse()

    @property
    def shape(self) -> list[int]:
        return self._shape


def unwrap(x: Any) -> Any:
    """The torch tensor of a Tensor; anything else as it is."""
    return x.data if isinstance(x, Tensor) else x


def scalar(x: int) -> Tensor:
    """An int32, the type of a Python int that reaches a kernel."""
    return Tensor(torch.tensor(x, dtype=torch.int32))


def check_ranks(*operands: Any) -> None:
    """Triton broadcasts dimensions of size 1, but only torch adds missing ones."""
    ranks = {x.ndim for x in operands if isinstance(x, TorchTensor)} - {0}
    if len(ranks) > 1:
        shapes = [list(x.shape) for x in operands if isinstance(x, TorchTensor)]
        raise IllegalError(f"operands of different rank: {shapes}")


def elementwise(function: Callable[..., TorchTensor], *operands: Any) -> Tensor:
    """Apply a torch function to tensors and numbers of equal or no rank."""
    values = [unwrap(x) for x in operands]
    check_ranks(*values)
    layout = next((x.layout for x in operands if isinstance(x, Tensor) and x.layout), None)
    return Tensor(function(*values), layout)


def _divide(a: Any, b: Any) -> TorchTensor:
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


def _remainder(a: Any, b: Any) -> TorchTensor:
    return torch.fmod(torch.as_tensor(a), b)


_OPERATORS: dict[str, Callable[..., TorchTensor]] = {
    "floordiv": _divide, "mod": _remainder, "and": operator.and_, "or": operator.or_,
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq",
        "ne",
    )},
}  # fmt: skip


def _add_operators() -> None:
    def method(function: Callable[..., TorchTensor], reflected: bool) -> Callable[..., Tensor]:
        def apply(self: Tensor, other: Any) -> Tensor:
            operands = (other, self) if reflected else (self, other)
            return elementwise(function, *operands)

        return apply

    for name, function in _OPERATORS.items():
        setattr(Tensor, f"__{name}__", method(function, reflected=False))
        setattr(Tensor, f"__r{name}__", method(function, reflected=True))


_add_operators()
