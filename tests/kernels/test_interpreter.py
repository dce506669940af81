"""The interpreter's repairs, seen through small kernels that a GPU would run the same, and what it
refuses: reads and writes outside of all arguments.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.launch.emulation import OutOfBoundsError
from fastattn.kernels.launch.interpreter import mend

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _mended() -> None:
    mend()


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


def float32_of_bits(*bits: int) -> torch.Tensor:
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


# Of float32 and of the nearest bfloat16: ties to even, infinities, a subnormal, minus zero.
ROUNDED = {
    0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x3F817FFF: 0x3F81,
    0xBF818000: 0xBF82, 0x7F7FFFFF: 0x7F80, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80,
    0x00018000: 0x0002, 0x80000000: 0x8000,
}  # fmt: skip


def test_float32_rounds_to_the_nearest_bfloat16() -> None:
    numbers = float32_of_bits(*ROUNDED, *[0] * (16 - len(ROUNDED)))
    actual = cast(numbers, BF16).view(torch.int16)[: len(ROUNDED)]
    assert [x & 0xFFFF for x in actual.tolist()] == [*ROUNDED.values()]


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF, 0x7F800001], ids=hex)
def test_nan_stays_nan_in_bfloat16(bits: int) -> None:
    assert cast(float32_of_bits(bits), BF16).isnan().all()


@triton.jit
def max_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, N)), 0))


def test_a_launch_leaves_the_language_as_it_found_it() -> None:
    before = (tl.load, tl.core.load, tl.range, tl.reduce, tl.core.reduce, tl.tensor.__dict__.copy())
    max_kernel[(1,)](torch.ones(8), torch.zeros(1), 8)
    with pytest.raises(OutOfBoundsError):
        cast_kernel[(1,)](torch.zeros(1), torch.zeros(2), 2)
    after = (tl.load, tl.core.load, tl.range, tl.reduce, tl.core.reduce, tl.tensor.__dict__.copy())
    assert after == before


def test_threads_launch_one_after_another() -> None:
    """Forward in some threads and backward, which autograd runs in threads of its own, at once."""
    from fastattn import attention

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
    from fastattn.kernels.launch import emulation

    monkeypatch.setattr(emulation, "install", lambda: pytest.fail("installed for compiled kernels"))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
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
