"""What the warp-specialised kernels share: rings of stages, loads and stores.

A ring is (tiles, full, empty): shared memory [STAGES, ...] and two mbarriers a stage. The producer
waits until a stage is empty and loads it; the bytes that land complete `full`. Consumers wait for
`full`, and arrive at `empty` when their products have read the stage. The n-th use of a ring is
stage n mod STAGES in round n div STAGES; n counts on from tile to tile of a persistent program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..rules.quantize import key_at
from ..rules.tile import head
from .gluon_names import async_load, async_store

ROWS = gl.constexpr(64)  # that a consumer works on: those of one wgmma instruction
# The smallest piece of a swizzled tile that can be addressed by itself.
_PIECE_ROWS = gl.constexpr(8)
_PIECE_COLS = gl.constexpr(64)  # of 16 bits


@gluon.jit
def allocate_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of the descriptor's tiles that CONSUMERS partitions read."""
    SHAPE: gl.constexpr = [STAGES, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)
    full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, CONSUMERS)
    return tiles, full, empty


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER mbarriers (a power of two) whose phases take ARRIVALS arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def place(n, STAGES: gl.constexpr):
    """Stage of the n-th use of a ring (STAGES is a power of two), and the parity of its round."""
    return n & (STAGES - 1), (n & STAGES) // STAGES


@gluon.jit
def wait_full(ring, n, pred, STAGES: gl.constexpr):
    """Consumer: until the n-th tile is there; at once where pred is False."""
    stage, parity = place(n, STAGES)
    mbarrier.wait(ring[1].index(stage), parity, pred)


