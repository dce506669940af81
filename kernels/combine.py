"""Merge results over parts of the keys.

From sm_90 to sm_110 the merging kernel starts while the kernel of the parts ends (programmatic
dependent launch, CUDA C++ Programming Guide), and waits for its writes, so that there is no gap
between the two. FASTATTN_PDL=0, read at the first launch of a kind of call, turns this off, as does
a driver that cannot record such launches in a graph.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from .launch.arguments import block_dim, strided, strides
from .launch.decode_splits import PARTS_AT_ONCE, nvidia_capability
from .launch.launches import Launch
from .rules.integers import runtime_int, value
from .rules.operands import row_pointers
from .rules.softmax import finish_merge, merge_states, no_parts

# After each output of a part: its lse and, in part number b, the first part of batch row b and the
# number of its parts, exact in fp32. The fourth entry pads to 16 bytes. For packed queries, the
# rows of a tile's first part have the number of parts, all others 0, and the fourth entry holds the
# bits of an integer: the row's query number among those of its group of heads.
PART_FACTS = tl.constexpr(4)
_BLOCK_S = tl.constexpr(PARTS_AT_ONCE)
# Compute capabilities with programmatic dependent launch.
EARLY_FROM, EARLY_UNTIL = tl.constexpr(90), tl.constexpr(120)
# CUDA 12.3, whose graphs can capture such launches.
_CAPTURING_DRIVER = 12030


# Elements of 16 bytes; rows of parts are multiples of it.
PARTS_ALIGN = tl.constexpr(4)


@triton.jit
def part_facts(parts, part, h, t):
    """Pointers to the facts after a part's outputs: see PART_FACTS."""
    return row_pointers(parts, part, h, t, PARTS_ALIGN) + value(parts.strides[2]) - PART_FACTS


@triton.jit
def place_packed(parts, begin, split, splits, h_k, queries, in_rows, ROWS: tl.constexpr):
    """Write the facts of a part of a packed tile, if it has several; only rows of the first part
    have a number of parts. queries: their numbers, token times heads plus head.
    """
    rows = tl.arange(0, ROWS)
    facts = part_facts(parts, begin + split, h_k, rows)
    several = (rows >= 0) & (splits > 1)
    first = in_rows & (split == 0)
    tl.store(facts + 2, tl.where(first, splits, 0).to(tl.float32), mask=several)
    tl.store(facts + 3, queries.to(tl.float32, bitcast=True), mask=several)


@triton.jit
def clear_places(parts, part, count, free, h_k, places, ROWS: tl.constexpr):
    """Mark this program's share of the places from `free` on as empty.

    There are `count` parts, and at most twice as many places.
    """
    rows = tl.arange(0, ROWS)
    for n in tl.static_range(2):
        index = part + n * count
        empty = (rows >= 0) & (index >= free) & (index < places)
        tl.store(part_facts(parts, index, h_k, rows) + 2, tl.zeros([ROWS], tl.float32), mask=empty)


@triton.jit
def merged_row(row_ptr, step, facts, splits, D_V: tl.constexpr, BLOCK_DV: tl.constexpr):
    """o [1, BLOCK_DV] and lse [1] of a row, its parts merged in order.

    row_ptr: the row in its first part, `step` elements before that in the next; the facts of a part
        are `facts` elements after it.
    """
    cols = tl.arange(0, BLOCK_DV)[None, :]
    acc, m, l = no_parts(BLOCK_DV)
    for first in range(0, splits, _BLOCK_S):
        outputs = ()
        lses = ()
        pointer = row_ptr + first * step
        for n in tl.static_range(_BLOCK_S):
            exists = first + n < splits
            lse = tl.load(pointer + facts, mask=exists, other=float("-inf"))
            o = tl.load(pointer + cols, mask=exists & (cols < D_V), other=0.0)
            # A part without keys has no output, but it is read without waiting for its lse.
            o = tl.where(lse > float("-inf"), o, 0.0)
            outputs = outputs + (o,)  # type: ignore[assignment]  # noqa: RUF005
            lses = lses + (lse,)  # type: ignore[assignment]  # noqa: RUF005
            pointer += step
        acc, m, l = merge_states(acc, m, l, outputs, lses)
    return finish_merge(acc, m, l)


