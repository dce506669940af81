"""The Gluon emulator: right numbers from right kernels, and each injected fault under its name."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_emulator import EmulationError, RaceError, launch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels.hopper.pipeline import async_atomic_add, async_load, async_store


@gluon.jit
def load_keys(k_desc, v_desc, q_desc, memory, blocks, STAGES: gl.constexpr):
    q, k, v, q_full, full, empty = memory
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [0, 0], q_full, q.index(0))
    tma.async_copy_global_to_shared(q_desc, [64, 0], q_full, q.index(1))
    for n in range(blocks):
        stage = n % STAGES
        free_parity = (n // STAGES + 1) % 2
        mbarrier.wait(empty.index(stage), free_parity)
        mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [n * 32, 0], full.index(stage), k.index(stage))
        tma.async_copy_global_to_shared(v_desc, [n * 32, 0], full.index(stage), v.index(stage))


@gluon.jit
def multiply(o_desc, sums_ptr, memory, blocks, NUMBER: gl.constexpr, STAGES: gl.constexpr):
    q, k, v, q_full, full, empty = memory
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, O)
    zero = gl.zeros([64, 32], gl.float32, S)
    mbarrier.wait(q_full, 0)
    for n in range(blocks):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) % 2)
        keys = k.index(stage).permute((1, 0))
        s = warpgroup_mma(q.index(NUMBER), keys, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        p = gl.convert_layout(s.to(gl.bfloat16), gl.DotOperandLayout(0, O, 2))
        acc = warpgroup_mma(p, v.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
    rows = NUMBER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    gl.store(sums_ptr + rows, gl.sum(acc, 1))
    q.index(NUMBER).store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [NUMBER * 64, 0], q.index(NUMBER))
    tma.store_wait(pendings=0)


@gluon.jit
def chain_kernel(q_desc, k_desc, v_desc, o_desc, sums_ptr, blocks, STAGES: gl.constexpr):
    """o = bf16(q k^T) v and its row sums: a producer of K and V, two partitions of 64 rows."""
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 32, 64], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 32, 64], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    memory = (q, k, v, q_full, full, empty)
    gl.warp_specialize(
        [
            (multiply, (o_desc, sums_ptr, memory, blocks, 0, STAGES)),
            (multiply, (o_desc, sums_ptr, memory, blocks, 1, STAGES)),
            (load_keys, (k_desc, v_desc, q_desc, memory, blocks, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


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


@gluon.jit
def both_ways_kernel(sum_ptr, sum_desc, KIND: gl.constexpr):
    """The threads add to row 0, and one of them or TMA does something else to it."""
    cols = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(sum_desc.dtype, [64, 64], sum_desc.layout)
    tile.store(gl.full([64, 64], 2.0, gl.float32, LAYOUT))
    fence_async_shared()
    gl.atomic_add(sum_ptr + cols, gl.full([64], 1.0, gl.float32, cols.layout), sem="relaxed")
    if KIND == "addition":
        async_atomic_add(sum_desc, [0, 0], tile)
    elif KIND == "TMA store":
        async_store(sum_desc, [0, 0], tile)
    elif KIND == "load":
        gl.load(sum_ptr + 1)
    else:
        gl.store(sum_ptr + 1, 3.0)
    tma.store_wait(pendings=0)


def descriptor(x: torch.Tensor, rows: int, dtype: Any = gl.bfloat16) -> TensorDescriptor:
    block = [rows, x.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def run_chain(kernel: Any = chain_kernel, rows: int = 128, keys: int = 160, seed: int = 0) -> Any:
    """(o, its exact counterpart, row sums) of the kernel for random inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 64, generator=generator).bfloat16() for n in (rows, keys, keys))
    o, sums = torch.empty_like(q), torch.empty(128)
    descriptors = (descriptor(x, n) for x, n in ((q, 64), (k, 32), (v, 32), (o, 64)))
    launch(kernel, (1,), *descriptors, sums, -(-keys // 32), STAGES=2, seed=seed)
    exact = (q.float() @ k.float().T).bfloat16().float() @ v.float()
    return o, exact, sums


def run_additions(kernel: Any = add_kernel, seed: int = 0, into_x: bool = False) -> Any:
    """40 rows of ones and what is added to them, ours and exact; into_x: x is in their place."""
    x = torch.randn(6 * 64, 64, generator=torch.Generator().manual_seed(0))
    exact = 1 + 2 * x.double().view(6, 64, 64).sum(0)[:40]
    total = x if into_x else torch.ones(40, 64)
    descriptors = (descriptor(tensor, 64, gl.float32) for tensor in (x, total))
    launch(kernel, (1,), *descriptors, 3, seed=seed)
    return total, exact


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_gives_right_numbers(seed: int) -> None:
    """With tiles over the edge, too, which are filled with zeros and clipped."""
    for sizes in ({}, {"rows": 100, "keys": 150}):
        o, exact, sums = run_chain(seed=seed, **sizes)
        # The sums of bf16 products are taken in another order, in fp32, and rounded once.
        torch.testing.assert_close(o.float(), exact, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(sums[:100], exact.sum(1), rtol=1e-4, atol=1e-2)


def test_additions_come_in_any_order_and_are_clipped() -> None:
    totals = []
    for seed in range(4):
        total, exact = run_additions(seed=seed)
        # Seven numbers below 8, rounded in fp32 after each addition.
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=7 * 16 * 2**-24)
        totals.append(total)
    assert any(not torch.equal(totals[0], other) for other in totals[1:])


def test_an_addition_is_in_order_with_other_additions_alone() -> None:
    """Additions by TMA or by threads."""
    total = torch.ones(64, 64)
    described = descriptor(total, 64, gl.float32)
    launch(both_ways_kernel, (1,), total, described, "addition")
    assert total[0].eq(4).all() and total[1:].eq(3).all()
    for kind in ("TMA store", "store", "load"):
        with pytest.raises(RaceError, match=rf"a .*{kind}.* in no order with an addition"):
            launch(both_ways_kernel, (1,), total, described, kind)
    for seed in range(3):
        with pytest.raises(RaceError, match=r"a TMA \w+ at \[\d+, 0\] .* in no order"):
            run_additions(seed=seed, into_x=True)


# What to change in the kernels above, and the error that has to come of it, or one of several
# where it depends on the order in which things happen.
PLANTED = {
    "producer waits for the wrong phase": (
        "free_parity = (n // STAGES + 1) % 2", "free_parity = (n // STAGES) % 2", "DeadlockError",
    ),
    "stage overwritten without waiting": (
        "mbarrier.wait(empty.index(stage), free_parity)", "pass", "RaceError",
    ),
    "tile read without waiting": (
        "mbarrier.wait(full.index(stage), (n // STAGES) % 2)", "pass", "RaceError",
    ),
    "queries read without waiting": ("    mbarrier.wait(q_full, 0)\n", "", "RaceError"),
    "stage released before its last product": (
        "acc = warpgroup_mma(p, v.index(stage), acc, is_async=True)\n",
        "acc = warpgroup_mma(p, v.index(stage), acc, is_async=True)\n"
        "        mbarrier.arrive(empty.index(stage), count=1)\n"
        "        mbarrier.wait(empty.index(stage), (n // STAGES) % 2)\n",
        "RaceError",
    ),
    "stage never released": (
        "        mbarrier.arrive(empty.index(stage), count=1)\n", "",
        "DeadlockError: .*partition 2 waits for parity 0 of barrier 0 of 2",
    ),
    "registers written, stored without a fence": (
        "    fence_async_shared()\n", "", "MissingFenceError",
    ),
    "half of the bytes announced": (
        "mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)",
        "mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)",
        "RaceError|DeadlockError",
    ),
    "one arrival counted, two come": (
        "mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)",
        "RaceError|BarrierError|DeadlockError",
    ),
    "arrivals beyond the count": (
        "mbarrier.arrive(empty.index(stage), count=1)",
        "mbarrier.arrive(empty.index(stage), count=3)",
        "BarrierError",
    ),
    "barrier not initialised": (
        "        mbarrier.init(full.index(i), count=1)\n", "", "BarrierError",
    ),
    "scores used before their wait": (
        "        s = warpgroup_mma_wait(0, deps=[s])\n", "", "InFlightError",
    ),
    "wait that leaves the product in flight": (
        "s = warpgroup_mma_wait(0, deps=[s])", "s = warpgroup_mma_wait(1, deps=[s])",
        "InFlightError",
    ),
    "program ends before its store": (
        "    tma.store_wait(pendings=0)\n", "", "UnfinishedError",
    ),
    "shared memory rewritten under a store": (
        "    tma.store_wait(pendings=0)\n",
        "    q.index(NUMBER).store(acc.to(gl.bfloat16))\n    tma.store_wait(pendings=0)\n",
        "RaceError",
    ),
    "two loads into one stage": (
        "full.index(stage), v.index(stage))", "full.index(stage), k.index(stage))", "RaceError",
    ),
    "stage that nothing writes": ("q.index(1))", "q.index(0))", "RaceError|UninitializedError"),
    "register operand in the layout of an accumulator": (
        "gl.convert_layout(s.to(gl.bfloat16), gl.DotOperandLayout(0, O, 2))", "s.to(gl.bfloat16)",
        "IllegalError",
    ),
    "more shared memory than there is": (
        "gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], q_desc.layout)",
        "gl.allocate_shared_memory(gl.bfloat16, [32, 64, 64], q_desc.layout)",
        "ResourceError",
    ),
    "more registers than there are": ("        [240, 24],", "        [256, 256],", "ResourceError"),
    "rows past the end of a tensor": (
        "rows = NUMBER * 64 + gl.arange", "rows = 64 + NUMBER * 64 + gl.arange", "OutOfBoundsError",
    ),
    "operands of different rank": (
        "gl.store(sums_ptr + rows, gl.sum(acc, 1))",
        "gl.store(sums_ptr + rows, gl.sum(acc + gl.sum(acc, 1), 1))",
        "IllegalError",
    ),
    "tile overwritten before it is added": (
        "        tma.store_wait(pendings=0)\n", "", "RaceError",
    ),
    "added without a fence": ("        fence_async_shared()\n", "", "MissingFenceError"),
    "program ends before its addition": (
        "        async_atomic_add(sum_desc, [0, 0], tile)\n    tma.store_wait(pendings=0)\n",
        "        async_atomic_add(sum_desc, [0, 0], tile)\n", "UnfinishedError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_fault_is_named(fault: str, seed: int, tmp_path: Path) -> None:
    old, new, error = PLANTED[fault]
    text = Path(__file__).read_text("utf-8").partition("def descriptor(")[0]
    assert old in text
    path = tmp_path / "kernels_with_a_fault.py"
    path.write_text(text.replace(old, new, 1), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(EmulationError) as caught:
        if "add" in fault:
            run_additions(module.add_kernel, seed)
        else:
            run_chain(module.chain_kernel, seed=seed)
    assert re.match(f"({error})", f"{type(caught.value).__name__}: {caught.value}")
