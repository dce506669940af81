"""Online softmax of rows, block by block.

State of a row: m, the largest score so far in log2 units (score * scale * log2(e)); l, the sum of
2^(score - m), or partial sums; and the accumulator of weighted values, rescaled when m grows
(Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135).
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# The largest negative number of fp32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def online_step(
    s,
    m,
    l,
    scale_log2,
    MASKED: tl.constexpr,
    SHIFT: tl.constexpr = 0,
    lift=None,
    SLACK: tl.constexpr = 0,
):
    """Update the state of rows by a block of scores s = q.k (unscaled, -inf where masked).

    Returns the block's weights relative to the new m, the factor for the accumulator, m and l.
    scale_log2 > 0, so the maximum is taken before the scale and the exponent is one FMA. l is [M]
    or, from `in_parts`, [M, parts]. SHIFT: m is this far below the largest score, so weights reach
    2^SHIFT. lift: m is the maximum of score plus lift; lift, and then scale_log2, broadcast to s;
    weights times 2^lift are at most 1. SLACK: m is unchanged, and the factor 1, until a score
    exceeds it by more than this; weights reach 2^SLACK.
    """
    largest = tl.max(s, 1) * scale_log2 if lift is None else tl.max(s * scale_log2 + lift, 1)
    if SHIFT > 0:
        largest = largest - SHIFT
    if SLACK == 0:
        m_next = tl.maximum(m, largest)
    else:
        tl.static_assert(SHIFT == 0, "weights would reach 2^(SHIFT + SLACK)")
        m_next = tl.where(largest > m + SLACK, largest, m)
    m_finite = m_next
    if MASKED:
        # Rows without keys so far: -inf minus -inf would be NaN.
        m_finite = tl.maximum(m_next, LOWEST)
    p = tl.exp2(s * scale_log2 - m_finite[:, None])
    rescale = tl.exp2(m - m_finite)
    if len(l.shape) == 1:
        l_next = l * rescale + tl.sum(p, 1)
    else:
        # Compute the factor in the weights' layout, as the maximum of its copies.
        PARTS: tl.constexpr = l.shape[1]
        factors = _by_part(tl.broadcast_to(rescale[:, None], s.shape[0], s.shape[1]), PARTS)
        l_next = l * tl.max(tl.max(factors, 3), 1) + tl.sum(tl.sum(_by_part(p, PARTS), 3), 1)
    return p, rescale, m_next, l_next


@triton.jit
def _by_part(x, PARTS: tl.constexpr):
    """x [M, N] with the columns of part t at [:, :, t, :]."""
    return x.reshape(x.shape[0], x.shape[1] // (2 * PARTS), PARTS, 2)


@triton.jit
def in_parts(l, PARTS: tl.constexpr):
    """Split sums l [M] into partial sums [M, PARTS]."""
    # On most GPUs four threads hold a row of a 16-bit matrix product, thread t columns 8 i + 2 t
    # and 8 i + 2 t + 1: with a partial sum for each, threads exchange sums only at the end.
    return tl.broadcast_to(l[:, None] * (1.0 / PARTS), l.shape[0], PARTS)


@triton.jit
def finish(acc, m, l):
    """Output and lse (natural log) from rows' final state; 0 and -inf without keys."""
    if len(l.shape) == 2:
        l = tl.sum(l, 1)
    l_nonzero = tl.where(l == 0.0, 1.0, l)
    o = acc / l_nonzero[:, None]
    lse = (m + tl.log2(l_nonzero)) * LN2
    return o, lse


@triton.jit
def weights(s, lse, scale_log2, keep=None):
    """Normalised weights from scores and the rows' lse; lse broadcasts against s.

    keep: visible pairs, or None = all; other weights are 0.
    """
    start = lse * -LOG2E
    if keep is not None:
        # Mask scores, not weights: otherwise ptxas compares during products and keeps the results
        # as bits until after the exponentials.
        s = tl.where(keep, s, float("-inf"))
        # -inf minus -inf, in a row without keys, is NaN, as is anything minus NaN, in a row with
        # NaN. Visible keys of the latter get an infinite weight instead of NaN.
        start = tl.minimum(start, -LOWEST)
    return tl.exp2(s * scale_log2 + start)


@triton.jit
def merge_states(acc, m, l, outputs, lses):
    """Merge finished parts of a row into its state, in order: tuples of o [1, COLS] and scalar lse.

    A part is like a key: its lse (natural log) is the score, its output the value. A part without
    keys has lse = -inf and o = 0, which must be defined. acc is [1, COLS], m and l are scalars. No
    sum is over threads, so that bits do not depend on the layout.
    """
    m_next = m
    for n in tl.static_range(len(lses)):
        m_next = tl.maximum(m_next, lses[n] * LOG2E)
    # Rows without keys so far: -inf minus -inf would be NaN.
    m_finite = tl.maximum(m_next, LOWEST)
    rescale = tl.exp2(m - m_finite)
    l *= rescale
    acc *= rescale
    for n in tl.static_range(len(lses)):
        p = tl.exp2(lses[n] * LOG2E - m_finite)
        l += p
        acc += p * outputs[n]
    return acc, m_next, l


@triton.jit
def no_parts(COLS: tl.constexpr):
    """The state (acc, m, l) of `merge_states` before the first part."""
    start = tl.full([], float("-inf"), tl.float32)
    return tl.zeros([1, COLS], tl.float32), start, tl.full([], 0.0, tl.float32)


@triton.jit
def finish_merge(acc, m, l):
    """`finish` for the state of `merge_states`: o [1, COLS] and lse [1]."""
    return finish(acc, tl.full([1], m, tl.float32), tl.full([1], l, tl.float32))
