"""Additions to global memory in the Gluon emulator: right sums, and planted faults named."""

from pathlib import Path
from typing import Any

import gluon_emulator
import pytest
import torch
from gluon_emulator import launch
from planted_kernels import planted
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels.hopper.pipeline import async_atomic_add, async_load, async_store


@gluon.jit
def add_blocks(x_desc, sum_desc, full, tiles, number, PART: gl.constexpr):
    """Add twice `number` blocks of x to the one block of sum."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = tiles.index(PART)
    for i in range(number):
        tma.store_wait(pendings=0)
        mbarrier.expect(full.index(PART), x_desc.block_type.nbytes)
        async_load(x_desc, [(PART * number + i) * 64, 0], full.index(PART), tile)
        mbarrier.wait(full.index(PART), i % 2)
        tile.store(tile.load(LAYOUT) * 2.0)
        fence_async_shared()
        async_atomic_add(sum_desc, [0, 0], tile)
    tma.store_wait(pendings=0)


@gluon.jit
def add_kernel(x_desc, sum_desc, number):
    """Two partitions add to the same block, each from a tile of its own."""
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tiles = gl.allocate_shared_memory(sum_desc.dtype, [2, 64, 64], sum_desc.layout)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    gl.warp_specialize(
        [
            (add_blocks, (x_desc, sum_desc, full, tiles, number, 0)),
            (add_blocks, (x_desc, sum_desc, full, tiles, number, 1)),
        ],
        [4],
        [240],
    )


def descriptor(x: torch.Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout)


def run(
    kernel: Any = add_kernel, seed: int = 0, into_x: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """40 rows of ones and what is added to them, ours and exact; into_x: x is in their place."""
    x = torch.randn(6 * 64, 64, generator=torch.Generator().manual_seed(0))
    exact = 1 + 2 * x.double().view(6, 64, 64).sum(0)[:40]
    total = x if into_x else torch.ones(40, 64)
    launch(kernel, (1,), descriptor(x), descriptor(total), 3, seed=seed)
    return total, exact


def test_additions_come_in_any_order_and_are_clipped():
    totals = []
    for seed in range(4):
        total, exact = run(seed=seed)
        # Seven numbers below 8, rounded in fp32 after each addition.
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=7 * 16 * 2**-24)
        totals.append(total)
    assert any(not torch.equal(totals[0], other) for other in totals[1:])


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        pytest.param(
            "        tma.store_wait(pendings=0)\n", "", "RaceError", id="tile-overwritten-too-early"
        ),
        pytest.param(
            "        fence_async_shared()\n", "", "MissingFenceError", id="added-without-a-fence"
        ),
        pytest.param("\n    tma.store_wait(pendings=0)\n", "\n", "UnfinishedError", id="no-wait"),
    ],
)
def test_a_planted_fault_is_named(old: str, new: str, error: str, tmp_path: Path) -> None:
    module = planted(__file__, tmp_path, old, new)
    with pytest.raises(gluon_emulator.EmulationError) as caught:
        run(module.add_kernel)
    assert type(caught.value).__name__ == error, caught.value


@pytest.mark.parametrize("seed", range(3))
def test_an_addition_and_a_load_of_the_same_rows_race(seed: int) -> None:
    with pytest.raises(gluon_emulator.RaceError, match=r"a TMA \w+ at \[\d+, 0\] .* in no order"):
        run(seed=seed, into_x=True)


@gluon.jit
def add_rows(x_ptr, sum_ptr, number, PART: gl.constexpr):
    """Add `number` rows of x to the row at sum_ptr."""
    cols = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(number):
        x = gl.load(x_ptr + (PART * number + i) * 64 + cols)
        gl.atomic_add(sum_ptr + cols, x, sem="relaxed")


@gluon.jit
def add_rows_kernel(x_ptr, sum_ptr, number):
    """The threads of two partitions add to the same row."""
    gl.warp_specialize(
        [
            (add_rows, (x_ptr, sum_ptr, number, 0)),
            (add_rows, (x_ptr, sum_ptr, number, 1)),
        ],
        [4],
        [240],
    )


def test_threads_add_to_the_same_addresses() -> None:
    """Beside rows that they read, in one tensor."""
    for seed in range(3):
        x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
        x[6] = 1
        exact = 1 + x[:6].double().sum(0)
        launch(add_rows_kernel, (1,), x, x[6], 3, seed=seed)
        torch.testing.assert_close(x[6].double(), exact, rtol=0, atol=6 * 16 * 2**-24)


@pytest.mark.parametrize("row", [0, 5])
def test_threads_that_add_race_with_loads(row: int) -> None:
    x = torch.ones(6, 64)
    with pytest.raises(gluon_emulator.RaceError, match=r"a thread's \w+ is in no order with a"):
        launch(add_rows_kernel, (1,), x, x[row], 3)


@gluon.jit
def both_ways_kernel(sum_ptr, sum_desc, KIND: gl.constexpr):
    """The threads add to row 0, and one of them stores or TMA does something to all rows."""
    cols = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(sum_desc.dtype, [64, 64], sum_desc.layout)
    tile.store(gl.full([64, 64], 2.0, gl.float32, LAYOUT))
    fence_async_shared()
    gl.atomic_add(sum_ptr + cols, gl.full([64], 1.0, gl.float32, cols.layout), sem="relaxed")
    if KIND == "addition":
        async_atomic_add(sum_desc, [0, 0], tile)
    elif KIND == "store by TMA":
        async_store(sum_desc, [0, 0], tile)
    else:
        gl.store(sum_ptr + 1, 3.0)
    tma.store_wait(pendings=0)


def test_additions_of_threads_and_of_tma_are_in_order_with_each_other_alone() -> None:
    total = torch.ones(64, 64)
    launch(both_ways_kernel, (1,), total, descriptor(total), "addition")
    assert total[0].eq(4).all() and total[1:].eq(3).all()
    for kind in ("store by TMA", "store"):
        with pytest.raises(gluon_emulator.RaceError, match=r"store.* in no order with an addition"):
            launch(both_ways_kernel, (1,), total, descriptor(total), kind)
