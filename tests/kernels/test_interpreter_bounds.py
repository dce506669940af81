"""Kernels in the interpreter that read or write outside of their arguments: each raises."""

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.launch.emulation import OutOfBoundsError
from fastattn.kernels.launch.interpreter import mend

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)


@pytest.fixture(autouse=True)
def _mended() -> None:
    mend()


@triton.jit
def copy_kernel(ptrs, n, MASKED: tl.constexpr, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    mask = offs < n
    if MASKED:
        tl.store(ptrs[1] + offs, tl.load(ptrs[0] + offs, mask=mask), mask=mask)
    else:
        tl.store(ptrs[1] + offs, tl.load(ptrs[0] + offs))


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


def test_an_element_half_outside_is_outside() -> None:
    halves = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(OutOfBoundsError, match="at byte 4 of the storage of x_ptr, which has 6"):
        access_kernel[(1,)](
            halves.view(torch.uint8)[:4].view(torch.int32), torch.zeros(1), 1, "load"
        )


def test_a_program_past_the_end_of_a_tensor_in_a_tuple_raises() -> None:
    x, out = torch.arange(20.0), torch.zeros(32)
    with pytest.raises(OutOfBoundsError, match=r"load of 12 element.*program \(1, 0, 0\).*ptrs"):
        copy_kernel[(2,)]((x, out), 20, False, 16)


def test_masked_lanes_may_point_anywhere() -> None:
    x, out = torch.arange(20.0), torch.zeros(20)
    copy_kernel[(2,)]((x, out), 20, True, 16)
    assert torch.equal(out, x)


def test_the_rest_of_a_viewed_storage_is_inside() -> None:
    x, out = torch.arange(32.0), torch.zeros(32)
    copy_kernel[(1,)]((x[8:16], out), 32, False, 16)
    assert torch.equal(out[:16], x[8:24])