@gluon.jit
def tile_of(ring, n, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """The n-th tile as a matrix in shared memory."""
    stage, _ = place(n, STAGES)
    return ring[0].index(stage).reshape([ROWS, COLS])


@gluon.jit
def release(ring, n, STAGES: gl.constexpr):
    """Consumer: the products that read the n-th tile are over."""
    stage, _ = place(n, STAGES)
    mbarrier.arrive(ring[2].index(stage), count=1)


@gluon.jit
def take_turn(turns, n, CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    """Consumer: until it may issue the products of its n-th block.

    TURNS: how many consumers take turns; with 0, nobody waits. turns: a barrier for each, at which
    the one before it arrives. All have the same blocks, so that they count alike; the first begins.
    """
    if TURNS > 0:
        if CONSUMER == 0:
            mbarrier.wait(turns.index(0), (n & 1) ^ 1)
        else:
            mbarrier.wait(turns.index(CONSUMER), n & 1)


@gluon.jit
def pass_turn(turns, CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    """Consumer: its products are issued, and the next consumer's may follow them."""
    if TURNS > 0:
        mbarrier.arrive(turns.index((CONSUMER + 1) % TURNS), count=1)


@gluon.constexpr_function
def accumulator_layout(columns, dtype=gl.bfloat16):
    """Where a warpgroup keeps the [64, columns] result of a product of this type."""
    depth = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.jit
def as_operand(x, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """x as the register operand of a product with COLUMNS columns: nothing moves between threads.

    x is in the layout of an accumulator. In 8 bits its columns come in the order of `key_at`.
    """
    IN_A_REGISTER: gl.constexpr = 32 // dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS, dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, IN_A_REGISTER)
    if IN_A_REGISTER == 4:
        KEYS: gl.constexpr = x.shape[1]
        x = x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    return gl.convert_layout(x.to(dtype), OPERAND)


@gluon.jit
def load(ring, n, desc, b, h, first, STAGES: gl.constexpr, TURNED: gl.constexpr = False):
    """Producer: rows `first`... of head h as the n-th use of the ring; zeros past the last row.

    TURNED: the tensor and its tiles have rows for columns.
    """
    tiles, full, empty = ring
    stage, parity = place(n, STAGES)
    mbarrier.wait(empty.index(stage), parity ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    _copy(desc, b, h, first, full.index(stage), tiles.index(stage), TURNED)


@gluon.jit
def _copy(desc, b, h, first, landed, tile, TURNED: gl.constexpr):
    row = first
    col = 0
    if TURNED:
        row = 0
        col = first
    async_load(desc, [b, h, row, col], landed, tile)


@gluon.jit
def load_slot(slots, i, desc, b, h, first, NUMBER: gl.constexpr):
    """Producer: the 64 rows of consumer NUMBER, of the tile at row `first`, for the i-th tile.

    slots: a ring whose stages are not used in turn but belong to a consumer each.
    """
    tiles, full, empty = slots
    mbarrier.wait(empty.index(NUMBER), (i & 1) ^ 1)
    mbarrier.expect(full.index(NUMBER), desc.block_type.nbytes)
    async_load(desc, [b, h, first + NUMBER * ROWS, 0], full.index(NUMBER), tiles.index(NUMBER))


@gluon.jit
def wait_slot(slots, i, NUMBER: gl.constexpr):
    """Consumer NUMBER: until its rows of the i-th tile are there."""
    mbarrier.wait(slots[1].index(NUMBER), i & 1)


@gluon.jit
def release_slot(slots, NUMBER: gl.constexpr):
    """Consumer NUMBER: its slot may be loaded again."""
    mbarrier.arrive(slots[2].index(NUMBER), count=1)


@gluon.jit
def load_until(
    ring, n, desc, b, h, first, end, landed, scrubs,
    ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    TURNED: gl.constexpr = False,
):  # fmt: skip
    """`load`, with zeros from row first + `end` on, whatever the tensor holds there.

    A hidden row has weight 0, and 0 times NaN is NaN. Where rows end with the tensor TMA fills in
    the zeros; where they may end before it (EARLY) the tile lands at a barrier of the producer's
    own, which writes the zeros and only then calls the stage full. Returns how often it did so.
    """
    tiles, full, empty = ring
    stage, parity = place(n, STAGES)
    tile = tiles.index(stage)
    if EARLY:
        mbarrier.wait(empty.index(stage), parity ^ 1)
        if end < ROWS:
            mbarrier.expect(landed, desc.block_type.nbytes)
            _copy(desc, b, h, first, landed, tile, TURNED)
            mbarrier.wait(landed, scrubs & 1)
            if TURNED:
                _zero_columns(tile.reshape([COLS, ROWS]), end, COLS, ROWS)
            else:
                _zero_rows(tile.reshape([ROWS, COLS]), end, ROWS, COLS)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
            scrubs += 1
        else:
            mbarrier.expect(full.index(stage), desc.block_type.nbytes)
            _copy(desc, b, h, first, full.index(stage), tile, TURNED)
    else:
        load(ring, n, desc, b, h, first, STAGES, TURNED)
    return scrubs


@gluon.jit
def _zero_rows(tile, kept, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Zero all but the first `kept` rows, with one warp, in pieces that fit its few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, ROWS, _PIECE_ROWS):
        if first + _PIECE_ROWS > kept:
            for col in gl.static_range(0, COLS, _PIECE_COLS):
                piece = tile.slice(first, _PIECE_ROWS, 0).slice(col, _PIECE_COLS, 1)
                values = piece.load(LAYOUT)
                piece.store(gl.where((first + rows < kept)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _zero_columns(tile, kept, ROWS: gl.constexpr, COLS: gl.constexpr):
    """`_zero_rows` for a tile of 8 bits whose columns are keys in the order of `key_at`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    places = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    stays = (key_at(places) < kept)[None, :]
    for first in gl.static_range(0, ROWS, _PIECE_ROWS):
        piece = tile.slice(first, _PIECE_ROWS, 0)
        values = piece.load(LAYOUT)
        piece.store(gl.where(stays, values, gl.zeros_like(values)))


@gluon.jit
def first_slot(b, first_q, mask):
    """First row of batch row b in the vectors of backward, whose tiles of 128 queries are whole."""
    first = 0
    if mask.cu_q_ptr is not None:
        first = (first_q // (2 * ROWS) + b) * (2 * ROWS)
    return first


@gluon.jit
def send(desc, tile, rows, b, h, first, kept, COLS: gl.constexpr):
    """Consumer: write a tile that it filled to rows `first`... of head h, the first `kept` of them.

    TMA does it, and clips what lies past the end of the tensor. Where the rows of something else
    may follow, rows is (pointer, strides), and a tile that is not whole goes through registers;
    elsewhere it is (None, None). Only what went by TMA has to be waited for.
    """
    ptr, strides = rows
    fence_async_shared()
    if ptr is None or kept >= ROWS:
        async_store(desc, [b, h, first, 0], tile)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        ptr, stride = head(ptr, b, h, first, strides, gl.int64)
        pointers = ptr + (row * stride)[:, None] + cols[None, :]
        gl.store(pointers, tile.reshape([ROWS, COLS]).load(LAYOUT), mask=(row < kept)[:, None])
