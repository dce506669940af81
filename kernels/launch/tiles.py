"""Tile choices as data: tuning/<arch>.json, looked up by kernel, element size and head dim.

Calls tune nothing, so a first call compiles one kernel and results are reproducible. `install`
replaces the table's tiles by tiles tuned on a device before.
"""

import json
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

import torch
import triton

KERNELS = ("forward", "backward_dq", "backward_dkv", "backward_one_pass")
# Kinds of rows: one per kernel, decoding of one new token or several, and one for all kernels on
# calls with relative keys and for the gradients of relative keys and biases, which need more
# registers.
KINDS = (*KERNELS, "decode", "decode_chunk", "relative")
# One for each of these kernels on calls with a bias for each score and more.
HEAVY = tuple(f"{kernel}_heavy" for kernel in KERNELS)
# For calls with more than causal order, lengths and sinks; default: the kernel's row.
MASKED = tuple(f"{kernel}_masked" for kernel in KERNELS)
# For calls with a bias by TMA, and for calls with a bias by distance, dropout, a dense mask or a
# user's function; the first default to the second, and these to heavy.
BIAS = tuple(f"{kernel}_bias" for kernel in KERNELS)
SCORES = tuple(f"{kernel}_scores" for kernel in KERNELS)
# For decoding with one load for keys and values, and from pages of codes.
CACHES = ("decode_shared", "decode_chunk_shared", "decode_codes", "decode_chunk_codes")
# Kernels with shapes in `hopper.tile_table`; others may be forced like tiles.
HOPPER = ("hopper_forward", "hopper_dq", "hopper_dkv", "hopper_one_pass", "hopper_fp8")
HOPPER_FORWARD = ("hopper_forward", "hopper_fp8")
# A number and a bool to force and install like tiles: see `programs_at_once` and `one_launch`.
SPLITS, ONE_LAUNCH = "splits", "one_launch"
TABLES = ("interpreter", "sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx1100")


