"""The sets of benchmark cases, each case with the implementations to compare on it.

"short" settles within nine minutes what a change has to be measured for, the most important first;
"full" adds the sweeps of lengths, masks and caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from . import inputs
from .case import MASKS, Case, Direction, decode, grouped, masked, padded, sweep
from .fp8 import EIGHT_BITS
from .registry import BY_NAME, CUDNN, ONE_PASS, OURS, PORTABLE, TORCH_PEERS, named

BOTH: tuple[Direction, ...] = ("forward", "backward")
FP8 = tuple(one.name for one in EIGHT_BITS)
OPTIONS = (*MASKS, *(name for name in inputs.OPTIONS if name and "+" not in name))
# Whom the sweeps compare: all but those that hold every score, and those that compile each shape.
_UNFUSED = ("fastattn-torch", "sdpa-efficient", "sdpa-math", "naive")
_NOT_SWEPT = (*_UNFUSED, *FP8, "flex", "sdpa")  # on a GPU torch's backends are pinned
SWEPT = tuple(name for name in BY_NAME if name not in _NOT_SWEPT)


class Row(NamedTuple):
    """A case and the names of implementations, which take turns on it."""

    case: Case
    implementations: tuple[str, ...]


def plain_rows() -> Iterator[Row]:
    """Plain calls beside cuDNN: 4096 and 16384 tokens, and few key/value heads."""
    cases = [
        *(sweep(way, D, 4096, causal) for causal in (True, False) for D in (128, 64, 256)
          for way in BOTH),
        *(sweep(way, D, 16384, causal=True) for D in (128, 64) for way in BOTH),
        *(grouped(way, 8192, True, 64, H_k) for H_k in (8, 2) for way in BOTH),
    ]  # fmt: skip
    yield from (Row(case, (OURS, CUDNN)) for case in cases)


def decode_rows() -> Iterator[Row]:
    """A token from each cache, as a CUDA graph."""
    for cache, B, T in itertools.product(("", "int8", "fp8", "latent"), (1, 32), (4096, 32768)):
        yield Row(decode(B, T, graph=True, cache=cache), (OURS,))
    yield Row(decode(32, 4096, graph=True, cache="paged"), (OURS,))


def option_rows() -> Iterator[Row]:
    """Each option at the sizes of plain rows; masks that leave out blocks beside peers."""
    beside = {"padding", "documents", "window"}
    for option, D, way in itertools.product(OPTIONS, (128, 64), BOTH):
        peers = (CUDNN, "flex") if option in beside and D == 128 else ()
        yield Row(masked(way, D, option), (OURS, *peers))


def fp8_rows() -> Iterator[Row]:
    """8 bits beside 16."""
    for T in (4096, 16384):
        yield Row(sweep("forward", 128, T, causal=True), (named("hopper"), *FP8))


def portable_rows() -> Iterator[Row]:
    """The portable kernels, one pass, and other peers."""
    for D, way in itertools.product((128, 64), BOTH):
        names = (PORTABLE, ONE_PASS, f"{named('hopper')}-one-pass", "sdpa-flash", "flex")
        yield Row(sweep(way, D, 4096, causal=True), names)
    yield Row(sweep("forward", 256, 4096, causal=True), (PORTABLE,))
    yield Row(decode(32, 4096), (PORTABLE, *TORCH_PEERS))


def unfused_rows() -> Iterator[Row]:
    """Implementations that hold every score, once."""
    yield from (Row(sweep(way, 128, 4096, causal=True), _UNFUSED) for way in BOTH)


def swept_rows() -> Iterator[Row]:
    """Lengths, padding, caches, layouts and dtypes."""
    yield from (Row(case, SWEPT) for case in _swept())


def _swept() -> Iterator[Case]:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for causal, D, T, way in itertools.product((True, False), (128, 64, 256), lengths, BOTH):
        yield sweep(way, D, T, causal)
    for causal, T, way in itertools.product((True, False), (2048, 4096, 16384, 32768), BOTH):
        yield grouped(way, T, causal)
    kinds = ("dense", "half", "documents")
    for causal, T, kind in itertools.product((True, False), (2048, 4096, 8192), kinds):
        yield from (padded("forward", kind, T, causal), padded("forward_backward", kind, T, causal))
    heads, keys, batches = (32, 64), (1024, 4096, 32768, 131072), (1, 8, 32, 128)
    for graph, H_q, T_k, B in itertools.product((True, False), heads, keys, batches):
        yield decode(B, T_k, H_q, graph=graph)
    for way in BOTH:
        base = sweep(way, 128, 4096, causal=True)
        yield from (replace(base, layout="bhtd"), replace(base, dtype="float16"))
        yield replace(base, dtype="float32")


def every_row(which: str) -> Iterable[Row]:
    """The rows of a set, "short" or "full", in their order."""
    short = (plain_rows, decode_rows, option_rows, fp8_rows, portable_rows)
    parts = (*short, unfused_rows, swept_rows) if which == "full" else short
    return itertools.chain.from_iterable(part() for part in parts)
