"""Tile shapes, stages and registers, by head dim: what compiles without spills and fits."""

from dataclasses import dataclass

HEAD_DIMS = (64, 128, 256)
# dK and dV of 64 keys and 256 columns fill the registers of a warpgroup twice.
BACKWARD_HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class HopperConfig:
    """One way to compile a kernel.

    BLOCK: rows of the tiles that go through the rings. STAGES: of each ring, a power of two.
    CONSUMERS: warpgroups, of 64 rows each. Registers are those of a thread; three warpgroups
    share 64512. APART: outputs leave through shared memory of their own, so that the next tile
    need not wait for them.
    """

    BLOCK: int
    STAGES: int
    CONSUMERS: int = 2
    CONSUMER_REGISTERS: int = 240
    PRODUCER_REGISTERS: int = 24
    APART: bool = True


def forward_config(D: int, lengths: bool) -> HopperConfig:
    """lengths: the producer also zeroes the values behind the last key, which takes registers."""
    registers = (232, 40) if lengths else (240, 24)
    return {
        64: HopperConfig(128, 4, 2, *registers),
        128: HopperConfig(128, 2, 2, *registers),
        # 64 more KB for the output do not fit.
        256: HopperConfig(64, 2, 2, *registers, APART=False),
    }[D]


def backward_config(kernel: str, D: int, lengths: bool, softcap: bool) -> HopperConfig:
    """kernel: "dq", whose rings carry K and V, or "dkv", whose rings carry Q and dO.

    softcap: capped scores stay in registers for their derivative, which takes smaller blocks.
    """
    if kernel == "dkv":
        return HopperConfig(32, 4) if softcap and D == 128 else HopperConfig(64, 2)
    registers = (232, 40) if lengths else (240, 24)
    return {
        64: HopperConfig(64 if softcap else 128, 2, 2, *registers),
        # With lengths, too, a block of 128 keys does not fit the registers.
        128: HopperConfig(64 if lengths or softcap else 128, 2, 2, *registers),
    }[D]
