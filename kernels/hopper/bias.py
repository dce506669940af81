"""attn_bias in 16-bit tiles, which TMA loads for each consumer, one at a time.

A consumer reads a tile into registers when its scores are ready, and releases it at once, so that
the next load overlaps with the exponentials and the next product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..rules.integers import value
from .pipeline import allocate_ring, async_load


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
