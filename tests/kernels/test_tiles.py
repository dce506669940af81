"""The tile tables: every kernel has a tile for every size, and lookups find it."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from fastattn import dispatch
from fastattn.kernels.hopper import tile_table
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.ops.call import by_shipped_shapes

# What `bench/results_table.py --add` adds to a row that was measured.
MEASURED = {"ms", "gpu", "torch", "triton", "date", "command"}
NUMBERS = {"element_size", "BLOCK_D", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}
CHOICES = {"apart", "descriptors", "sum_parts"}
AMD = {"waves_per_eu", "matrix_instr_nonkdim"}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs rows of kernels for 2-byte elements on this device, until the test ends."""
    monkeypatch.setattr(tiles, "_installed", {})

    def install(*rows: dict) -> None:
        given = [{"calls": "plain", "element_size": 2, "BLOCK_D": 64, **row} for row in rows]
        tiles.install(given, tiles.current_device())

    yield install
    tiles.install([], tiles.current_device())


@pytest.mark.parametrize("name", tiles.TABLES)
def test_rows_are_well_formed(name: str, install: Callable[..., None]) -> None:
    rows = tiles.table(name)
    keys = {(r["kernel"], r["element_size"], r["BLOCK_D"]) for r in rows}
    assert len(keys) == len(rows), "two rows for one kernel, element size and head dim"
    install(*rows)
    for row in rows:
        measured = MEASURED if row.get("source") == "measured" else set()
        beside = {"kernel", "source", "ms_full"} if measured else {"kernel", "source"}
        choices = CHOICES | AMD if name.startswith("gfx") else CHOICES
        assert set(row) - beside - choices == NUMBERS | measured
        # The warps of decoding share a row, four threads of each.
        of_decoding = row["kernel"] in ("decode", "decode_shared")
        assert row.get("sum_parts", 1) in (1, 4, 16 if of_decoding else 4)
        assert name == "interpreter" or row["source"] in ("modelled", "measured")


def test_every_case_has_a_tile_of_a_row() -> None:
    """And the widest heads where they are served."""
    kernels = tiles.KINDS + tiles.HEAVY + tiles.MASKED + tiles.BIAS + tiles.SCORES
    cases = [*itertools.product(tiles.TABLES, kernels, (2, 4), (16, 32, 64, 128, 256))]
    wide = ("sm_80", "sm_86", "sm_90", "sm_100")
    cases += itertools.product(wide, tiles.KINDS + tiles.HEAVY, (2,), (dispatch.MAX_HEAD_DIM,))
    for name, kernel, element_size, BLOCK_D in cases:
        tile = tiles.tile_of(name, kernel, element_size, BLOCK_D)
        rows = [row for row in tiles.table(name) if row["element_size"] == element_size]
        of_row = {(row["BLOCK_M"], row["BLOCK_N"]) for row in rows if row["BLOCK_D"] >= BLOCK_D}
        assert (tile.BLOCK_M, tile.BLOCK_N) in of_row, (name, kernel, element_size, BLOCK_D)


def test_lookup_takes_the_next_wider_row_and_what_it_says() -> None:
    """Masked calls have rows of their own where there are any; a row says what a tile lacks."""
    rows = {(r["kernel"], r["element_size"], r["BLOCK_D"]): r for r in tiles.table("sm_90")}
    for BLOCK_D, served_by in ((16, 64), (128, 128), (256, 256)):
        tile = tiles.tile_of("sm_90", "forward", 2, BLOCK_D)
        row = rows["forward", 2, served_by]
        assert (row["BLOCK_M"], row["BLOCK_N"]) == (tile.BLOCK_M, tile.BLOCK_N)
    for kernel, element_size, differ in (("backward_dq", 2, True), ("forward", 4, False)):
        plain, masked = (
            tiles.tile_of("sm_90", kernel + x, element_size, 64) for x in ("", "_masked")
        )
        assert (masked != plain) == differ
    assert tiles.tile_of("sm_90", "forward", 2, 128).sum_parts == 4
    other = tiles.tile_of("sm_90", "backward_dq", 2, 128)
    assert (other.descriptors, other.sum_parts) == (False, 1)


def test_architectures_without_a_table_borrow_one() -> None:
    borrowed = {
        "interpreter": "interpreter", "sm_75": "sm_80", "sm_80": "sm_80", "sm_87": "sm_86",
        "sm_89": "sm_86", "sm_90": "sm_90", "sm_103": "sm_100", "sm_120": "sm_86",
        "gfx942": "gfx942", "gfx90a": "gfx942", "gfx950": "gfx942", "gfx1100": "gfx1100",
        "gfx1201": "gfx1100",
    }  # fmt: skip
    assert {arch: tiles.table_for(arch) for arch in borrowed} == borrowed


def test_forced_tiles_end_with_their_block() -> None:
    """And stay where they do not compile: else the launch would be tried for ever."""
    usual, of_dq = tiles.lookup("forward", 2, 64), tiles.lookup("backward_dq", 2, 64)
    forced = TileConfig(16, 16)
    with tiles.forced(forward=forced):
        assert (tiles.lookup("forward", 2, 64), tiles.lookup("backward_dq", 2, 64)) == (
            forced,
            of_dq,
        )
        with tiles.forced(forward=TileConfig(32, 16)):
            assert tiles.lookup("forward", 2, 64) == TileConfig(32, 16)
        assert tiles.lookup("forward", 2, 64) == forced
        assert not tiles.make_smaller(forced)
    assert tiles.lookup("forward", 2, 64) == usual
    try:
        assert tiles.make_smaller(usual)
    finally:
        tiles.forget_smaller()


