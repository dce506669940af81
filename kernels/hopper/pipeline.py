"""Pipeline of producer and consumers: rings of stages in shared memory, TMA, mbarriers.

The producer waits until a stage is empty and loads it; arriving bytes complete `full`. Consumers
wait for `full`, and arrive at `empty` when their products have read the stage. The n-th use of a
ring is stage n mod STAGES in round n div STAGES; n counts over all tiles of a persistent program.

TMA operations are named as in Triton 3.8, for every Triton from 3.6 on:

| Triton      | loads, stores                                            | additions          |
|-------------|----------------------------------------------------------|--------------------|
| 3.6, 3.7    | async_copy_global_to_shared, async_copy_shared_to_global | in the IR, no name |
| 3.8         | async_load, async_store, and the names before            | async_atomic_add   |
| 3.9         | async_load, async_store; the names before raise          | async_atomic_add   |
"""

from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from ..rules.operands import head
from ..rules.tile import clear_unowned

if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
    async_atomic_add = tma.async_atomic_add
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, as the operation of this name does."""
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


ROWS = gl.constexpr(64)  # of a consumer: one wgmma instruction


class Ring(NamedTuple):
    """Tiles of shared memory [STAGES, 1, 1, rows, columns] and two mbarriers per stage.

    desc: of the tensor whose tiles they are.
    """

    tiles: Any
    full: Any
    empty: Any
    desc: Any


class Output(NamedTuple):
    """A tensor that consumers write, see `send`.

    desc: None if written from registers. strides: None if TMA writes all of it.
    """

    desc: Any
    ptr: Any
    strides: Any


@gluon.jit
def allocate_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of the descriptor's tiles for CONSUMERS readers."""
    SHAPE: gl.constexpr = [STAGES, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)
    full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, CONSUMERS)
    return Ring(tiles, full, empty, desc)


@gluon.jit
def allocate_rings(first_desc, second_desc, config: gl.constexpr):
    """Rings of K and V, or of Q and dO, read by all consumers."""
    SECOND_STAGES: gl.constexpr = (
        config.STAGES if config.SECOND_STAGES is None else config.SECOND_STAGES
    )
    first = allocate_ring(first_desc, config.STAGES, config.CONSUMERS)
    return first, allocate_ring(second_desc, SECOND_STAGES, config.CONSUMERS)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER mbarriers (a power of two) whose phases take ARRIVALS arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def stage_and_parity(ring, n):
    """Stage of the n-th use of a ring, and the parity of its round."""
    STAGES: gl.constexpr = ring.tiles.shape[0]  # a power of two
    return n & (STAGES - 1), (n & STAGES) // STAGES


@gluon.jit
def wait_full(ring, n, pred=True):
    """Consumer: wait for the n-th tile, unless pred is False."""
    stage, parity = stage_and_parity(ring, n)
    mbarrier.wait(ring.full.index(stage), parity, pred)


@gluon.jit
def tile_of(ring, n):
    """The n-th tile as a matrix in shared memory."""
    stage, _parity = stage_and_parity(ring, n)
    return matrix(ring, stage)


@gluon.jit
def matrix(ring, stage):
    return ring.tiles.index(stage).reshape([ring.tiles.shape[3], ring.tiles.shape[4]])


@gluon.jit
def release(ring, n):
    """Consumer: release the n-th tile, after its products."""
    stage, _parity = stage_and_parity(ring, n)
    mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def take_turn(turns, n, CONSUMER: gl.constexpr):
    """Consumer: wait for its turn to issue the products of its n-th block.

    turns: a barrier per consumer, at which the previous one arrives; None: no waiting. All
    consumers have equally many blocks; the first begins.
    """
    if turns is not None:
        if CONSUMER == 0:
            mbarrier.wait(turns.index(0), (n & 1) ^ 1)
        else:
            mbarrier.wait(turns.index(CONSUMER), n & 1)


