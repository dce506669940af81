"""Partitions of a persistent program: a producer warp and two or three consumer warpgroups.

All iterate over the same tiles, with equal counts of tiles and blocks. A kernel provides the work
for one tile: `load_tile` for the producer, `consume_tile` for a consumer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .schedule import number_of_tiles
from .tile_table import HopperConfig


@gluon.constexpr_function
def configured(config, *mods):
    """A kernel's `HopperConfig` from bare fields, as Triton 3.8 passes it, and users' functions."""
    *fields, columns, _mask, _score, _grad = config
    return HopperConfig(*fields, columns and tuple(columns), *mods)  # type: ignore[call-arg]


@gluon.jit
def run_partitions(
    find_tile: gl.constexpr,
    load_tile: gl.constexpr,
    consume_tile: gl.constexpr,
    shared,
    config: gl.constexpr,
):
    """Start the partitions, and wait for all.

    find_tile: `query_tile` or `key_tile`. shared: state of all partitions, including `work`.
    """
    if config.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (find_tile, consume_tile, shared, 0, config)),
                (_consume, (find_tile, consume_tile, shared, 1, config)),
                (_produce, (find_tile, load_tile, shared, config)),
            ],
            [4, 1],
            [config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (find_tile, consume_tile, shared, 0, config)),
                (_consume, (find_tile, consume_tile, shared, 1, config)),
                (_consume, (find_tile, consume_tile, shared, 2, config)),
                (_produce, (find_tile, load_tile, shared, config)),
            ],
            [4, 4, 1],
            [config.CONSUMER_REGISTERS, config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(find_tile: gl.constexpr, load_tile: gl.constexpr, shared, config: gl.constexpr):
    """Producer loop over this program's tiles.

    load_tile(shared, tile, i, n, scrubs, config) loads the i-th existing tile, with first block n,
    and returns n and scrubs for the next, see `load_until`.
    """
    i = 0
    n = 0
    scrubs = 0
    for number in range(number_of_tiles(shared.work)):
        tile = find_tile(number, shared.work, config)
        if shared.work.mask.cu_q_ptr is None or tile.first < tile.length:
            n, scrubs = load_tile(shared, tile, i, n, scrubs, config)
            i += 1


@gluon.jit
def _consume(
    find_tile: gl.constexpr,
    consume_tile: gl.constexpr,
    shared,
    CONSUMER: gl.constexpr,
    config: gl.constexpr,
):
    """Loop of consumer CONSUMER over this program's tiles; consume_tile as in `_produce`."""
    i = 0
    n = 0
    for number in range(number_of_tiles(shared.work)):
        tile = find_tile(number, shared.work, config)
        if shared.work.mask.cu_q_ptr is None or tile.first < tile.length:
            n = consume_tile(shared, tile, i, n, CONSUMER, config)
            i += 1
    tma.store_wait(pendings=0)