@dataclass(frozen=True)
class TileConfig:
    """Rows of a query tile, rows of a key tile, warps of a program, stages of the load pipeline.

    descriptors: TMA loads the blocks of the loop. sum_parts: see `softmax.in_parts`. apart: dK and
    dV have a launch each, with half of the accumulators; one pass computes dQ with dK.
    waves_per_eu, matrix_instr_nonkdim: for AMD's compiler: waves that share a SIMD and its
    registers, and rows of a matrix instruction. 0: its own choice.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 1
    descriptors: bool = False
    sum_parts: int = 1
    apart: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0

    @property
    def compiler_options(self) -> dict[str, int]:
        """Options for Triton; NVIDIA's compiler refuses AMD's options, even as 0."""
        amd = {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        chosen = {name: number for name, number in amd.items() if number}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **chosen}


_FIELDS = tuple(field.name for field in fields(TileConfig))
# Fixed once triton is imported; the knob reads the environment at every access.
_INTERPRETING = bool(triton.knobs.runtime.interpret)
_forced: dict[str, Any] = {}
# Results of lookups by kind, element size and head dim, and replacements of tiles that a compiler
# refused.
_looked_up: dict[tuple[str, int, int], TileConfig] = {}
_smaller: dict[tuple[str, int, int], TileConfig] = {}
_SMALLEST = 16
TileRow = Mapping[str, Any]
# By device, replacements of rows of its table, and the number of changes.
_installed: dict[int, tuple[TileRow, ...]] = {}
_installs = 0
# By device, element size and head dim; see `programs_at_once` and `one_launch`.
_programs: dict[tuple[int, int, int], tuple[int, bool]] = {}
_CLASSES = (64, 128, 256)
# Valid values of an installed row's fields. A program has at most 1024 threads; 256 x 256 scores
# fill the registers of a multiprocessor. A row needs all required fields; setmaxnreg takes
# multiples of 8.
_SIDES, _FLAGS, _SIZES = (16, 32, 64, 128, 256), (False, True), (1, 2, 4)
_TILE_REQUIRED = ("BLOCK_M", "BLOCK_N", "num_warps")
_TILE_VALUES: Mapping[str, Container[Any]] = {
    **{"BLOCK_M": _SIDES, "BLOCK_N": _SIDES, "num_warps": (1, 2, 4, 8, 16)},
    **{"num_stages": range(1, 9), "descriptors": _FLAGS, "sum_parts": (1, 2, 4, 8, 16)},
    **{"apart": _FLAGS, "waves_per_eu": range(9), "matrix_instr_nonkdim": (0, 4, 16, 32)},
    **{"element_size": _SIZES, "BLOCK_D": (*_SIDES, 512)},
}
_HOPPER_REQUIRED = ("D", "BLOCK", "STAGES")
_HOPPER_VALUES: Mapping[str, Container[Any]] = {
    **{"D": _CLASSES, "BLOCK_D": _CLASSES, "element_size": _SIZES, "BLOCK": _SIDES},
    **{"STAGES": (1, 2, 4, 8), "SECOND_STAGES": (None, 1, 2, 4, 8), "SLACK": range(9)},
    **dict.fromkeys(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"), range(24, 257, 8)),
    **dict.fromkeys(("APART", "PING_PONG", "WIDE_WEIGHTS", "DQ_BY_TMA"), _FLAGS),
}
_PROGRAMS = range(1, 65)


def lookup(
    kernel: str,
    element_size: int,
    BLOCK_D: int,
    calls: Literal["plain", "masked", "bias", "scores", "heavy", "shared", "codes"] = "plain",
    invariant: bool = False,
) -> TileConfig:
    """The tile for `kernel` on the current device.

    Args:
        kernel: one of KINDS.
        element_size: bytes of an element of q.
        BLOCK_D: the larger padded head dim of q and v, a power of two.
        calls: "heavy" for the smaller tiles of HEAVY, or a name for MASKED, BIAS, SCORES, CACHES.
        invariant: the same tile for every kernel and call, as a row's sums depend on the keys of a
            tile and on the layout of its warps. Tuned tiles, which differ by kernel, are ignored.
    """
    if invariant:
        kernel, calls = "forward", "heavy"
    if kernel in _forced:
        forced: TileConfig = _forced[kernel]
        return forced
    if invariant:
        return tile_of(current_arch(), _kind(kernel, calls), element_size, BLOCK_D)
    row = (_kind(kernel, calls), element_size, BLOCK_D)
    device = current_device() if _installed else None
    tile = _smaller.get(row) or tile_of(current_arch(), *row, device)
    _looked_up[row] = tile
    return tile


def _kind(kernel: str, calls: str) -> str:
    return kernel if calls == "plain" else f"{kernel}_{calls}"


def install(rows: Iterable[TileRow], device: int, splits: Iterable[TileRow] = ()) -> None:
    """On this device, use these rows instead of the table's rows with the same keys.

    They replace the rows of an earlier call.

    Args:
        rows: "kernel", "calls" as in `lookup`, "element_size", "BLOCK_D" and the fields of the
            configuration.
        device: as in `current_device`.
        splits: "element_size", "BLOCK_D", "programs" for `programs_at_once`, and "one_launch" (if
            absent False).

    Raises:
        ValueError: a row is invalid; nothing is installed.
    """
    installed = []
    for row in rows:
        kind = _kind(row["kernel"], row.get("calls", "plain"))
        if kind not in {*KINDS, *HEAVY, *MASKED, *BIAS, *SCORES, *CACHES, *HOPPER}:
            raise ValueError(f"there is no kernel {kind}: {dict(row)}")
        _check_row(kind, row)
        installed.append({**row, "kernel": kind, "source": "tuned"})
    programs = {
        (device, row["element_size"], row["BLOCK_D"]): (row["programs"], row.get(ONE_LAUNCH, False))
        for row in splits
    }
    if not all(_takes(_PROGRAMS, x) and _takes(_FLAGS, one) for x, one in programs.values()):
        raise ValueError(f"these are no numbers of programs: {list(programs.values())}")
    for key in [key for key in _programs if key[0] == device]:
        del _programs[key]
    _programs.update(programs)
    _replace(device, installed)


def _check_row(kind: str, row: TileRow) -> None:
    """Raise ValueError if no kernel of this kind supports a row's numbers."""
    hopper = kind in HOPPER
    required = _HOPPER_REQUIRED if hopper else _TILE_REQUIRED
    allowed = dict(_HOPPER_VALUES if hopper else _TILE_VALUES)
    if hopper:
        allowed["CONSUMERS"] = (2, 3) if kind in HOPPER_FORWARD else (2,)
    for field in (*required, *allowed):
        if (field in required or field in row) and not _takes(allowed[field], row.get(field)):
            value = row.get(field)
            raise ValueError(f"this is no tile: {field} is {value!r}, of {allowed[field]}: {row}")
    if hopper and row["D"] != row["BLOCK_D"]:
        raise ValueError(f"this is no tile: D is not BLOCK_D: {row}")


