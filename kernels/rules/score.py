"""Scores from q.k, and their gradients.

    x = scale * q.k        (products with relative keys or key2 are added before: see `relative`)
    x = softcap * tanh(x / softcap)
    x = x - slope[h] * |p - j|           ALiBi (Press et al. 2021, arXiv 2108.12409)
    x = x + relative_bias[h, p - j]
    x = x + attn_bias[b, h, i, j]
    x = score_mod(x, b, h, p, j)         the user's function

each if given. `modified` implements the chain for tiles of either orientation, `gradient` its
derivative. Absent parts are not compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .integers import value
from .mask import elements, head_of_whole
from .softmax import LOG2E, LOWEST
from .tile import load_in_place


class Score(NamedTuple):
    """The score as a kernel argument: pointers, floats, and integers as `runtime_int`s.

    slopes_strides: (batch, head). bias_strides: four, 0 where broadcast. relative_ptr: relative
    bias, rows of 2 reach + 1 distances, relative_stride from head to head. keys_ptr: relative keys,
    contiguous, 2 keys_reach + 1 vectors for each of keys_heads heads, which query heads share.
    key2_ptr: keys of a second product instead, with key2_heads heads, which K/V heads share.
    query_ptr: the query of either, if not q. Strides are as in `operands.head`. mod, mod_grad: the
    user's functions, tensors: their further arguments. dropout: a weight is kept if its random
    word, as a signed number, is at least this; survivors are multiplied by dropout_scale. seed_ptr:
    int64 [2]. hides: not None if a score can be -inf, so that a row may see nothing in an unmasked
    block. linear: not None if scores are just scale * q.k. exact: not None if scores are accurate
    to fp32. placed: not None with explicit positions, which dropout counts. first_head, all_heads:
    not None if the call has a slice of the heads, see `head_of_whole`.
    """

    scale: Any
    softcap: Any = None
    slopes_ptr: Any = None
    slopes_strides: Any = None
    relative_ptr: Any = None
    relative_stride: Any = None
    reach: Any = None
    keys_ptr: Any = None
    keys_heads: Any = None
    keys_reach: Any = None
    query_ptr: Any = None
    query_strides: Any = None
    key2_ptr: Any = None
    key2_strides: Any = None
    key2_heads: Any = None
    bias_ptr: Any = None
    bias_strides: Any = None
    mod: Any = None
    mod_grad: Any = None
    tensors: Any = ()
    sinks_ptr: Any = None
    dropout: Any = None
    dropout_scale: Any = None
    seed_ptr: Any = None
    hides: Any = None
    linear: Any = None
    exact: Any = None
    placed: Any = None
    first_head: Any = None
    all_heads: Any = None


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy, with a series where the quotient of exponentials would cancel."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    quotient = 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)
    return tl.where(square < 0.04, series, quotient)


@triton.jit
def softcapped(s, score):
    """softcap * tanh(scale * s / softcap)."""
    # For fp16 and bf16 products an absolute error of 1e-7 softcap is negligible, so they use no
    # series, and a reciprocal by rsqrt, which is one instruction.
    if score.exact is not None:
        capped = score.softcap * tanh(s * score.scale * (1.0 / score.softcap))
    else:
        root = tl.rsqrt(tl.exp2(s * (score.scale * (2 * LOG2E) / score.softcap)) + 1)
        capped = score.softcap - (2 * score.softcap) * root * root
    return capped


@triton.jit
def shift_of(distance, reach):
    """Index of a distance p - j into a row of relative bias or keys, clamped to its ends."""
    reach = value(reach)
    return tl.minimum(tl.maximum(distance, -reach), reach) + reach


@triton.jit
def load_bias(desc, b, h, m_first, n_first, score, const: tl.constexpr):
    """Load attn_bias of a tile [BLOCK_M, BLOCK_N] by TMA; 0 past the last row and key."""
    b = tl.where(value(score.bias_strides[0]) != 0, b, 0)
    h = tl.where(value(score.bias_strides[1]) != 0, h, 0)
    return desc.load([b, h, m_first, n_first]).reshape(const.BLOCK_M, const.BLOCK_N)


@triton.jit
def slope_of(h, row, score):
    """The slope of head h, a number; None without ALiBi."""
    if score.slopes_ptr is not None:
        slope_ptr = score.slopes_ptr + tl.cast(row.b, tl.int64) * value(score.slopes_strides[0])
        return tl.load(slope_ptr + h * value(score.slopes_strides[1]))


@triton.jit
def distances(rows, k_pos, ahead, first):
    """|k_pos - (rows + ahead)| in fp32, rounded from 2^24 on.

    first: the least key or row of the column dim, if consecutive; or None. A thread's columns
    differ in bits known at compile time (see `mask._in_range`), so it converts one number per row,
    and adds constants.
    """
    if first is None:
        distance = tl.abs(k_pos - (rows + ahead)).to(tl.float32)
    elif k_pos.shape[1] > 1:
        cols = k_pos - first
        apart = (cols & ((k_pos.shape[1] - 1) & -7)).to(tl.float32)
        distance = tl.abs((first + (cols & 6) - (rows + ahead)).to(tl.float32) + apart)
    else:
        cols = rows - first
        apart = (cols & ((rows.shape[1] - 1) & -7)).to(tl.float32)
        distance = tl.abs((k_pos - (first + (cols & 6) + ahead)).to(tl.float32) - apart)
    return distance


@triton.jit
def ahead_of(rows, k_pos, ahead, first, start):
    """p - j = rows + ahead - k_pos, as the number of a thread's first pair plus constants.

    first: see `distances`. start: likewise for the row dim. A thread has two rows, 8 apart, so the
    compiler knows pairs of equal distance, and loads once for them.
    """
    if start is None:
        distance = rows + ahead - k_pos
    elif k_pos.shape[1] > 1:
        down, across = rows - start, k_pos - first
        pair = start + (down & -9) + ahead - first - (across & 6)
        distance = pair + ((down & 8) - (across & ((k_pos.shape[1] - 1) & -7)))
    else:
        down, across = k_pos - start, rows - first
        pair = first + (across & 6) + ahead - start - (down & -9)
        distance = pair + ((across & ((rows.shape[1] - 1) & -7)) - (down & 8))
    return distance


@triton.jit
def modified(
    s, rows, k_pos, h, row, score, bias=None, unit=None, first=None, slope=None, start=None
):
    """Scores of s = q.k: (x, factor, before the user's function, softcapped).

    x times factor is the score in log2 units: if nothing modifies s, x is s and the factor is
    folded into the exponent. The last two results are for `gradient`. rows and k_pos broadcast to
    the shape of s. unit: two numbers whose product is the unit of s (None: 1); the second
    broadcasts likewise. first, start: see `ahead_of`. slope: of the head.
    """
    PLAIN: tl.constexpr = score.linear is not None
    if unit is not None and not PLAIN:
        s = s * (unit[0] * unit[1])
    x = s
    # As one number, so that the tile's products can overlap with later work.
    ahead = row.offset - row.shift
    factor = score.scale * LOG2E
    if unit is not None and PLAIN:
        factor = factor * unit[0] * unit[1]
    capped = s
    before = s
    if not PLAIN:
        factor = LOG2E
        if score.softcap is not None:
            capped = softcapped(s, score)
            x = capped
        else:
            x = s * score.scale
        if score.slopes_ptr is not None:
            if slope is None:
                slope = slope_of(h, row, score)
            distance = distances(rows, k_pos, ahead, first)
            # The backward recomputes the score and needs the forward's bits. In a difference of two
            # products a compiler may fuse either one; this form fixes which: an FMA takes no |x|, a
            # product does.
            if score.softcap is not None:
                x = tl.fma(-slope, distance, x)
            else:
                x = tl.fma(score.scale, s, -(slope * distance))
        if score.relative_ptr is not None:
            r_ptr = score.relative_ptr + tl.cast(h, tl.int64) * value(score.relative_stride)
            shift = shift_of(ahead_of(rows, k_pos, ahead, first, start), score.reach)
            x = x + load_in_place(r_ptr + shift, None).to(tl.float32)
        if score.bias_ptr is not None:
            if bias is None:
                pointers = elements(score.bias_ptr, row.b, h, rows, k_pos, score.bias_strides)
                inside = (rows < row.T_q) & (k_pos < row.T_k)
                bias = load_in_place(pointers, inside)
            x = x + bias.to(tl.float32)
        before = x
        if score.mod is not None:
            x = score.mod(x, *indices(rows, k_pos, h, row, score), *score.tensors)
            x = tl.cast(x, tl.float32)  # it may read fp64
    return x, factor, before, capped


@triton.jit
def indices(rows, k_pos, h, row, score):
    """b, h, q_pos and k_pos for the user's function: of existing pairs, as it may load by them."""
    q_pos = tl.minimum(rows, row.T_q - 1) + row.offset
    k_pos = tl.minimum(k_pos, row.T_k - 1) + row.shift
    return row.b, head_of_whole(h, score), q_pos, k_pos


@triton.jit
def gradient(dx, before, capped, rows, k_pos, h, row, keep, score):
    """From the gradient of x (natural units): gradients of (attn_bias and relative bias,
    scale*q.k).

    keep: the mask, or None if all pairs are visible.
    """
    dbias = dx
    if score.mod is not None:
        where = indices(rows, k_pos, h, row, score)
        dbias = tl.cast(score.mod_grad(dx, before, *where, *score.tensors), tl.float32)
        if keep is not None:
            dbias = tl.where(keep, dbias, 0.0)
    ds = dbias
    if score.softcap is not None:
        ratio = capped * (1.0 / score.softcap)
        ds = ds * (1 - ratio * ratio)
    return dbias, ds


class ScoreTangents(NamedTuple):
    """Tangents of attn_bias and relative_bias, in the form of `Score`."""

    bias_ptr: Any = None
    bias_strides: Any = None
    relative_ptr: Any = None
    relative_stride: Any = None


@triton.jit
def tangent(ts, x, before, capped, rows, k_pos, h, row, keep, score, tangents):
    """From the tangent of q.k to the score's (natural units), 0 where masked.

    x, before, capped: from `modified`. keep: visible pairs, or None = all. given: `ScoreTangents`.
    The user's function acts on one number, so its tangent is multiplied by the same factor as its
    gradient.
    """
    t = ts * score.scale
    if score.softcap is not None:
        ratio = capped * (1.0 / score.softcap)
        t = t * (1 - ratio * ratio)
    if tangents.relative_ptr is not None:
        r_ptr = tangents.relative_ptr + tl.cast(h, tl.int64) * value(tangents.relative_stride)
        shift = shift_of(rows + (row.offset - row.shift) - k_pos, score.reach)
        t += load_in_place(r_ptr + shift, None).to(tl.float32)
    if tangents.bias_ptr is not None:
        pointers = elements(tangents.bias_ptr, row.b, h, rows, k_pos, tangents.bias_strides)
        inside = (rows < row.T_q) & (k_pos < row.T_k)
        t += load_in_place(pointers, inside).to(tl.float32)
    if score.mod is not None:
        where = indices(rows, k_pos, h, row, score)
        t = tl.cast(score.mod_grad(t, before, *where, *score.tensors), tl.float32)
    if score.hides is not None:
        t = tl.where(x == float("-inf"), 0.0, t)
    if keep is not None:
        t = tl.where(keep, t, 0.0)
    return t


@triton.jit
def first_state(h, m, l, score):
    """Initial maximum (log2 units) and sum of rows: empty, or the head's sink."""
    if score.sinks_ptr is not None:
        # l is 0, in its Gluon layout.
        m = l + tl.load(score.sinks_ptr + h).to(tl.float32) * LOG2E
        l = l + 1.0
    return m, l


@triton.jit
def with_sink(acc, m, l, h, score):
    """Add the head's sink to the final state of rows; l [M] after it."""
    if len(l.shape) == 2:
        l = tl.sum(l, 1)
    if score.sinks_ptr is not None:
        sink = tl.load(score.sinks_ptr + h).to(tl.float32) * LOG2E
        m_next = tl.maximum(m, sink)
        m_finite = tl.maximum(m_next, LOWEST)
        rescale = tl.exp2(m - m_finite)
        acc = acc * rescale[:, None]
        l = l * rescale + tl.exp2(sink - m_finite)
        m = m_next
    return acc, m, l


@triton.jit
def kept(m_first, n_first, h, H_q, row, score, const: tl.constexpr, WIDE: tl.constexpr = True):
    """bool [BLOCK_M, BLOCK_N]: which weights dropout keeps.

    Philox4x32-7 (Salmon et al. 2011) under the key seed[0] with counter
    (j // 4, i, b H_q + h, seed[1]); its word j % 4 decides on key j. So the choice depends only on
    a weight's position, not on tiles, kernels or the batch size. Explicit positions replace i and
    j; positions of the keys from n_first on start at a multiple of 4. For a slice of heads, h and
    H_q are the full model's.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    if score.placed is not None:
        m_first += row.offset
        n_first += row.shift
    rows = m_first + tl.arange(0, BLOCK_M)[:, None]
    fours = n_first // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zeros = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    w0, w1, w2, w3 = random_words(zeros + fours, zeros + rows, h, H_q, row, score, WIDE)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK_M, BLOCK_N)
    return survives(words, score)


@triton.jit
def kept_at(rows, k_pos, h, H_q, row, score):
    """`kept` for keys in any order: rows and k_pos broadcast. Costs four times as much."""
    if score.placed is not None:
        rows += row.offset
        k_pos += row.shift
    zeros = (rows + k_pos) * 0
    fours = zeros + k_pos // 4
    w0, w1, w2, w3 = random_words(fours, zeros + rows, h, H_q, row, score, True)
    word = k_pos % 4
    words = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return survives(words, score)


@triton.jit
def random_words(fours, rows, h, H_q, row, score, WIDE: tl.constexpr):
    """Random words for four keys each, from key 4 fours on; fours and rows have one shape.

    WIDE: multiply once for both words of a product, where tl.philox multiplies twice. It takes
    more registers; the words are the same.
    """
    seed = tl.load(score.seed_ptr)
    salt = tl.load(score.seed_ptr + 1).to(tl.int32)
    zeros = rows * 0
    if score.first_head is not None:
        H_q = value(score.all_heads)
        h = head_of_whole(h, score)
    c0, c1, c2, c3 = fours, rows, zeros + (row.b * H_q + h), zeros + salt
    if WIDE:
        k0, k1 = seed.to(tl.int32), (seed >> 32).to(tl.int32)
        for _ in tl.static_range(7):
            high_0, low_0 = _wide_product(c0, 0xD2511F53)
            high_2, low_2 = _wide_product(c2, 0xCD9E8D57)
            c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
            k0, k1 = k0 + (0x9E3779B9 - 2**32), k1 + (0xBB67AE85 - 2**32)
    else:
        c0, c1, c2, c3 = tl.philox(seed, c0, c1, c2, c3, 7)
    return c0, c1, c2, c3


@triton.jit
def _wide_product(word, factor: tl.constexpr):
    """High and low word of an unsigned product, by one multiplication."""
    product = (word.to(tl.int64) & 0xFFFFFFFF) * factor
    return (product >> 32).to(tl.int32), product.to(tl.int32)


@triton.jit
def survives(words, score):
    return (words.to(tl.int32, bitcast=True) ^ -(2**31)) >= score.dropout


@triton.jit
def dropped(x, survivors, score):
    """x where it survives, scaled to keep its mean."""
    return tl.where(survivors, x * score.dropout_scale, 0.0)
