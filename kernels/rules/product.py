"""The two matrix products of attention, in fp32 as precise as the inputs allow.

fp16 and bf16 tiles use matrix units. An IEEE fp32 product has none, and Triton keeps a thread's
operands in registers: products over or into more than 64 columns are split into even and odd
columns, or they would spill.
"""

import triton
import triton.language as tl


@triton.jit
def _halves(x):
    """The even and the odd columns of x [ROWS, COLS]."""
    return x.reshape(x.shape[0], x.shape[1] // 2, 2).split()


@triton.jit
def interleave(even, odd):
    """The inverse of `_halves`."""
    return tl.join(even, odd).reshape(even.shape[0], even.shape[1] * 2)


@triton.jit
def _rows_by_rows(a, b, PRECISION: tl.constexpr):
    IN_PARTS: tl.constexpr = a.dtype == tl.float32 and PRECISION == "ieee" and a.shape[1] > 64
    if IN_PARTS:
        a_even, a_odd = _halves(a)
        b_even, b_odd = _halves(b)
        out = tl.dot(a_even, tl.trans(b_even), input_precision=PRECISION)
        out = tl.dot(a_odd, tl.trans(b_odd), out, input_precision=PRECISION)
    else:
        out = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return out


@triton.jit
def rows_by_rows(a, b, PRECISION: tl.constexpr):
    """a b^T, fp32 [M, N]: every row of a [M, COLS] with every row of b [N, COLS]."""
    IN_PARTS: tl.constexpr = a.dtype == tl.float32 and PRECISION == "ieee" and a.shape[1] > 128
    if IN_PARTS:
        a_even, a_odd = _halves(a)
        b_even, b_odd = _halves(b)
        out = _rows_by_rows(a_even, b_even, PRECISION) + _rows_by_rows(a_odd, b_odd, PRECISION)
    else:
        out = _rows_by_rows(a, b, PRECISION)
    return out


@triton.jit
def product_tangent(a, ta, b, tb, PRECISION: tl.constexpr):
    """ta b^T + a tb^T, fp32 [M, N]: the tangent of `rows_by_rows`; None: a tangent of 0."""
    HALVES: tl.constexpr = a.dtype != tl.float32
    if ta is not None and tb is not None:
        ts = rows_by_rows(ta, b, PRECISION)
        if HALVES:
            ts = tl.dot(a, tl.trans(tb), ts)
        else:
            ts += rows_by_rows(a, tb, PRECISION)
    elif ta is not None:
        ts = rows_by_rows(ta, b, PRECISION)
    elif tb is not None:
        ts = rows_by_rows(a, tb, PRECISION)
    else:
        ts = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
    return ts


@triton.jit
def _add_weighted_rows(acc, weights, rows, PRECISION: tl.constexpr):
    IN_PARTS: tl.constexpr = rows.dtype == tl.float32 and PRECISION == "ieee" and rows.shape[1] > 64
    if IN_PARTS:
        acc_even, acc_odd = _halves(acc)
        even, odd = _halves(rows)
        acc_even = tl.dot(weights, even, acc_even, input_precision=PRECISION)
        acc_odd = tl.dot(weights, odd, acc_odd, input_precision=PRECISION)
        acc = interleave(acc_even, acc_odd)
    else:
        acc = tl.dot(weights, rows, acc, input_precision=PRECISION)
    return acc


@triton.jit
def add_weighted_rows(acc, weights, rows, PRECISION: tl.constexpr):
    """acc + weights rows, fp32 [M, COLS], for weights [M, N] rounded to the dtype of rows."""
    weights = weights.to(rows.dtype)
    IN_PARTS: tl.constexpr = (
        rows.dtype == tl.float32 and PRECISION == "ieee" and rows.shape[1] > 128
    )
    if IN_PARTS:
        acc_even, acc_odd = _halves(acc)
        even, odd = _halves(rows)
        acc_even = _add_weighted_rows(acc_even, weights, even, PRECISION)
        acc_odd = _add_weighted_rows(acc_odd, weights, odd, PRECISION)
        acc = interleave(acc_even, acc_odd)
    else:
        acc = _add_weighted_rows(acc, weights, rows, PRECISION)
    return acc