def _takes(allowed: Container[Any], value: Any) -> bool:
    """Whether a value is allowed; 16.0 and True are not, though equal to 16 and 1."""
    if isinstance(value, bool) != (allowed is _FLAGS):
        return False
    return isinstance(value, int | None) and value in allowed


def make_smaller(tile: TileConfig) -> bool:
    """Replace a tile that does not compile by a smaller one; return whether there is one.

    An installed tile is replaced by the table's; then by one with one stage, then with half of the
    longer side. A forced tile stays, and the caller raises.
    """
    if tile in _forced.values():
        return False
    if _take_back(lambda row: row["kernel"] not in HOPPER and _config(row) == tile):
        return True
    rows = [row for row, tile_of_row in _looked_up.items() if tile_of_row == tile]
    longer = "BLOCK_M" if tile.BLOCK_M > tile.BLOCK_N else "BLOCK_N"
    if tile.num_stages > 1:
        smaller = replace(tile, num_stages=1, descriptors=False)
    else:
        smaller = replace(tile, **{longer: getattr(tile, longer) // 2})
    if not rows or getattr(smaller, longer) < _SMALLEST:
        return False
    _smaller.update(dict.fromkeys(rows, smaller))
    return True


def take_back_hopper() -> bool:
    """Remove installed shapes of HOPPER that do not compile; return whether there were any."""
    return _take_back(lambda row: row["kernel"] in HOPPER)


def _take_back(refused: Callable[[TileRow], bool]) -> bool:
    """Remove refused rows from the installed ones; return whether there were any."""
    device = current_device()
    rows = _installed.get(device, ())
    kept = [row for row in rows if not refused(row)]
    if len(kept) < len(rows):
        _replace(device, kept)
    return len(kept) < len(rows)


def _replace(device: int, rows: Iterable[TileRow]) -> None:
    global _installs
    _installed[device] = tuple(rows)
    _installs += 1
    row_of.cache_clear()
    tile_of.cache_clear()


def forget_smaller() -> None:
    """Use the tables' own tiles again."""
    _smaller.clear()


def other(kernel: str, D: int) -> Any:
    """The `HopperConfig` that replaces the table's for one of HOPPER, or None."""
    config = _forced.get(kernel)
    return config if config is not None and config.D == D else None


def other_row(kernel: str, D: int) -> TileRow | None:
    """The fields of the installed `HopperConfig` for one of HOPPER, or None."""
    for row in _installed.get(current_device(), ()) if _installed else ():
        if row["kernel"] == kernel and row["BLOCK_D"] == D:
            return row
    return None


def programs_at_once(element_size: int, BLOCK_D: int) -> int | None:
    """The tuned number of decoding programs per multiprocessor, or None.

    element_size: bytes of an element of the cache.
    """
    if SPLITS in _forced:
        programs: int = _forced[SPLITS]
        return programs
    row = _split_row(element_size, BLOCK_D)
    return None if row is None else row[0]


def one_launch(element_size: int, BLOCK_D: int) -> bool:
    """Whether decoding merges parts of the keys in its own launch where it may, by tuning."""
    if ONE_LAUNCH in _forced:
        return bool(_forced[ONE_LAUNCH])
    row = _split_row(element_size, BLOCK_D)
    return row is not None and row[1]


def _split_row(element_size: int, BLOCK_D: int) -> tuple[int, bool] | None:
    if not _programs:
        return None
    width = next((D for D in _CLASSES if BLOCK_D <= D), BLOCK_D)
    return _programs.get((current_device(), element_size, width))


@contextmanager
def forced(**configs: Any) -> Iterator[None]:
    """Use these tiles, by kernel name, inside the block: for tests and measurements.

    configs: a `TileConfig` for one of KINDS, a `HopperConfig` for one of HOPPER, a number for
        SPLITS, a bool for ONE_LAUNCH.
    """
    assert set(configs) <= {*KINDS, *HOPPER, SPLITS, ONE_LAUNCH}, configs
    saved = dict(_forced)
    _forced.update(configs)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(saved)


def device_key(dtype: torch.dtype) -> Hashable:
    """Key of the settings that kernels of a dtype depend on."""
    device = -1 if _INTERPRETING else triton.runtime.driver.active.get_current_device()
    changed: Hashable = _installs
    if _forced or _smaller:
        changed = (*_forced.items(), *_smaller.items(), _installs)
    return device, changed, dtype == torch.float32 and tf32()


def tf32() -> bool:
    """Whether torch's own matmul of fp32 may use TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@cache
def multiprocessors(device: torch.device) -> int:
    """The device's number of multiprocessors; a few if it is not a GPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current_device() -> int:
    """Index of the current GPU; -1: the interpreter."""
    return -1 if _INTERPRETING else int(triton.runtime.driver.active.get_current_device())


def current_arch() -> str:
    """Name of the device's architecture: "sm_90", "gfx942", or "interpreter"."""
    if _INTERPRETING:
        return "interpreter"
    driver = triton.runtime.driver.active
    return _arch(driver, driver.get_current_device())


@cache
def _arch(driver: Any, device: int) -> str:
    target = driver.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]


def table_for(arch: str) -> str:
    """The table for `arch`: its own, or the nearest older NVIDIA generation's, or CDNA's or RDNA's.

    sm_89 and the consumer Blackwell chips (sm_120) have 99 KB of shared memory, like sm_86.
    """
    if arch in TABLES:
        return arch
    if not arch.startswith("sm_"):
        return "gfx1100" if arch.startswith("gfx1") else "gfx942"
    number = int(re.sub(r"\D", "", arch))
    if number >= 120 or number in (87, 89):
        return "sm_86"
    older = [int(name[3:]) for name in TABLES if name.startswith("sm_")]
    return f"sm_{max((n for n in older if n <= number), default=min(older))}"


@cache
def table(name: str) -> tuple[dict[str, Any], ...]:
    """Rows of tuning/<name>.json."""
    text = resources.files(__package__).joinpath("tuning", f"{name}.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


@cache
def tile_of(
    arch: str, kernel: str, element_size: int, BLOCK_D: int, device: int | None = None
) -> TileConfig:
    """The tile of an architecture for `kernel`, in KINDS or the groups above; see `lookup`.

    device: index of a device, to use its installed tiles.
    """
    return _config(row_of(arch, kernel, element_size, BLOCK_D, device))


@cache
def row_of(
    arch: str, kernel: str, element_size: int, BLOCK_D: int, device: int | None = None
) -> TileRow:
    """The row of `tile_of`. "source": "modelled", "measured" or "tuned"."""
    name = table_for(arch)
    by_key: dict[tuple[Any, ...], TileRow]
    by_key = {(r["kernel"], r["element_size"], r["BLOCK_D"]): r for r in table(name)}
    if device is not None:
        rows = _installed.get(device, ())
        by_key |= {(r["kernel"], r["element_size"], r["BLOCK_D"]): r for r in rows}
    fitting = {
        key[2]: row
        for key, row in by_key.items()
        if key[:2] == (kernel, element_size) and key[2] >= BLOCK_D
    }
    if fitting:
        return fitting[min(fitting)]
    if kernel in MASKED + CACHES:
        return row_of(arch, kernel.rpartition("_")[0], element_size, BLOCK_D, device)
    if kernel in BIAS + SCORES:
        next_class = "scores" if kernel in BIAS else "heavy"
        kind = f"{kernel.rpartition('_')[0]}_{next_class}"
        return row_of(arch, kind, element_size, BLOCK_D, device)
    raise AssertionError(
        f"no {kernel} tile for {element_size}-byte elements, D {BLOCK_D} in {name}"
    )


def _config(row: TileRow) -> TileConfig:
    return TileConfig(**{field: row[field] for field in _FIELDS if field in row})