@triton.jit
def arrives_last(arrived_ptr, count):
    """Whether this program is the last of `count`, which then sees all stores of the others."""
    # It sets the counter to 0, for the next launch. See `launch.arrivals`.
    # A barrier makes the stores of all threads part of the one thread's release, and the one by
    # which Triton hands out its result makes its acquire that of all threads.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit(do_not_specialize=["H", "T"])
def combine_kernel(
    parts_ptr, o_ptr, lse_ptr, strides, row_width, packed, H, T,
    D_V: tl.constexpr, BLOCK_DV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row [b, h, t], in order.

    EARLY: it may start before the kernel of the parts has ended. packed: for packed queries, the
    number of heads that share keys and of queries, as `runtime_int`s; b is then a part, h a K/V
    head and t a row of its tile.
    """
    if EARLY:
        gdc_wait()
    n = tl.program_id(0)
    cols = tl.arange(0, BLOCK_DV)
    width = value(row_width)
    facts = width - PART_FACTS
    row_ptr = parts_ptr + n.to(tl.int64) * width + facts
    splits = tl.load(row_ptr + 2).to(tl.int32)
    if packed is None:
        begin = tl.load(row_ptr + 1).to(tl.int32)
    else:
        # Invalid offsets leave places neither written nor cleared.
        begin = n // (H * T)
        splits = tl.minimum(splits, tl.num_programs(0) // (H * T) - begin)
        if splits <= 0:
            return
    step = (H * T).to(tl.int64) * width
    parts_ptr += begin * step + (n % (H * T)).to(tl.int64) * width
    o, lse = merged_row(parts_ptr, step, facts, splits, D_V, BLOCK_DV)
    b = (n // (H * T)).to(tl.int64)
    h = (n // T % H).to(tl.int64)
    t = (n % T).to(tl.int64)
    index = n
    if packed is not None:
        b *= 0
        group = value(packed[0])
        query = tl.load(row_ptr + 3).to(tl.int32, bitcast=True)
        query = tl.minimum(tl.maximum(query, 0), value(packed[1]) * group - 1).to(tl.int64)
        h = h * group + query % group
        t = query // group
        index = h * value(packed[1]) + t
    o_ptr += b * value(strides[0]) + h * value(strides[1]) + t * value(strides[2])
    tl.store(o_ptr + cols[None, :], o.to(o_ptr.dtype.element_ty), mask=(cols < D_V)[None, :])
    tl.store(lse_ptr + index + tl.arange(0, 1), lse)


def may_begin_early() -> bool:
    """Whether merging kernels use programmatic dependent launch."""
    if not EARLY_FROM.value <= nvidia_capability() < EARLY_UNTIL.value:
        return False
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: _CAPTURING_DRIVER)
    return os.environ.get("FASTATTN_PDL") != "0" and driver() >= _CAPTURING_DRIVER


def combine_launch(parts: Tensor, o: Tensor, D_v: int, packed: bool = False) -> Launch:
    """launch((), parts, o, lse) writes o [B, H, T, D_v or wider] and lse fp32 [B, H, T].

    parts fp32 [parts, H, T, width of o + PART_FACTS], contiguous; with `packed` [parts, H_k, rows
    of a tile, D_v in whole 16 bytes + PART_FACTS], and o [1, H, total, D_v].
    """
    B, H, T, _ = o.shape
    of_packed = None
    if packed:
        B, H_k, rows, _ = parts.shape
        of_packed = (runtime_int(H // H_k), runtime_int(T))
        H, T = H_k, rows
    early = may_begin_early()
    return Launch(
        combine_kernel,
        B * H * T,
        {"num_warps": 4, "launch_pdl": True} if early else {"num_warps": 4},
        strides(o),
        runtime_int(parts.stride(2)),
        of_packed,
        H,
        T,
        D_v,
        block_dim(D_v),
        early,
    )


@triton.jit
def merge_kernel(
    o1_ptr, lse1_ptr, o2_ptr, lse2_ptr, o_ptr, lse_ptr, width: tl.constexpr, COLS: tl.constexpr
):
    """Merge the two parts of a row."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)[None, :]
    index = n * width + cols
    acc, m, l = no_parts(COLS)
    for part in tl.static_range(2):
        lse = tl.load((lse1_ptr if part == 0 else lse2_ptr) + n)
        # A part without keys has no output.
        within = (lse > float("-inf")) & (cols < width)
        o = tl.load((o1_ptr if part == 0 else o2_ptr) + index, mask=within, other=0.0)
        acc, m, l = merge_states(acc, m, l, (o.to(tl.float32),), (lse,))
    o, lse = finish_merge(acc, m, l)
    tl.store(o_ptr + index, o.to(o_ptr.dtype.element_ty), mask=cols < width)
    tl.store(lse_ptr + n + tl.arange(0, 1), lse)


def launch_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts: o [..., D_v], contiguous, in o1's dtype, and lse fp32 [...]."""
    o1, lse1, o2, lse2 = (x.contiguous() for x in (o1, lse1, o2, lse2))
    o, lse = torch.empty_like(o1), torch.empty_like(lse1)
    if lse.numel():
        width = o.shape[-1]
        merge_kernel[(lse.numel(),)](
            o1, lse1, o2, lse2, o, lse, width, block_dim(width), num_warps=1
        )
    return o, lse


@triton.jit(do_not_specialize=["groups", "T"])
def merge_prefix_kernel(
    prefix, prefix_lse_ptr, o, lse_ptr, offsets_ptr, groups, T, width: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Merge a shared prefix's result for query [h, t] into its result, in place, if its token is in
    a group.
    """
    n = tl.program_id(0)
    h, t = n // T, n % T
    inside = t < tl.load(offsets_ptr + groups)
    lse = tl.load(prefix_lse_ptr + n, mask=inside, other=float("-inf"))
    # A query that sees no key of the prefix keeps its result bitwise; one with NaN sees some.
    seen = lse != float("-inf")
    cols = tl.arange(0, COLS)[None, :]
    within = seen & (cols < width)
    acc, m, l = no_parts(COLS)
    x = tl.load(row_pointers(prefix, 0, h, t, 1) + cols, mask=within, other=0.0)
    acc, m, l = merge_states(acc, m, l, (x.to(tl.float32),), (lse,))
    lse = tl.load(lse_ptr + n, mask=seen, other=float("-inf"))
    pointers = row_pointers(o, 0, h, t, 1) + cols
    x = tl.load(pointers, mask=within & (lse > float("-inf")), other=0.0)
    acc, m, l = merge_states(acc, m, l, (x.to(tl.float32),), (lse,))
    x, lse = finish_merge(acc, m, l)
    tl.store(pointers, x.to(o.ptr.dtype.element_ty), mask=within)
    tl.store(lse_ptr + n + tl.arange(0, 1), lse, mask=seen)


def launch_merge_prefix(
    prefix: Tensor, prefix_lse: Tensor, o: Tensor, lse: Tensor, offsets: Tensor
) -> None:
    """Merge prefix and o [total, H, D_v], any strides but the last, and fp32 lse [H, total], into
    o and lse, for the tokens before offsets[-1].
    """
    T, H, width = o.shape
    if T * H:
        prefix_rows, rows = (strided(x.transpose(0, 1)[None]) for x in (prefix, o))
        sizes = (offsets.shape[0] - 1, T, width, block_dim(width))
        merge_prefix_kernel[(H * T,)](
            prefix_rows, prefix_lse, rows, lse, offsets, *sizes, num_warps=1
        )
