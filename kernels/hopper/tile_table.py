"""Tile shapes, stages and registers, by head dim: what compiles without spills and fits."""

from typing import NamedTuple

from ..launch import tiles

HEAD_DIMS = (64, 128, 256)  # columns of tiles; heads between them leave some at 0
# dK and dV of 64 keys and 256 columns fill the registers of a warpgroup twice: a launch each.
APART_HEAD_DIM = 256


class HopperConfig(NamedTuple):
    """One way to compile a kernel, and its one constexpr.

    D: columns of the tiles of q and k, D_V: of v and o, if others. COLUMNS: the head dims of q and
    of v where tiles have more, which TMA fills with zeros. BLOCK: rows of the tiles that go through
    the rings. STAGES: of each ring, a power of two; SECOND_STAGES: of that of V or dO, where it has
    others. CONSUMERS: warpgroups, of 64 rows each. Registers are those of a thread; three
    warpgroups share 64512. APART: outputs leave through shared memory of their own, so that the
    next tile need not wait for them. PING_PONG: consumers of forward issue their products in turn.
    WIDE_WEIGHTS: those of forward wait for their product in fp32, as always in 8 bits; else two
    share a register. DQ_BY_TMA: TMA adds dQ of one pass to its sum; else the threads do. SLACK: O
    of forward is rescaled where a score is 2^SLACK times above what weights are relative to; 0: in
    every block, as always in 8 bits.
    """

    D: int
    BLOCK: int
    STAGES: int
    CONSUMERS: int = 2
    CONSUMER_REGISTERS: int = 240
    PRODUCER_REGISTERS: int = 24
    APART: bool = True
    PING_PONG: bool = False
    WIDE_WEIGHTS: bool = False
    SECOND_STAGES: int | None = None
    DQ_BY_TMA: bool = True
    SLACK: int = 8
    D_V: int | None = None
    COLUMNS: tuple[int, int] | None = None

    @property
    def value_tile(self) -> int:
        """Columns of the tiles of v and o."""
        return self.D if self.D_V is None else self.D_V

    @property
    def columns(self) -> int:
        """Head dim of q and k."""
        return self.D if self.COLUMNS is None else self.COLUMNS[0]

    @property
    def value_columns(self) -> int:
        """Head dim of v and o."""
        return self.value_tile if self.COLUMNS is None else self.COLUMNS[1]


def tile_columns(D: int) -> int:
    """Columns of the tiles that hold this head dim: the least of HEAD_DIMS."""
    return next(columns for columns in HEAD_DIMS if columns >= D)


def _of_heads(config: HopperConfig, D: int, D_v: int) -> HopperConfig:
    """The configuration of D columns for heads of D and D_v."""
    if tile_columns(D_v) != config.D:
        # Outputs of fewer columns than q has do not leave through its tile.
        config = config._replace(D_V=tile_columns(D_v), APART=True)
    exact = (config.D, config.value_tile) == (D, D_v)
    return config if exact else config._replace(COLUMNS=(D, D_v))


def _registers(early: bool) -> tuple[int, int]:
    """early: the producer also zeroes the rows behind the last one, which takes registers."""
    return (232, 40) if early else (240, 24)


def forward_config(
    D: int, early: bool, placed: bool = False, D_v: int | None = None
) -> HopperConfig:
    """Tile of forward, for heads of D columns, in v D_v, by default as many.

    early: the keys of a batch row may end before those in memory. placed: queries and keys have
    positions of their own, which tiles of 128 rows keep in order.
    """
    registers = _registers(early)
    tile, D_v = tile_columns(D), D if D_v is None else D_v
    config = _other("forward", tile, early or placed or tile != tile_columns(D_v))
    if config is None:
        config = {
            64: HopperConfig(tile, 128, 4, 2, *registers, WIDE_WEIGHTS=early or placed),
            128: HopperConfig(tile, 128, 2, 2, *registers, WIDE_WEIGHTS=placed and not early),
            # 64 more KB for the output do not fit.
            256: HopperConfig(tile, 64, 2, 2, *registers, APART=False),
        }[tile]
    return _of_heads(config, D, D_v)


def fp8_config(D: int, early: bool) -> HopperConfig:
    """Tile of forward in 8 bits. Weights wait for their product in 32, so that 256 columns of
    output leave registers for blocks of 64 keys only.
    """
    if (other := _other("fp8", D, early)) is not None:
        return other
    return HopperConfig(D, 64 if D == 256 else 128, 4, 2, *_registers(early))


def backward_config(
    kernel: str, D: int, early: bool, scored: bool, placed: bool = False, D_v: int | None = None
) -> HopperConfig:
    """Tile of a kernel of backward, for heads of D columns, in v D_v, by default as many.

    kernel: "dq", whose rings carry K and V, "dkv", whose rings carry Q and dO, "dk" and "dv" of
    APART_HEAD_DIM, or "one_pass", which is "dkv" with dQ. Its products have 64 queries at least.

    early: what the rings carry may end before the rows in memory do, or for "one_pass" the keys.
    scored: scores take registers of their own, as capped ones do for their derivative. Either takes
    smaller blocks where registers are short. placed: as of `forward_config`.
    """
    tile, D_v = tile_columns(D), D if D_v is None else D_v
    config = _other(kernel, tile, early or scored or placed or tile != tile_columns(D_v))
    if config is None:
        config = _backward_tile(kernel, tile, early, scored)
    return _of_heads(config, D, D_v)


def _backward_tile(kernel: str, D: int, early: bool, scored: bool) -> HopperConfig:
    registers = _registers(early)
    if D == APART_HEAD_DIM:
        # 64 rows are 32 KB: four tiles that stay leave room for three, and two for four.
        if kernel == "dv":
            return HopperConfig(D, 64, 2, 2, *registers)
        block, stages = (32, 4) if scored else (64, 2)
        return HopperConfig(D, block, stages, 2, *registers, SECOND_STAGES=stages // 2)
    if kernel == "one_pass":
        return HopperConfig(D, 64, 2, 2, *registers)
    if kernel == "dkv":
        block, stages = (32, 4) if D == 128 and (early or scored) else (64, 2)
        return HopperConfig(D, block, stages, 2, *registers)
    small = scored or (D == 128 and early)
    return HopperConfig(D, 64 if small else 128, 2, 2, *registers)


def _other(kernel: str, D: int, economical: bool) -> HopperConfig | None:
    """Configuration that replaces this table's, for calls that need not save registers."""
    if economical:
        return None
    forced: HopperConfig | None = tiles.other(f"hopper_{kernel}", D)
    row = tiles.other_row(f"hopper_{kernel}", D)
    if forced is not None or row is None:
        return forced
    return HopperConfig(**{field: row[field] for field in HopperConfig._fields if field in row})
