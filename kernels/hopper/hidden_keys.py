"""Keys that no query may see: past the end of a row, holes of a padding mask, of no document.

Their weights are 0, and 0 times NaN is NaN: where a product sums over keys, the producer zeroes
them in shared memory. Only boundary blocks have such keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..rules.codes import key_at
from ..rules.integers import value
from ..rules.mask import padded_keys, padding_words, valid_keys
from .pipeline import allocate_barriers, load, matrix, stage_and_parity, start_load

# Smallest addressable piece of a swizzled tile.
_PIECE_ROWS = gl.constexpr(8)
_PIECE_COLS = gl.constexpr(64)  # of 16 bits


@gluon.jit
def allocate_landed(mask):
    """Barrier of `load_until` and `load_keys`, or None if all keys in memory are visible."""
    ENDS: gl.constexpr = mask.lengths_ptr is not None or mask.cu_k_ptr is not None
    if ENDS or mask.padding_ptr is not None or mask.k_documents_ptr is not None:
        return allocate_barriers(1, 1).index(0)


@gluon.jit
def load_until(ring, landed, n, b, h, first, end, scrubs, TRANSPOSED: gl.constexpr = False):
    """`load`, with zeros from row first + `end` on.

    A hidden row has weight 0, and 0 times NaN is NaN. If rows end with the tensor, TMA fills in
    zeros; if they may end before it, the tile arrives at the producer's own barrier `landed`
    (otherwise None), and the producer writes zeros before it marks the stage full. Returns scrubs,
    the number of such tiles.
    """
    if landed is None:
        load(ring, n, b, h, first, TRANSPOSED)
    else:
        stage, parity = stage_and_parity(ring, n)
        mbarrier.wait(ring.empty.index(stage), parity ^ 1)
        ROWS_OF_TILE: gl.constexpr = ring.tiles.shape[4 if TRANSPOSED else 3]
        if end < ROWS_OF_TILE:
            start_load(ring, stage, b, h, first, landed, TRANSPOSED)
            mbarrier.wait(landed, scrubs & 1)
            if TRANSPOSED:
                _zero_columns(matrix(ring, stage), end)
            else:
                _zero_rows(matrix(ring, stage), end)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
            scrubs += 1
        else:
            start_load(ring, stage, b, h, first, ring.full.index(stage), TRANSPOSED)
    return scrubs


@gluon.jit
def _zero_rows(tile, kept):
    """Zero all but the first `kept` rows with one warp, in pieces that fit its few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    ROWS: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    for first in gl.static_range(0, ROWS, _PIECE_ROWS):
        if first + _PIECE_ROWS > kept:
            for col in gl.static_range(0, COLS, _PIECE_COLS):
                piece = tile.slice(first, _PIECE_ROWS, 0).slice(col, _PIECE_COLS, 1)
                values = piece.load(LAYOUT)
                piece.store(gl.where((first + rows < kept)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _zero_columns(tile, kept):
    """`_zero_rows` for an 8-bit tile whose columns are keys in the order of `key_at`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    ROWS: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    positions = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    stays = (key_at(positions) < kept)[None, :]
    for first in gl.static_range(0, ROWS, _PIECE_ROWS):
        piece = tile.slice(first, _PIECE_ROWS, 0)
        values = piece.load(LAYOUT)
        piece.store(gl.where(stays, values, gl.zeros_like(values)))


@gluon.jit
def shown_keys(rows, keys, first, row, mask):
    """`visible` for existing keys, broadcast to scores; None if ranges suffice.

    keys: [BLOCK], numbers of those from `first` on. Having no document is symmetric in keys and
    queries; it is checked for the queries, as a thread has few rows [ROWS].
    """
    if mask.padding_ptr is not None:
        BLOCK: gl.constexpr = keys.shape[0]
        # A tile without keys visits a block all the same, far behind the last one if in a window.
        words = padding_words(gl.where(first < row.T_k, first, 0), row, mask, BLOCK)
        shown = padded_keys(words, BLOCK, keys - first)[None, :]
    if mask.q_documents_ptr is not None:
        documents_ptr = mask.q_documents_ptr + gl.cast(row.b, gl.int64) * value(
            mask.documents_strides[0]
        )
        named = gl.load(documents_ptr + rows, mask=rows < row.T_q, other=-1) >= 0
        shown = named[:, None] if mask.padding_ptr is None else shown & named[:, None]
    if mask.padding_ptr is not None or mask.q_documents_ptr is not None:
        return shown


@gluon.jit
def some_exist(keys, row, mask):
    """Keys that some query may see; None if the row's end suffices."""
    if mask.padding_ptr is not None or mask.k_documents_ptr is not None:
        return valid_keys(keys, row, mask)


@gluon.jit
def load_keys(
    ring, landed, n, b, h, first, key, row, mask, boundary, scrubs, TRANSPOSED: gl.constexpr = False
):
    """`load_until` for the keys from number `key` on, with zeros for hidden ones.

    boundary: whether any may be hidden.
    """
    if mask.padding_ptr is None and mask.k_documents_ptr is None:
        scrubs = load_until(ring, landed, n, b, h, first, row.end - key, scrubs, TRANSPOSED)
    else:
        BLOCK: gl.constexpr = ring.tiles.shape[3]
        hidden = False
        if boundary:
            # Started while the stage is still read.
            LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [1], [0])
            keys = key + gl.arange(0, BLOCK, layout=LAYOUT)
            hidden = gl.min(valid_keys(keys, row, mask).to(gl.int32), 0) == 0
        stage, parity = stage_and_parity(ring, n)
        mbarrier.wait(ring.empty.index(stage), parity ^ 1)
        if hidden:
            start_load(ring, stage, b, h, first, landed)
            mbarrier.wait(landed, scrubs & 1)
            _zero_hidden(matrix(ring, stage), key, row, mask)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
            scrubs += 1
        else:
            start_load(ring, stage, b, h, first, ring.full.index(stage))
    return scrubs


@gluon.jit
def _zero_hidden(tile, key, row, mask):
    """Zero the rows of hidden keys with one warp, in pieces that fit its few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    ROWS: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    for first in gl.static_range(0, ROWS, _PIECE_ROWS):
        shown = valid_keys(key + first + rows, row, mask)
        if gl.min(shown.to(gl.int32), 0) == 0:
            for col in gl.static_range(0, COLS, _PIECE_COLS):
                piece = tile.slice(first, _PIECE_ROWS, 0).slice(col, _PIECE_COLS, 1)
                values = piece.load(LAYOUT)
                piece.store(gl.where(shown[:, None], values, gl.zeros_like(values)))
