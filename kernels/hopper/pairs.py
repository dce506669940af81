"""Scores and weights changed by a pair: tiles of attn_bias, users' functions, dropout.

TMA loads attn_bias in 16-bit tiles for each consumer, one at a time. A consumer reads a tile into
registers when its scores are ready, and releases it at once, so that the next load overlaps with
the exponentials and the next product.

Dropout has the mask of `kernels/rules/score.py`, in the layout of scores. One call of the generator
decides on four neighbouring keys of a query, but neighbouring threads hold these. So each thread
makes as many calls as it holds groups of four weights, and threads exchange the decisions, as bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..rules.integers import value
from ..rules.mask import shown_by, visible
from ..rules.score import indices, random_words, survives
from .pipeline import ROWS, accumulator_layout, allocate_ring, async_load


@gluon.jit
def allocate_bias(desc, SLOTS: gl.constexpr):
    """A slot for each consumer, or None without a bias."""
    if desc is not None:
        return allocate_ring(desc, SLOTS, 1)


@gluon.jit
def load_bias(slots, n, h, row, query, key, score, NUMBER: gl.constexpr):
    """Producer: consumer NUMBER's tile of the n-th block, from this query and this key on."""
    if slots is not None:
        mbarrier.wait(slots.empty.index(NUMBER), (n & 1) ^ 1)
        full = slots.full.index(NUMBER)
        b = gl.where(value(score.bias_strides[0]) != 0, row.b, 0)
        h = gl.where(value(score.bias_strides[1]) != 0, h, 0)
        mbarrier.expect(full, slots.desc.block_type.nbytes)
        async_load(slots.desc, [b, h, query, key], full, slots.tiles.index(NUMBER))


@gluon.jit
def take_bias(
    slots, n, LAYOUT: gl.constexpr, NUMBER: gl.constexpr, TRANSPOSED: gl.constexpr = False
):
    """Consumer NUMBER: its bias of the n-th block in registers, or None. TRANSPOSED: keys down."""
    if slots is not None:
        mbarrier.wait(slots.full.index(NUMBER), n & 1)
        tile = slots.tiles.index(NUMBER).reshape([slots.tiles.shape[3], slots.tiles.shape[4]])
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        bias = tile.load(LAYOUT)
        mbarrier.arrive(slots.empty.index(NUMBER), count=1)
        return bias


@gluon.jit
def seen_pairs(rows, keys, h, row, mask, config: gl.constexpr, valid=None, first=None):
    """`visible`, with the user's function."""
    seen = visible(rows, keys, h, row, mask, valid, first)
    # A tile of queries visits a block even if its packed sequence has no keys.
    if config.MASK_MOD is not None and (mask.cu_k_ptr is None or row.T_k > 0):
        seen = seen & shown_by(config.MASK_MOD, rows, keys, h, row, mask)
    return seen


@gluon.jit
def user_scores(x, rows, keys, h, row, mask, score, config: gl.constexpr):
    """Scores after the user's function."""
    if config.SCORE_MOD is not None and (mask.cu_k_ptr is None or row.T_k > 0):
        x = config.SCORE_MOD(x, *indices(rows, keys, h, row, score), *score.tensors)
    return x


@gluon.jit
def user_gradient(dx, before, seen, rows, keys, h, row, mask, score, config: gl.constexpr):
    """The gradient of scores before the user's function. seen: visible pairs, or None = all."""
    if config.SCORE_GRAD is not None and (mask.cu_k_ptr is None or row.T_k > 0):
        dx = config.SCORE_GRAD(dx, before, *indices(rows, keys, h, row, score), *score.tensors)
        if seen is not None:
            dx = gl.where(seen, dx, 0.0)
    return dx


@gluon.constexpr_function
def _calls_layout(columns, transposed):
    """Layout of the calls for scores [64, columns]: [64, columns / 4], or transposed, keys down,
    [16, columns].

    Threads that exchange decisions, two or transposed four, differ in the lowest bits of a lane,
    transposed in the third and fourth.
    """
    if transposed:
        steps = [[0, 1 << n] for n in range(3, columns.bit_length() - 1)]
        lanes = [[0, 2], [0, 4], [0, 1], [2, 0], [1, 0]]
        return gl.DistributedLinearLayout(steps, lanes, [[4, 0], [8, 0]], [], [16, columns])
    steps = [[0, 1 << n] for n in range(1, columns.bit_length() - 3)]
    lanes = [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(steps, lanes, [[16, 0], [32, 0]], [], [64, columns // 4])


@gluon.constexpr_function
def _exchanged_layout(columns):
    """Layout of decisions [64, columns], keys down, once threads that differ in the fourth bit of a
    lane have exchanged theirs; those that differ in the third have not.
    """
    steps = [[0, 1 << n] for n in range(3, columns.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 1], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([[1, 0], [8, 0], *steps], lanes, warps, [], [64, columns])


@gluon.jit
def kept_pairs(
    m_first, n_first, h, H_q, row, score, COLUMNS: gl.constexpr, KEYS_DOWN: gl.constexpr
):
    """bool [64, COLUMNS]: which weights dropout keeps, of the queries from m_first on and the keys
    from n_first on, `score.kept`.

    KEYS_DOWN: 64 keys and COLUMNS queries; else 64 queries and COLUMNS keys.
    """
    CALLS: gl.constexpr = _calls_layout(COLUMNS, KEYS_DOWN)
    DOWN: gl.constexpr = gl.SliceLayout(1, CALLS)
    ACROSS: gl.constexpr = gl.SliceLayout(0, CALLS)
    if score.placed is not None:
        m_first += row.offset
        n_first += row.shift
    if KEYS_DOWN:
        rows = m_first + gl.arange(0, COLUMNS, layout=ACROSS)[None, :]
        fours = n_first // 4 + gl.arange(0, ROWS // 4, layout=DOWN)[:, None]
    else:
        rows = m_first + gl.arange(0, ROWS, layout=DOWN)[:, None]
        fours = n_first // 4 + gl.arange(0, COLUMNS // 4, layout=ACROSS)[None, :]
    w0, w1, w2, w3 = random_words(fours, rows, h, H_q, row, score, True)
    evens = gl.join(survives(w0, score), survives(w2, score))
    odds = gl.join(survives(w1, score), survives(w3, score))
    kept = gl.join(evens, odds)
    if KEYS_DOWN:
        kept = kept.reshape([ROWS // 4, COLUMNS, 4]).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
        # Triton shuffles for one bit of a lane at a time; for both it would take shared memory.
        kept = gl.convert_layout(kept, _exchanged_layout(COLUMNS))
    return gl.convert_layout(kept.reshape([ROWS, COLUMNS]), accumulator_layout(COLUMNS))
