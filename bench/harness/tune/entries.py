"""Rows of a tuning table, and the calls that their tiles are timed on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...kernels.launch import tiles
from ..cases.case import Case

# What makes a call one of a class with tiles of its own: arguments of `Case`, causal and not.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "masked": ({"window": (1023, 0)}, {"window": (511, 512)}),
    "bias": ({"option": "attn_bias"}, {"option": "attn_bias"}),
    "scores": ({"option": "relative_bias"}, {"option": "relative_bias"}),
    "heavy": ({"option": "attn_bias+relative_bias"}, {"option": "attn_bias+relative_bias"}),
}
NEW_TOKENS = {"decode": 1, "decode_chunk": 64}
# Kernels whose programs each hold a block of keys and loop over the queries.
BY_KEYS = ("backward_dkv", "backward_one_pass")
DTYPES = {2: "bfloat16", 4: "float32"}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Shape(NamedTuple):
    """The attention of a model: head dim, query heads, key/value heads, dtype and tokens."""

    D: int
    H_q: int
    H_k: int
    dtype: str = "bfloat16"
    T: int = 4096

    @property
    def BLOCK_D(self) -> int:
        """Columns of a row of the table that serves this head dim."""
        return next((D for D in (64, 128) if self.D <= D), 256)


def usual_shape(D: int, dtype: str = "bfloat16") -> Shape:
    """16384 tokens in sequences of 4096, hidden size 2048, as many key/value heads as heads."""
    return Shape(D, 2048 // D, 2048 // D, dtype)


@dataclass(frozen=True)
class TableEntry:
    """Key of a row of a tuning table: kernel, bytes of an element, padded head dim, calls.

    calls: one of CALLS.
    """

    kernel: str
    element_size: int
    BLOCK_D: int
    calls: str = "plain"

    @property
    def kind(self) -> str:
        """The kernel's name in a table, the class of calls in it."""
        return self.kernel if self.calls == "plain" else f"{self.kernel}_{self.calls}"

    def shipped(self, arch: str) -> tiles.TileConfig:
        """The tile of the table that serves an architecture."""
        return tiles.tile_of(arch, self.kind, self.element_size, self.BLOCK_D)

    def case(self, causal: bool, shape: Shape | None = None) -> Case:
        """The case that tiles are timed on, of a shape; default `usual_shape`.

        Decoding: caches of as many tokens, four query heads to a key/value head unless the shape
        says otherwise, always causal.
        """
        grouped = 4 if shape is None else 1
        shape = shape or usual_shape(self.BLOCK_D, DTYPES[self.element_size])
        D, H_q, H_k, dtype, T = shape
        if self.kernel in NEW_TOKENS:
            tokens = NEW_TOKENS[self.kernel]
            one = Case("decode", "forward", 16, H_q, H_k // grouped, tokens, T, D, causal=True)
            return replace(one, dtype=dtype, layout="bhtd")
        B = max(1, 16384 // T)
        forward = self.kernel == "forward"
        plain = Case("forward", "forward", B, H_q, H_k, T, T, D, causal, dtype=dtype)
        if not forward:
            plain = replace(plain, family="backward", direction="backward")
        return replace(plain, **CALLS[self.calls][not causal])

    def cases(self, shape: Shape | None = None) -> tuple[Case, ...]:
        """Causal, and with all pairs of query and key; decoding is causal only."""
        both = (True,) if self.kernel in NEW_TOKENS else (True, False)
        return tuple(self.case(causal, shape) for causal in both)
