"""The softmax of a row, met block by block.

State of a row: m, the largest score so far in log2 units (score * scale * log2(e)); l, the sum of
2^(score - m), or parts of it that are added up at the end; and the accumulator of weighted values,
rescaled whenever m grows (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv
2205.14135).
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# The largest negative number of fp32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def online_step(
    s, m, l, scale_log2, MASKED: tl.constexpr, SHIFT: tl.constexpr = 0, lift=None,
    SLACK: tl.constexpr = 0,
):  # fmt: skip
    """Take a block of scores s = q.k (unscaled, -inf where hidden) into the state of its rows.

    Returns the block's weights relative to the new m, the factor for the accumulator, m and l.
    scale_log2 > 0, so the maximum is taken before the scale and the exponent is one FMA.
    l is [M] or, from `in_parts`, [M, parts]. SHIFT: m stays this far below the largest score, and
    weights reach 2^SHIFT. lift: m is the largest score plus lift, which broadcasts to s, as
    scale_log2 then may: weights times 2^lift are 1 at most. SLACK: m stays where it is, and the
    factor 1, until a score is farther above it than this; weights reach 2^SLACK.
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
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        m_finite = tl.maximum(m_next, LOWEST)
    p = tl.exp2(s * scale_log2 - m_finite[:, None])
    rescale = tl.exp2(m - m_finite)
    if len(l.shape) == 1:
        l_next = l * rescale + tl.sum(p, 1)
    else:
        # The factor goes the way of the weights, to be where they end: the largest of its copies.
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
    """The sums l [M] as [M, PARTS] that add up to them.

    What a matrix product of 16-bit numbers leaves of a row lies with four threads on most GPUs,
    columns 8 i + 2 t and 8 i + 2 t + 1 with the t-th: with a part for each, no thread asks another
    for its sum before the end.
    """
    return tl.broadcast_to(l[:, None] * (1.0 / PARTS), l.shape[0], PARTS)


@triton.jit
def finish(acc, m, l):
    """Output and lse (natural log) of rows that have met all their keys; 0 and -inf without any."""
    if len(l.shape) == 2:
        l = tl.sum(l, 1)
    l_nonzero = tl.where(l == 0.0, 1.0, l)
    o = acc / l_nonzero[:, None]
    lse = (m + tl.log2(l_nonzero)) * LN2
    return o, lse


@triton.jit
def weights(s, lse, scale_log2, keep=None):
    """Normalised weights from scores and the lse of their rows; lse broadcasts against s.

    keep: which scores the mask shows, or None where it shows all; the weights of others are 0.
    """
    start = lse * -LOG2E
    if keep is not None:
        # The scores and not the weights: ptxas would compare while products are under way for what
        # comes after the exponentials, and has to keep the answers as bits.
        s = tl.where(keep, s, float("-inf"))
        # -inf less an lse of -inf, of a row without a key, is NaN, and so is what is less NaN, of a
        # row that met it. What the latter sees gets an infinite weight in place of NaN.
        start = tl.minimum(start, -LOWEST)
    return tl.exp2(s * scale_log2 + start)


@triton.jit
def merge_states(acc, m, l, o, lse):
    """Take finished parts of one row into its state: outputs o [PARTS, COLS] and lse [PARTS].

    A part is to the row what a key is: its lse (natural log) is the score, its output the value. A
    part that saw nothing has lse = -inf and, so that nothing undefined is read, o = 0. acc is
    [1, COLS], m and l are [1].
    """
    p, rescale, m, l = online_step(lse[None, :], m, l, LOG2E, True)
    acc = acc * rescale[:, None] + tl.sum(tl.trans(p) * o, 0)[None, :]
    return acc, m, l
