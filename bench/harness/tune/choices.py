"""Choices by timing: the shipped and other candidates, the calls, the row to store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...kernels.hopper.tile_table import HopperConfig
from ...kernels.launch.decode_splits import PROGRAMS_AT_ONCE
from ...kernels.launch.tiles import HOPPER_FORWARD, SPLITS, TileConfig
from ..cases.case import Case
from ..cases.registry import ONE_PASS, PORTABLE, named
from .candidates import (
    SIZES,
    Shape,
    TableEntry,
    candidates,
    hopper_candidates,
    hopper_shipped,
    names_of,
)

# Tiles of 128 queries per multiprocessor: at least, and less than. As in `dispatch`.
WAVES = {"few": (0, 1), "some": (1, 4), "many": (4, math.inf)}
_QUERIES = 128
# Numbers of programs per multiprocessor other than the shipped one.
_PROGRAMS = (1, 3, 4)


@dataclass(frozen=True)
class Candidate:
    """A candidate for computing a call.

    Args:
        name: short, for readers.
        implementation: of `cases.registry.IMPLEMENTATIONS`.
        forced: arguments of `tiles.forced`: a tile or Hopper shape by kernel, or a number.
        row: its fields of a stored row.
        verified: backends and families that must be right before it is timed.
    """

    name: str
    implementation: str
    forced: dict[str, TileConfig | HopperConfig | int] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    verified: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    """Candidates and the calls that decide between them.

    Args:
        kind: of findings, in `tuned.findings.KEYS`.
        key: the row's key.
        cases: calls to time; the first has twice the weight of the second, since a causal mask
            halves the pairs.
        candidates: the shipped one comes first.
    """

    kind: str
    key: dict[str, Any]
    cases: tuple[Case, ...]
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """Name for readers; unique in a plan."""
        return f"{self.kind}: " + " ".join(_words(self.key))

    @property
    def shipped(self) -> Candidate:
        return self.candidates[0]

    @property
    def size(self) -> tuple[str, int]:
        """dtype and head dim of the calls."""
        return self.cases[0].dtype, self.cases[0].D


def _words(key: dict[str, Any]) -> Iterable[str]:
    for name, value in key.items():
        if name == "element_size":
            yield f"{value} bytes"
        elif name == "causal":
            yield "causal" if value else "full"
        else:
            yield f"D {value}" if name in ("BLOCK_D", "head_dim") else str(value)


def tile_candidate(kernel: str, calls: str, tile: TileConfig) -> Candidate:
    """Our kernels with this tile for one kernel, in calls of a class."""
    implementation = ONE_PASS if kernel == "backward_one_pass" else PORTABLE
    verified = (("triton", _family(kernel) if calls == "plain" else calls),)
    return Candidate(names_of(tile), implementation, {kernel: tile}, asdict(tile), verified)


def tile_choice(
    entry: TableEntry, arch: str, shared_bytes: int, shape: Shape | None = None
) -> Choice:
    """The tile of a table entry, on calls of a shape."""
    tried = dict.fromkeys([entry.shipped(arch), *candidates(entry, shared_bytes, arch)])
    made = (tile_candidate(entry.kernel, entry.calls, tile) for tile in tried)
    return Choice("tiles", _key(entry), entry.cases(shape), tuple(made))


def _key(entry: TableEntry) -> dict[str, Any]:
    sizes = {"element_size": entry.element_size, "BLOCK_D": entry.BLOCK_D}
    return {"kernel": entry.kernel, "calls": entry.calls, **sizes}


def _family(kernel: str) -> str:
    """A kernel's family in `fastattn verify`."""
    if kernel.startswith("decode"):
        return "decode"
    if "one_pass" in kernel:
        return "one-pass"
    if kernel == "hopper_fp8":
        return "fp8"
    return "forward" if "forward" in kernel else "backward"