@gluon.jit
def pass_turn(turns, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Consumer: pass the turn to the next consumer, after issuing products."""
    if turns is not None:
        mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)


@gluon.constexpr_function
def accumulator_layout(columns, dtype=gl.bfloat16):
    """Layout of a warpgroup's [64, columns] product of this type."""
    depth = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.constexpr_function
def products_of(columns):
    """Number of products that `over_columns` issues."""
    return 2 if 128 < columns <= 192 else 1


@gluon.jit
def over_columns(a, b, acc, COLUMNS: gl.constexpr, use_acc: gl.constexpr = True):
    """Issue acc + a b^T, or a b^T, over the first COLUMNS columns of two tiles.

    The others are zeros; a group of 64 is skipped.
    """
    if products_of(COLUMNS) == 2:
        b_first = b.slice(0, 128, 1).permute((1, 0))
        acc = warpgroup_mma(a.slice(0, 128, 1), b_first, acc, use_acc=use_acc, is_async=True)
        b_last = b.slice(128, 64, 1).permute((1, 0))
        acc = warpgroup_mma(a.slice(128, 64, 1), b_last, acc, is_async=True)
    else:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    return acc


@gluon.jit
def as_operand(x, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """x as the register operand of a product with COLUMNS columns, without data exchange.

    x has an accumulator's layout. In 8 bits its columns get the order of `key_at`.
    """
    IN_A_REGISTER: gl.constexpr = 32 // dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS, dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, IN_A_REGISTER)
    if IN_A_REGISTER == 4:
        KEYS: gl.constexpr = x.shape[1]
        x = x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    return gl.convert_layout(x.to(dtype), OPERAND)


@gluon.constexpr_function
def pack_code(dtype):
    """Assembly: pack two fp32 numbers to a pair of this type, the first in the low half."""
    pair = "bf16x2" if dtype.name == "bf16" else "f16x2"
    return f"cvt.rn.{pair}.f32 $0, $2, $1;"


# The low and the high number of a pair.
UNPACK_LOW = gl.constexpr("{ .reg .b16 other; mov.b32 {$0, other}, $1; }")
UNPACK_HIGH = gl.constexpr("{ .reg .b16 other; mov.b32 {other, $0}, $1; }")


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """Pack x [ROWS, columns] of fp32 to pairs of adjacent 16-bit numbers, int32 [ROWS, columns /
    2].

    A thread has both numbers of a pair, so there is no data exchange.
    """
    COLS: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = pack_code(dtype)
    even, odd = gl.split(x.reshape([ROWS, COLS // 2, 2]))
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [even, odd], gl.int32, True, 1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr):
    """Inverse of `packed`: 16-bit x [ROWS, columns]."""
    COLS: gl.constexpr = 2 * pairs.shape[1]
    return gl.join(_half(UNPACK_LOW, pairs, dtype), _half(UNPACK_HIGH, pairs, dtype)).reshape(
        [ROWS, COLS]
    )


@gluon.jit
def _half(CODE: gl.constexpr, pairs, dtype: gl.constexpr):
    # Triton does not treat a result type as constexpr.
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(CODE, "=h,r", [pairs], gl.bfloat16, True, 1)
    else:
        x = gl.inline_asm_elementwise(CODE, "=h,r", [pairs], gl.float16, True, 1)
    return x


# One flag per warp: whether any row's factor is not 1, or NaN.
ANY_FACTOR = gl.constexpr("""{
    .reg .pred any;
    setp.neu.f32 any, $2, 0f3F800000;
    setp.neu.or.f32 any, $3, 0f3F800000, any;
    vote.sync.any.pred any, any, 0xffffffff;
    selp.b32 $0, 1, 0, any;
    selp.b32 $1, 1, 0, any;
}""")


@gluon.constexpr_function
def times_factors(numbers):
    """Assembly: multiply a thread's numbers by their factors, unless the flag is 0.

    Operands: results, numbers (same registers), factors, and equal flags.
    """
    lines = [
        ".reg .pred none;",
        f"setp.eq.b32 none, ${3 * numbers}, 0;",
        "@none bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers)),
        "DONE:",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _places(numbers):
    same = [str(i) for i in range(numbers)]
    return ",".join(["=f"] * numbers + same + ["f"] * numbers + ["r"] * numbers)


@gluon.jit
def rescaled(acc, factor, LAYOUT: gl.constexpr, SKIP: gl.constexpr):
    """acc [ROWS, columns] times factor [ROWS]. acc is in the layout of an accumulator.

    SKIP: a warp whose factors are all 1 skips the multiplications. A condition in the kernel would
    apply to the whole warpgroup and need a barrier.
    """
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    factors = gl.convert_layout(factor, OF_ROWS)[:, None]
    if SKIP:
        # A thread holds two rows; a warp has 16.
        ROWS_OF_THREAD: gl.constexpr = 2
        NUMBERS: gl.constexpr = ROWS_OF_THREAD * acc.shape[1] // 4
        # Not pure, as it must stay where all threads of the warp are active.
        flag = gl.inline_asm_elementwise(
            ANY_FACTOR, "=r,=r,f,f", [factor], gl.int32, False, ROWS_OF_THREAD
        )
        flags = gl.convert_layout(flag, OF_ROWS)[:, None]
        CODE: gl.constexpr = times_factors(NUMBERS)
        PLACES: gl.constexpr = _places(NUMBERS)
        acc = gl.inline_asm_elementwise(
            CODE, PLACES, [acc, factors, flags], gl.float32, True, NUMBERS
        )
    else:
        acc = acc * factors
    return acc


@gluon.jit
def load(ring, n, b, h, first, TRANSPOSED: gl.constexpr = False):
    """Producer: rows `first`... of head h as the n-th use of the ring; zeros past the last row.

    TRANSPOSED: the tensor is [B, H, D, T], with transposed tiles.
    """
    stage, parity = stage_and_parity(ring, n)
    mbarrier.wait(ring.empty.index(stage), parity ^ 1)
    start_load(ring, stage, b, h, first, ring.full.index(stage), TRANSPOSED)


@gluon.jit
def start_load(ring, stage, b, h, first, landed, TRANSPOSED: gl.constexpr = False):
    """Set the expected bytes of a tile on the barrier `landed`, and start the copy."""
    row = first
    col = 0
    if TRANSPOSED:
        row = 0
        col = first
    mbarrier.expect(landed, ring.desc.block_type.nbytes)
    async_load(ring.desc, [b, h, row, col], landed, ring.tiles.index(stage))


@gluon.jit
def load_slot(slots, i, b, h, first, NUMBER: gl.constexpr):
    """Producer: load consumer NUMBER's 64 rows of the i-th tile, from row `first`, in its slot."""
    mbarrier.wait(slots.empty.index(NUMBER), (i & 1) ^ 1)
    start_load(slots, NUMBER, b, h, first + NUMBER * ROWS, slots.full.index(NUMBER))


@gluon.jit
def wait_slot(slots, i, NUMBER: gl.constexpr):
    """Consumer NUMBER: wait for its rows of the i-th tile."""
    mbarrier.wait(slots.full.index(NUMBER), i & 1)


@gluon.jit
def release_slot(slots, NUMBER: gl.constexpr):
    """Consumer NUMBER: release its slot."""
    mbarrier.arrive(slots.empty.index(NUMBER), count=1)


@gluon.jit
def send(out, tile, x, b, h, first, kept, COLUMNS: gl.constexpr):
    """Consumer: write x to rows `first`... of head h, the first `kept` of them.

    x: [64, columns of the tile]; the first COLUMNS exist.

    TMA stores through `tile` in shared memory, and clips past the end of the tensor. If another
    sequence's rows may follow, partial tiles are stored from registers. Only TMA stores have to be
    waited for. fp32, for which shared memory would be too small, is stored from registers: four
    adjacent threads write a sector of 32 bytes.
    """
    if out.desc is None:
        ptr, stride = head(out.ptr, b, h, first, out.strides, gl.int64)
        store_rows(ptr, stride, x, accumulator_layout(x.shape[1]), kept, COLUMNS)
    else:
        ROWS_OF_TILE: gl.constexpr = tile.shape[2]
        COLS: gl.constexpr = tile.shape[3]
        tile.reshape([ROWS_OF_TILE, COLS]).store(x.to(out.desc.dtype))
        _send_tile(out, tile, b, h, first, kept, COLUMNS)


@gluon.jit
def columns_of_row(BLOCK: gl.constexpr):
    """The numbers below BLOCK, for `tile.clear_output`."""
    return gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def clear_statistic(ptr, heads, ends):
    """Write -inf to [heads, T] where `tile.clear_output` writes zeros."""
    clear_unowned(ptr, float("-inf"), columns_of_row(1), 1, ends[2], 1, heads, ends)


@gluon.jit
def store_rows(ptr, stride, x, LAYOUT: gl.constexpr, kept, COLUMNS: gl.constexpr):
    """`send` from registers in this layout to rows with this stride."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointers = ptr + (row * stride)[:, None] + cols[None, :]
    exists = (row < kept)[:, None]
    if x.shape[1] != COLUMNS:
        exists = exists & (cols < COLUMNS)[None, :]
    gl.store(pointers, x, mask=exists)


@gluon.jit
def _send_tile(out, tile, b, h, first, kept, COLUMNS: gl.constexpr):
    """`send` from shared memory."""
    fence_async_shared()
    if out.strides is None or kept >= ROWS:
        async_store(out.desc, [b, h, first, 0], tile)
    else:
        COLS: gl.constexpr = out.desc.block_shape[3]
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        values = tile.reshape([ROWS, COLS]).load(LAYOUT)
        ptr, stride = head(out.ptr, b, h, first, out.strides, gl.int64)
        store_rows(ptr, stride, values, LAYOUT, kept, COLUMNS)
