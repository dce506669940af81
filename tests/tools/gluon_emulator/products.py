"""Asynchronous warpgroup products (wgmma), evaluated when they are waited for.

That is the latest moment that the hardware may read its operands, so an operand that was released
too early is seen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as TorchTensor
from triton.experimental.gluon import language as gl

from .errors import IllegalError, InFlightError
from .machine import Access, current
from .memory import SharedView
from .values import InFlight, Tensor, unwrap

_WARPGROUP = 4  # warps
_ROWS = 64  # of A, a warpgroup and instruction


@dataclass(eq=False)
class Product:
    """One `warpgroup_mma` under way."""

    a: Any
    b: SharedView
    acc: Tensor
    use_acc: bool
    reads: list[Access]
    result: TorchTensor | None = None

    def __post_init__(self) -> None:
        self.token = InFlight(self.acc.shape, self.acc.layout, self._refuse)
        self.token.product = self  # type: ignore[attr-defined]

    def _refuse(self) -> TorchTensor:
        raise InFlightError(f"accumulator {self.token.shape} is used before warpgroup_mma_wait")

    def evaluate(self) -> None:
        product = self.a.data.float() @ self.b.data.float()
        self.result = product + _accumulated(self.acc) if self.use_acc else product


def _accumulated(acc: Tensor) -> TorchTensor:
    """The value of an accumulator, which may be that of an earlier product of the same queue."""
    product = getattr(acc, "product", None)
    return acc.data if product is None or product.result is None else product.result


def _check(a: Any, b: Any, acc: Tensor, warps: int) -> None:
    if not isinstance(b, SharedView):
        raise IllegalError("the second operand of a warpgroup product must be in shared memory")
    if isinstance(a, Tensor) and not isinstance(a.layout, gl.DotOperandLayout):
        raise IllegalError("a first operand in registers needs a DotOperandLayout")
    (M, K), (rows, N) = a.shape, b.shape
    if rows != K or acc.shape != [M, N]:
        raise IllegalError(f"product of {a.shape} and {b.shape} into {acc.shape}")
    if warps % _WARPGROUP or M % _ROWS or a.dtype != b.dtype:
        raise IllegalError(
            f"{warps} warps multiply {M} rows of {a.dtype} and {b.dtype}; whole warpgroups do, "
            f"multiples of {_ROWS} rows, of one type"
        )
    _check_bits(a, b, acc, a.dtype.primitive_bitwidth)


def _check_bits(a: Any, b: SharedView, acc: Tensor, bits: int) -> None:
    """An instruction takes 32 bytes of each row, a register 4; only 16 bits may be transposed."""
    if bits != 16:
        for number, x, along in (("first", a, 1), ("second", b, 0)):
            if isinstance(x, SharedView) and x.data.stride(along) != 1:
                raise IllegalError(
                    f"the {number} operand of a product in {bits} bits must be contiguous along "
                    f"the dimension that is summed over, got strides {x.data.stride()}"
                )
    depth = getattr(acc.layout, "instr_shape", (0, 0, 256 // bits))[2]
    if depth != 256 // bits:
        raise IllegalError(f"an instruction in {bits} bits is {256 // bits} deep, not {depth}")
    width = a.layout.k_width if isinstance(a, Tensor) else 32 // bits
    if width != 32 // bits:
        raise IllegalError(
            f"an operand in {bits} bits has {32 // bits} columns a register, not {width}"
        )


def warpgroup_mma(
    a: Any, b: SharedView, acc: Tensor, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Tensor:  # fmt: skip
    partition = current()
    _check(a, b, acc, partition.warps)
    reads = []
    for operand in (a, b):
        if isinstance(operand, SharedView):
            what = f"a product of {partition.name}"
            access = Access(what, operand.span, writes=False, generic=False)
            operand.allocation.access(access, partition)
            reads.append(access)
    product = Product(a, b, acc, bool(unwrap(use_acc)), reads)
    partition.products.append(product)
    if is_async:
        return product.token
    return warpgroup_mma_wait(0, deps=[product.token])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """Until that many products of this partition are left; gives the values of `deps`."""
    if deps is None:
        raise IllegalError("warpgroup_mma_wait needs deps, the values to keep alive")
    partition = current()
    partition.pause()
    while len(partition.products) > num_outstanding:
        product = partition.products.popleft()
        product.evaluate()
        partition.known.update(product.reads)
    values = tuple(_finished(x) for x in deps)
    return values[0] if len(values) == 1 else values


def _finished(x: Any) -> Any:
    product = getattr(x, "product", None)
    if product is None or product.result is None:
        return x
    return Tensor(product.result.to(torch.float32), x.layout)


def warpgroup_mma_init(value: Tensor) -> Tensor:
    return value