@pytest.mark.parametrize("kernel", ["dq", "dkv", "one_pass"])
def test_a_shape_of_a_hopper_kernel_is_forced_for_its_head_dim_and_plain_calls(kernel: str) -> None:
    usual = tile_table.backward_config(kernel, 64, False, False)
    other = usual._replace(STAGES=4)
    with tiles.forced(**{f"hopper_{kernel}": other}):
        assert tile_table.backward_config(kernel, 64, False, False) == other
        for D, early, softcap in ((128, False, False), (64, True, False), (64, False, True)):
            assert tile_table.backward_config(kernel, D, early, softcap).STAGES == 2
        assert tile_table.forward_config(64, False).STAGES == 4
    assert tile_table.backward_config(kernel, 64, False, False) == usual


OTHER = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 2}


def test_installed_tiles_take_the_place_of_the_tables(install: Callable[..., None]) -> None:
    arch, key = tiles.current_arch(), tiles.device_key(torch.bfloat16)
    usual = tiles.lookup("forward", 2, 64)
    install({"kernel": "forward", **OTHER}, {"kernel": "forward", **OTHER, "calls": "masked"})
    for kind, BLOCK_D in (("plain", 64), ("plain", 32), ("masked", 64)):
        assert tiles.lookup("forward", 2, BLOCK_D, kind) == TileConfig(16, 32, 2)
    assert tiles.lookup("forward", 4, 64) == tiles.tile_of(arch, "forward", 4, 64)
    assert tiles.lookup("forward", 2, 512) == tiles.tile_of(arch, "forward", 2, 512)
    assert tiles.tile_of(arch, "forward", 2, 64) == usual, "the table stays as it is"
    device = tiles.current_device()
    assert tiles.row_of(arch, "forward", 2, 64, device)["source"] == "tuned"
    assert tiles.row_of(arch, "forward", 2, 64, device + 1) == tiles.row_of(arch, "forward", 2, 64)
    assert tiles.device_key(torch.bfloat16) != key, "known launches have other tiles"
    with tiles.forced(forward=usual):
        assert tiles.lookup("forward", 2, 64) == usual
    install({"kernel": "forward", **OTHER}, {"kernel": "backward_dq", **OTHER, "BLOCK_M": 64})
    assert tiles.make_smaller(tiles.lookup("forward", 2, 64)), "taken back, as of no compiler"
    assert tiles.lookup("forward", 2, 64) == usual
    assert tiles.lookup("backward_dq", 2, 64).BLOCK_M == 64
    install()
    assert tiles.lookup("backward_dq", 2, 64) == tiles.tile_of(arch, "backward_dq", 2, 64)


def test_installed_shapes_of_hopper_kernels(install: Callable[..., None]) -> None:
    usual = tile_table.forward_config(64, False)
    install({"kernel": "hopper_forward", "BLOCK": 64, "STAGES": 2, "D": 64})
    assert tile_table.forward_config(64, False) == tile_table.HopperConfig(64, 64, 2)
    assert tile_table.forward_config(64, True).STAGES == 4
    assert tile_table.forward_config(128, False).BLOCK == 128
    with tiles.forced(hopper_forward=usual):
        assert tile_table.forward_config(64, False) == usual

    def launch() -> tile_table.HopperConfig:
        config = tile_table.forward_config(64, False)
        if config != usual:
            raise triton.TritonError("out of registers")
        return config

    assert by_shipped_shapes(launch) == usual and not tiles.take_back_hopper()
    assert tile_table.forward_config(64, False) == usual


SHAPE = {**OTHER, "D": 64, "BLOCK": 64, "STAGES": 2}


@pytest.mark.parametrize(
    ("kernel", "changed"),
    [
        *[("foreward", {}), ("decode", {"calls": "masked"})],
        *[("forward", {x: None}) for x in ("BLOCK_M", "BLOCK_N", "num_warps")],
        *[("hopper_forward", {x: None}) for x in ("D", "BLOCK", "STAGES")],
        *[("forward", {"BLOCK_M": x}) for x in (48, "16", 2**40)],
        *[("forward", {"BLOCK_N": x}) for x in (8, 16.0)],
        *[("forward", {"num_warps": x}) for x in (64, True)],
        *[("forward", {x: y}) for x, y in {"num_stages": 2**40, "sum_parts": 3,
                                           "descriptors": "yes", "BLOCK_D": 48}.items()],
        ("hopper_forward", {"CONSUMERS": 5}),
        *[("hopper_dq", {x: y}) for x, y in {"CONSUMERS": 3, "BLOCK": 2**40, "STAGES": 3,
                                             "CONSUMER_REGISTERS": 241, "D": 128}.items()],
    ],
)  # fmt: skip
def test_what_is_no_tile_is_not_installed(
    install: Callable[..., None], kernel: str, changed: dict
) -> None:
    row = {"kernel": kernel, **(SHAPE if "hopper" in kernel else OTHER), **changed}
    row = {name: x for name, x in row.items() if x is not None}
    with pytest.raises(ValueError, match=r"there is no kernel|this is no tile"):
        install({"kernel": "backward_dq", **OTHER}, row)
    assert tiles.lookup("backward_dq", 2, 64) != TileConfig(16, 32, 2)
