"""Keys hidden from all queries: holes of a padding mask, keys without a document.

Their weights are 0, but 0 times NaN is NaN. So if a product sums over keys, the producer zeroes
them in shared memory, as `pipeline.load_until` does after the end of a row. Only boundary blocks
have such keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..rules.integers import value
from ..rules.mask import padded_keys, padding_words, valid_keys
from .pipeline import allocate_barriers, load_until, matrix, stage_and_parity, start_load

_PIECE_ROWS = gl.constexpr(8)
_PIECE_COLS = gl.constexpr(64)  # of 16 bits


@gluon.jit
def allocate_landed(mask):
    """Barrier of `load_until` and `load_keys`, or None if all keys in memory are visible."""
    landed: gl.constexpr = None
    ENDS: gl.constexpr = mask.lengths_ptr is not None or mask.cu_k_ptr is not None
    if ENDS or mask.padding_ptr is not None or mask.k_documents_ptr is not None:
        landed = allocate_barriers(1, 1).index(0)
    return landed


@gluon.jit
def shown_keys(rows, keys, first, row, mask):
    """`visible` for existing keys, broadcast to scores; None if ranges suffice.

    keys: [BLOCK], numbers of those from `first` on. Having no document is symmetric in keys and
    queries; it is checked for the queries, as a thread has few rows [ROWS].
    """
    shown: gl.constexpr = None
    if mask.padding_ptr is not None:
        BLOCK: gl.constexpr = keys.shape[0]
        words = padding_words(first, row, mask, BLOCK)
        shown = padded_keys(words, BLOCK, keys - first)[None, :]
    if mask.q_documents_ptr is not None:
        documents_ptr = mask.q_documents_ptr + gl.cast(row.b, gl.int64) * value(
            mask.documents_strides[0]
        )
        named = gl.load(documents_ptr + rows, mask=rows < row.T_q, other=-1) >= 0
        shown = named[:, None] if mask.padding_ptr is None else shown & named[:, None]
    return shown


@gluon.jit
def some_exist(keys, row, mask):
    """Which keys some query may see; None if the row's end suffices."""
    exists: gl.constexpr = None
    if mask.padding_ptr is not None or mask.k_documents_ptr is not None:
        exists = valid_keys(keys, row, mask)
    return exists


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
