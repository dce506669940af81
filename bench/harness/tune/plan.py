"""The plan of a tuning run: choices by timing, the most important first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ...kernels.hopper.tile_table import HopperConfig
from ...kernels.launch import tiles
from ...kernels.launch.decode_splits import PROGRAMS_AT_ONCE
from ...kernels.launch.tiles import HOPPER_FORWARD, ONE_LAUNCH, SPLITS, TileConfig
from ..cases.case import Case, plain
from ..cases.registry import ONE_PASS, PORTABLE, named
from .candidates import (
    CALLS,
    NEW_TOKENS,
    SIZES,
    TMA,
    TOKENS,
    Shape,
    TableEntry,
    candidates,
    hopper_candidates,
    hopper_shipped,
    names_of,
    usual_shape,
)

# Tiles of 128 queries per multiprocessor: at least, and less than. As in `dispatch`.
WAVES = {"few": (0, 1), "some": (1, 4), "many": (4, math.inf)}
_QUERIES = 128
# Numbers of programs per multiprocessor other than the shipped one.
_PROGRAMS = (1, 3, 4)
# Shapes to tune by default.
USUAL_SHAPES = tuple(
    usual_shape(D, dtype)
    for dtype, dims in (("bfloat16", (128, 64, 256)), ("float32", (64, 128, 256)))
    for D in dims
)
_ATTENTION = ("forward", "backward_dkv", "backward_dq", "backward_one_pass")


class Gpu(NamedTuple):
    """Properties of a GPU that a plan depends on; hopper: whether Hopper kernels serve calls."""

    arch: str
    shared_bytes: int
    multiprocessors: int
    hopper: bool


@dataclass(frozen=True)
class Candidate:
    """A candidate for computing a call.

    forced: arguments of `tiles.forced`: a tile or Hopper shape by kernel, or a number. row: its
    fields of a stored row. verified: backends and families that must be right before it is timed.
    """

    name: str
    implementation: str
    forced: dict[str, TileConfig | HopperConfig | int] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    verified: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    """Candidates, the shipped one first, and the calls that decide between them.

    kind, key: of the row to store, see `tuned.findings.KEYS`. cases: the first has twice the weight
    of the second, since a causal mask halves the pairs.
    """

    kind: str
    key: dict[str, Any]
    cases: tuple[Case, ...]
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """Name for readers; unique in a plan."""
        words = {"element_size": "{} bytes", "BLOCK_D": "D {}", "head_dim": "D {}"}
        key = self.key | {"causal": "causal" if self.key.get("causal") else "full"}
        return f"{self.kind}: " + " ".join(words.get(x, "{}").format(key[x]) for x in self.key)

    @property
    def shipped(self) -> Candidate:
        return self.candidates[0]


def tile_candidate(kernel: str, calls: str, tile: TileConfig) -> Candidate:
    """Our kernels with this tile for one kernel, in calls of a class."""
    implementation = ONE_PASS if kernel == "backward_one_pass" else PORTABLE
    verified = (("triton", _family(kernel) if calls == "plain" else calls),)
    return Candidate(names_of(tile), implementation, {kernel: tile}, asdict(tile), verified)


def tile_choice(kernel: str, calls: str, shape: Shape, gpu: Gpu) -> Choice:
    """The tile of a kernel in calls of a class and shape."""
    entry = TableEntry(kernel, SIZES[shape.dtype], shape.BLOCK_D, calls)
    tried = [entry.shipped(gpu.arch), *candidates(entry, gpu.shared_bytes, gpu.arch)]
    made = (tile_candidate(kernel, calls, tile) for tile in dict.fromkeys(tried))
    return Choice("tiles", entry.key, entry.cases(shape), tuple(made))


def _family(kernel: str) -> str:
    """A kernel's family in `fastattn verify`."""
    families = {"decode": "decode", "one_pass": "one-pass", "fp8": "fp8", "forward": "forward"}
    return next((families[part] for part in families if part in kernel), "backward")


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
    return Choice("tiles", entry.key, timed.cases(shape), tuple(made))


