"""The Gluon emulator: right numbers from a right kernel, and each planted fault under its name."""

from typing import Any

import pytest
import torch
from gluon_emulator import EmulationError, launch
from planted_kernels import planted
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

ROWS, KEYS, WIDTH, STAGES = 64, 32, 64, 2


@gluon.jit
def load_keys(k_desc, v_desc, q_desc, q, k, v, q_full, full, empty, blocks, STAGES: gl.constexpr):
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
def multiply(
    o_desc,
    sums_ptr,
    q,
    k,
    v,
    q_full,
    full,
    empty,
    blocks,
    NUMBER: gl.constexpr,
    STAGES: gl.constexpr,
):
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
    gl.warp_specialize(
        [
            (multiply, (o_desc, sums_ptr, q, k, v, q_full, full, empty, blocks, 0, STAGES)),
            (multiply, (o_desc, sums_ptr, q, k, v, q_full, full, empty, blocks, 1, STAGES)),
            (load_keys, (k_desc, v_desc, q_desc, q, k, v, q_full, full, empty, blocks, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    block = [rows, x.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def run_chain(kernel: Any = chain_kernel, rows: int = 128, keys: int = 160, **options: int) -> Any:
    """(o, its exact counterpart, row sums) of the kernel for random inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, WIDTH, generator=generator).bfloat16() for n in (rows, keys, keys))
    o, sums = torch.empty_like(q), torch.empty(128)
    launch(
        kernel,
        (1,),
        descriptor(q, ROWS),
        descriptor(k, KEYS),
        descriptor(v, KEYS),
        descriptor(o, ROWS),
        sums,
        -(-keys // KEYS),
        STAGES=STAGES,
        **options,
    )
    exact = (q.float() @ k.float().T).bfloat16().float() @ v.float()
    return o, exact, sums


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_gives_right_numbers(seed):
    o, exact, sums = run_chain(seed=seed)
    # The sums of bf16 products are taken in another order, in fp32, and rounded once.
    torch.testing.assert_close(o.float(), exact, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(sums, exact.sum(1), rtol=1e-4, atol=1e-2)


def test_tiles_over_the_edge_are_zero_filled_and_clipped():
    o, exact, _ = run_chain(rows=100, keys=150)
    assert o.shape == (100, WIDTH)
    torch.testing.assert_close(o.float(), exact, rtol=2**-8, atol=1e-3)


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
        "        mbarrier.arrive(empty.index(stage), count=1)\n", "", "DeadlockError",
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
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_fault_is_named(fault, seed, tmp_path):
    old, new, error = PLANTED[fault]
    module = planted(__file__, tmp_path, old, new)
    with pytest.raises(EmulationError) as caught:
        run_chain(module.chain_kernel, seed=seed)
    assert type(caught.value).__name__ in error.split("|"), caught.value


def test_a_deadlock_says_who_waits_for_what(tmp_path):
    old, new, _ = PLANTED["stage never released"]
    with pytest.raises(EmulationError, match=r"partition 2 waits for parity 0 of barrier 0 of 2"):
        run_chain(planted(__file__, tmp_path, old, new).chain_kernel)