def hopper_choice(kernel: str, shape: Shape) -> Choice | None:
    """The shape of one of `tiles.HOPPER`, or None without this head dim."""
    shipped = hopper_shipped(kernel, shape.D)
    if shipped is None or shape.dtype == "float32":
        return None
    extra = {"hopper_one_pass": "-one-pass", "hopper_fp8": "-fp8-packed"}.get(kernel, "")
    name = named("hopper") + extra
    verified = (("hopper", _family(kernel)),)
    made = (
        Candidate(names_of(config), name, {kernel: config}, config._asdict(), verified)
        for config in (shipped, *hopper_candidates(kernel, shape.D))
    )
    timed = TableEntry("forward" if kernel in HOPPER_FORWARD else "backward_dq", 2, shape.D)
    entry = TableEntry(kernel, 1 if kernel == "hopper_fp8" else 2, shape.D)
    return Choice("tiles", _key(entry), timed.cases(shape), tuple(made))


def backend_choice(
    direction: str, shape: Shape, causal: bool, waves: str, multiprocessors: int, hopper: bool
) -> Choice | None:
    """The backend for plain calls of a direction, "forward" or "training", and of a size.

    None: no call of the shape has that size.

    waves: one of WAVES. hopper: whether the Hopper kernels serve the calls and are their default.
    """
    B, T = call_size(shape, waves, multiprocessors)
    least, limit = WAVES[waves]
    if not least <= B * shape.H_q * -(-T // _QUERIES) / multiprocessors < limit:
        return None
    case = Case("forward", "forward", B, shape.H_q, shape.H_k, T, T, shape.D, causal)
    families = ["forward"]
    if direction == "training":
        case = replace(case, family="backward", direction="forward_backward")
        families.append("backward")
    key = {"direction": direction, "dtype": shape.dtype, "head_dim": shape.BLOCK_D}
    made = []
    for name in ("hopper", "triton", "torch")[not hopper :]:
        verified = tuple((name, family) for family in families if name != "torch")
        made.append(Candidate(name, named(name), {}, {"backend": name}, verified))
    cases = (replace(case, dtype=shape.dtype),)
    return Choice("backends", key | {"causal": causal, "waves": waves}, cases, tuple(made))


def call_size(shape: Shape, waves: str, multiprocessors: int) -> tuple[int, int]:
    """Batch and tokens of a call with about so many query tiles: few, some or many."""
    if waves == "many":
        T = shape.T
        enough = -(-8 * multiprocessors * _QUERIES // (T * shape.H_q))
        return max(1, 16384 // T, enough), T
    tiles = multiprocessors // 2 if waves == "few" else 2 * multiprocessors
    return 1, max(_QUERIES, tiles // shape.H_q * _QUERIES)


def pass_choice(backend: str, shape: Shape) -> Choice:
    """Gradients in two passes, or in one if atomics are permitted."""
    one = ONE_PASS if backend == "triton" else f"{named(backend)}-one-pass"
    made = (
        Candidate("one", one, {}, {"passes": "one"}, ((backend, "one-pass"),)),
        Candidate("two", named(backend), {}, {"passes": "two"}, ((backend, "backward"),)),
    )
    key = {"backend": backend, "dtype": shape.dtype, "head_dim": shape.BLOCK_D}
    entry = TableEntry("backward_dq", SIZES[shape.dtype], shape.BLOCK_D)
    return Choice("passes", key, entry.cases(shape), made)


def split_choice(shape: Shape) -> Choice:
    """Decoding programs per multiprocessor, for many rows and for one."""
    entry = TableEntry("decode", SIZES[shape.dtype], shape.BLOCK_D)
    (many,) = entry.cases(shape)
    decode = (("triton", "decode"),)
    made = (
        Candidate(f"{n} at once", PORTABLE, {SPLITS: n}, {"programs": n}, decode)
        for n in (PROGRAMS_AT_ONCE, *_PROGRAMS)
    )
    key = {"element_size": entry.element_size, "BLOCK_D": entry.BLOCK_D}
    return Choice("splits", key, (many, replace(many, B=1)), tuple(made))
