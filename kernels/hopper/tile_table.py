"""Tile shapes, stages and registers by head dim: without spills, within shared memory."""

from typing import Any, NamedTuple

from ..launch import tiles

HEAD_DIMS = (64, 128, 256)  # columns of tiles; other head dims are padded with 0
# dK and dV of 64 keys and 256 columns exceed the registers of a warpgroup: a launch each.
APART_HEAD_DIM = 256


class HopperConfig(NamedTuple):
    """Configuration of a kernel, its only constexpr.

    D: columns of the tiles of q and k, D_V: of v and o, if different. COLUMNS: head dims of q and
    v, if smaller than the tiles, which TMA fills with zeros. BLOCK: rows of the tiles in the rings.
    STAGES: of each ring, a power of two; SECOND_STAGES: of V's or dO's ring, if different.
    CONSUMERS: warpgroups of 64 rows each. Registers are per thread; three warpgroups share 64512.
    APART: outputs have their own shared memory, so that the next tile need not wait for them.
    PING_PONG: consumers of forward issue their products in turn. WIDE_WEIGHTS: weights of forward
    wait for their product in fp32, as always in 8 bits; else packed in pairs. DQ_BY_TMA: TMA adds
    dQ of one pass to its sum; else the threads do. SLACK: O of forward is rescaled only if a score
    is 2^SLACK times above the weights' reference; 0: in every block, as always in 8 bits. MASK_MOD,
    SCORE_MOD, SCORE_GRAD: the user's functions, which a kernel adds.
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
    MASK_MOD: Any = None
    SCORE_MOD: Any = None
    SCORE_GRAD: Any = None

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
    """Columns of the tiles for this head dim: the least of HEAD_DIMS that holds it."""
    return next(columns for columns in HEAD_DIMS if columns >= D)


def _of_heads(config: HopperConfig, D: int, D_v: int) -> HopperConfig:
    """Adapt the configuration of D columns to head dims D and D_v."""
    if tile_columns(D_v) != config.D:
        # Outputs narrower than q do not fit its tile's layout.
        config = config._replace(D_V=tile_columns(D_v), APART=True)
    exact = (config.D, config.value_tile) == (D, D_v)
    return config if exact else config._replace(COLUMNS=(D, D_v))


def _registers(early: bool) -> tuple[int, int]:
    """Producer and consumer registers; early: the producer also zeroes rows past the last one."""
    return (232, 40) if early else (240, 24)


def forward_config(
    D: int, early: bool, placed: bool = False, D_v: int | None = None, dropped: bool = False
) -> HopperConfig:
    """Configuration of forward for head dims D and D_v (default D).

    early: a batch row's keys may end before the keys in memory. placed: queries and keys have
    explicit positions, which are in order within tiles of 128 rows. dropped: random numbers or
    a user's function of scores take registers.
    """
    registers = _registers(early)
    tile, D_v = tile_columns(D), D if D_v is None else D_v
    config = _other("forward", tile, early or placed or dropped or tile != tile_columns(D_v))
    if config is None:
        config = {
            64: HopperConfig(tile, 128, 4, 2, *registers, WIDE_WEIGHTS=early or placed),
            128: HopperConfig(tile, 128, 2, 2, *registers, WIDE_WEIGHTS=placed and not early),
            # Another 64 KB for the output do not fit.
            256: HopperConfig(tile, 64, 2, 2, *registers, APART=False),
        }[tile]
        if dropped and (tile == 128 or early or placed):
            config = config._replace(BLOCK=64)
    return _of_heads(config, D, D_v)


def fp8_config(D: int, early: bool) -> HopperConfig:
    """Configuration of FP8 forward."""
    # Weights wait for their product in 32 bits: 256 output columns leave registers for blocks of
    # only 64 keys.
    if (other := _other("fp8", D, early)) is not None:
        return other
    return HopperConfig(D, 64 if D == 256 else 128, 4, 2, *_registers(early))


def backward_config(
    kernel: str,
    D: int,
    early: bool,
    scored: bool,
    placed: bool = False,
    D_v: int | None = None,
    called: bool = False,
) -> HopperConfig:
    """Configuration of a backward kernel for head dims D and D_v (default D).

    kernel: "dq", with rings of K and V, "dkv", with rings of Q and dO, "dk" and "dv" for
    APART_HEAD_DIM, or "one_pass", "dkv" with dQ, whose products have at least 64 queries.

    early: rows in the rings (for "one_pass" the keys) may end before the rows in memory. scored:
    scores need registers, such as a softcap's derivative. Both reduce the block size if registers
    are short. placed: as in `forward_config`. called: scores call a user's function, which may take
    more.
    """
    tile, D_v = tile_columns(D), D if D_v is None else D_v
    config = _other(kernel, tile, early or scored or placed or tile != tile_columns(D_v))
    if config is None:
        config = _backward_tile(kernel, tile, early, scored)
    if called:
        config = config._replace(BLOCK=32, STAGES=4)
    return _of_heads(config, D, D_v)


def _backward_tile(kernel: str, D: int, early: bool, scored: bool) -> HopperConfig:
    registers = _registers(early)
    if D == APART_HEAD_DIM:
        # 64 rows are 32 KB: with four resident tiles three stages fit, with two four.
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
    """Installed configuration that replaces this table's, for calls with enough registers."""
    if economical:
        return None
    forced: HopperConfig | None = tiles.other(f"hopper_{kernel}", D)
    row = tiles.other_row(f"hopper_{kernel}", D)
    if forced is not None or row is None:
        return forced
    return HopperConfig(**{field: row[field] for field in HopperConfig._fields if field in row})