def backend_choice(
    direction: str, shape: Shape, causal: bool, waves: str, multiprocessors: int, hopper: bool
) -> Choice | None:
    """The backend for plain calls of a direction, "forward" or "training", and a size of WAVES.

    hopper: whether the Hopper kernels serve the calls. None: no call of the shape has that size.
    """
    least, limit = WAVES[waves]
    if waves == "many":
        T, enough = TOKENS, -(-8 * multiprocessors * _QUERIES // (TOKENS * shape.H_q))
        B = max(16384 // T, enough)
    else:
        many = multiprocessors // 2 if waves == "few" else 2 * multiprocessors
        B, T = 1, max(_QUERIES, many // shape.H_q * _QUERIES)
    if not least <= B * shape.H_q * -(-T // _QUERIES) / multiprocessors < limit:
        return None
    trains = direction == "training"
    sizes = (B, shape.H_q, shape.H_k, T, shape.D, causal)
    case = plain("forward_backward" if trains else "forward", *sizes)
    families = ("forward", "backward")[: 1 + trains]
    key = {"direction": direction, "dtype": shape.dtype, "head_dim": shape.BLOCK_D}
    made = []
    for name in ("hopper", "triton", "torch")[not hopper :]:
        verified = tuple((name, family) for family in families if name != "torch")
        made.append(Candidate(name, named(name), {}, {"backend": name}, verified))
    cases = (replace(case, dtype=shape.dtype),)
    return Choice("backends", key | {"causal": causal, "waves": waves}, cases, tuple(made))


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
    """Decoding programs per multiprocessor, for many rows and for one, and what merges parts."""
    entry = TableEntry("decode", SIZES[shape.dtype], shape.BLOCK_D)
    (many,) = entry.cases(shape)
    decode = (("triton", "decode"),)
    made = []
    for one, n in itertools.product((False, True), (PROGRAMS_AT_ONCE, *_PROGRAMS)):
        name = f"{n} at once{', one launch' if one else ''}"
        forced, row = {SPLITS: n, ONE_LAUNCH: one}, {"programs": n, ONE_LAUNCH: one}
        made.append(Candidate(name, PORTABLE, {**forced}, row, decode))
    key = {"element_size": entry.element_size, "BLOCK_D": entry.BLOCK_D}
    return Choice("splits", key, (many, replace(many, B=1)), tuple(made))


def plan_of(shapes: Iterable[Shape], gpu: Gpu) -> list[Choice]:
    """The choices for some shapes: plain calls and decoding first, then the other classes."""
    both = itertools.product((_plain_choices, _other_calls), list(shapes))
    return [choice for choices_of, shape in both for choice in choices_of(shape, gpu)]


def _plain_choices(shape: Shape, gpu: Gpu) -> Iterator[Choice]:
    """Tiles, then backends, which are compared with the best tiles.

    Shapes of the Hopper kernels come late: no measured GPU gained from others.
    """
    hopper = gpu.hopper and hopper_choice("hopper_forward", shape) is not None
    for kernel in _ATTENTION:
        yield tile_choice(kernel, "plain", shape, gpu)
    for direction in ("forward", "training"):
        for causal in (True, False):
            for waves in reversed(WAVES):
                sizes = (causal, waves, gpu.multiprocessors)
                if (choice := backend_choice(direction, shape, *sizes, hopper)) is not None:
                    yield choice
    for backend in ("hopper", "triton") if hopper else ("triton",):
        if backend == "triton" or hopper_choice("hopper_one_pass", shape) is not None:
            yield pass_choice(backend, shape)
    for kernel in NEW_TOKENS:
        yield tile_choice(kernel, "plain", shape, gpu)
    yield split_choice(shape)
    for kernel in tiles.HOPPER if hopper else ():
        if (shapes := hopper_choice(kernel, shape)) is not None:
            yield shapes


def _other_calls(shape: Shape, gpu: Gpu) -> Iterator[Choice]:
    # A bias is loaded by TMA, or has no tiles of its own.
    by_tma = gpu.arch in TMA and SIZES[shape.dtype] == 2
    left_out = ("plain",) if by_tma else ("plain", "bias")
    for calls, kernel in itertools.product(CALLS, _ATTENTION):
        if calls not in left_out:
            yield tile_choice(kernel, calls, shape, gpu)


def shapes_of(
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
) -> list[Shape]:
    """The shapes to tune, the most important first; default: USUAL_SHAPES.

    Raises:
        ValueError: a number or dtype cannot be served.
    """
    if heads is None and kv_heads is None and not head_dims and not dtypes:
        return list(USUAL_SHAPES)
    made = []
    for dtype, D in itertools.product(dtypes or ("bfloat16",), head_dims or (128, 64)):
        if dtype not in SIZES:
            raise ValueError(f"dtype must be one of {', '.join(SIZES)}, got {dtype!r}")
        H_q = heads or usual_shape(D).H_q
        H_k = kv_heads or H_q
        if not 1 <= D <= 256 or H_q < 1 or H_q % H_k:
            raise ValueError(
                f"a head dim is 1 to 256, and heads are a multiple of kv_heads; got head dim "
                f"{D}, {H_q} heads on {H_k}"
            )
        made.append(Shape(D, H_q, H_k, dtype))
    return made
