"""Benchmark cases, the most important first.

The sweep at 16384 tokens and hidden size 2048 follows FlashAttention-3 (Shah et al. 2024, section
4.1). Llama 3 70B has 64 query heads on 8 key/value heads of width 128, Llama 3 8B 32 on 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Direction = Literal["forward", "backward", "forward_backward"]

_BOTH: tuple[Direction, ...] = ("forward", "backward")

FAMILIES = ("forward", "backward", "padded", "masks", "decode")

# Lengths of real documents: the 1/64, 3/64, ... 63/64 quantiles of the module sizes in CPython
# 3.11's standard library, in tokens of four bytes.
DOCUMENT_LENGTHS = (
    21, 64, 142, 220, 256, 278, 334, 443, 557, 654, 782, 886, 1044, 1268, 1399, 1579, 1841, 2105,
    2414, 2849, 3063, 3278, 3379, 3718, 4249, 5175, 5881, 7303, 8528, 10271, 15092, 25526,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call of attention to measure.

    direction: the timed part. lengths: keys of each batch row without padding; padding_side "right"
    passes key_lengths, "left" key_padding_mask. layout: memory order of q, k, v and the output's
    gradient: "bthd", transposed views of [B, T, H, D] as projections return them, or "bhtd", as in
    a cache. label: distinguishes cases of equal sizes. graph: replay the call as a CUDA graph,
    which excludes host time. slow_peers: also measure peers that compile for seconds. option: of
    `attention`, one of `inputs.OPTIONS`, for calls that are not plain; peers cannot serve these.
    """

    family: str
    direction: Direction
    B: int
    H_q: int
    H_k: int
    T_q: int
    T_k: int
    D: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    lengths: tuple[int, ...] | None = None
    padding_side: Literal["right", "left"] = "right"
    dtype: str = "bfloat16"
    layout: Literal["bthd", "bhtd"] = "bthd"
    device: str = "cuda"
    label: str = ""
    graph: bool = False
    slow_peers: bool = True
    option: str = ""

    @property
    def name(self) -> str:
        """A name for readers and test ids, unique within a set."""
        heads = f"H{self.H_q}" if self.H_q == self.H_k else f"H{self.H_q}:{self.H_k}"
        length = f"T{self.T_q}" if self.T_q == self.T_k else f"T{self.T_q}:{self.T_k}"
        parts = [self.family]
        if self.direction != self.family:
            parts.append({"forward": "fwd", "backward": "bwd"}.get(self.direction, "fwdbwd"))
        parts += [f"B{self.B}", heads, length, f"D{self.D}", "causal" if self.causal else "full"]
        if self.window is not None:
            left, right = ("inf" if side is None else side for side in self.window)
            parts.append(f"window{left}:{right}")
        parts += [text for text in (self.label, self.option) if text]
        parts += ["graph"] if self.graph else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        parts += [self.layout] if self.layout != "bthd" else []
        parts += [self.device] if self.device != "cuda" else []
        return "-".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, and the name."""
        return {"name": self.name, **asdict(self)}


def plain(direction: Direction, B: int, H_q: int, H_k: int, T: int, D: int, causal: bool) -> Case:
    """A call without padding and options; all but a forward are of the family "backward"."""
    family = "forward" if direction == "forward" else "backward"
    return Case(family, direction, B, H_q, H_k, T, T, D, causal)


def sweep(direction: Direction, D: int, T: int, causal: bool) -> Case:
    """A point of FlashAttention-3's sweep: 16384 tokens, hidden size 2048."""
    return plain(direction, 16384 // T, 2048 // D, 2048 // D, T, D, causal)


def grouped(direction: Direction, T: int, causal: bool) -> Case:
    """64 query heads on 8 key/value heads, one sequence."""
    return plain(direction, 1, 64, 8, T, 128, causal)


def padded(direction: Direction, kind: str, T: int, causal: bool) -> Case:
    """A padded batch of 16 rows: kind "dense" (no mask), "half" (half full), "documents"."""
    documents = tuple(min(n, T) for n in DOCUMENT_LENGTHS[::2])
    lengths = {"dense": None, "half": (T // 2,) * 16, "documents": documents}[kind]
    return Case("padded", direction, 16, 32, 8, T, T, 128, causal, lengths=lengths, label=kind)


def decode(B: int, T_k: int, H_q: int = 32, graph: bool = False) -> Case:
    """A token for each of B sequences, with a full cache of T_k keys."""
    # Slow peers compile for every shape.
    slow_peers = H_q == 32 and T_k == 4096 and not graph
    case = Case("decode", "forward", B, H_q, 8, 1, T_k, 128, causal=True, layout="bhtd")
    return replace(case, graph=graph, slow_peers=slow_peers)


def masks(direction: Direction, T: int) -> Iterator[Case]:
    """Every kind of mask, and options, at the same sizes."""
    full = Case("masks", direction, 2, 16, 16, T, T, 128)
    causal, half = replace(full, causal=True), (T, T // 2)
    yield causal
    yield replace(causal, window=(1023, 0))
    yield replace(full, window=(512, 512))
    yield replace(causal, lengths=half, label="lengths")
    yield replace(causal, lengths=half, padding_side="left", label="left-padded")
    for option in ("alibi_slopes", "attn_bias", "relative_bias"):
        yield replace(causal, option=option)


# Number of cases before training, layers and host costs.
AIMS = 26


def _important() -> Iterator[Case]:
    """The cases of the project's goals: plain, decoding, options."""
    for D, lengths in ((128, (4096, 16384)), (64, (4096, 16384)), (256, (4096,))):
        for T in lengths:
            for direction in _BOTH:
                yield sweep(direction, D, T, causal=True)
    for direction in _BOTH:
        yield sweep(direction, 128, 4096, causal=False)
        yield grouped(direction, 8192, causal=True)
    for B in (32, 1):
        for graph in (True, False):
            yield decode(B, 4096, graph=graph)
    # The first two are causal and a window.
    yield from masks("forward", 8192)
    for kind in ("dense", "half", "documents"):
        yield padded("forward", kind, 4096, causal=False)
    for T in (8192, 512, 1024, 2048):
        for direction in _BOTH:
            yield sweep(direction, 128, T, causal=True)
    yield sweep("forward_backward", 128, 4096, causal=True)
    yield padded("forward_backward", "documents", 4096, causal=True)


def _remaining() -> Iterator[Case]:
    for causal in (True, False):
        for D in (128, 64, 256):
            for T in (512, 1024, 2048, 4096, 8192, 16384):
                for direction in _BOTH:
                    yield sweep(direction, D, T, causal)
    for causal in (True, False):
        for T in (2048, 4096, 8192, 16384, 32768):
            for direction in _BOTH:
                yield grouped(direction, T, causal)
    for graph in (True, False):
        for H_q in (32, 64):
            for T_k in (1024, 4096, 32768, 131072):
                for B in (1, 8, 32, 128):
                    yield decode(B, T_k, H_q, graph)
    yield from masks("backward", 8192)
    for T in (2048, 8192):
        for causal in (True, False):
            for kind in ("dense", "half", "documents"):
                yield padded("forward", kind, T, causal)
                yield padded("forward_backward", kind, T, causal)
    for direction in _BOTH:
        base = sweep(direction, 128, 4096, causal=True)
        yield replace(base, layout="bhtd")
        yield replace(base, dtype="float16")
        yield replace(base, dtype="float32")


def gpu_cases(which: str = "quick") -> list[Case]:
    """The distinct cases of a set, the most important first.

    Args:
        which: "quick" (a few minutes, slow peers at a few lengths only) or "full".
    """
    every = [*_important(), *(_remaining() if which == "full" else ())]
    each_once = {case.name: case for case in every}.values()
    if which == "full":
        return [*each_once]
    return [replace(case, slow_peers=_compares_all(case)) for case in each_once]


def cpu_cases() -> list[Case]:
    """Small shapes for a machine without a GPU."""
    base = Case("forward", "forward", 2, 4, 4, 256, 256, 64, dtype="float32", device="cpu")
    backward = replace(base, family="backward", direction="backward")
    return [
        base,
        replace(base, causal=True),
        replace(base, causal=True, H_k=2),
        replace(backward, causal=True),
        replace(backward, direction="forward_backward", causal=True),
        replace(base, family="padded", lengths=(256, 128), label="half"),
        replace(base, family="masks", causal=True, window=(63, 0)),
        replace(base, family="decode", T_q=1, H_k=2, causal=True, layout="bhtd"),
    ]


def _compares_all(case: Case) -> bool:
    """Whether the quick set measures slow peers on this case: one case of each kind."""
    if case.family in ("forward", "backward"):
        plain = case.H_q == case.H_k and case.direction == case.family
        return plain and case.causal and case.D in (64, 128) and case.T_q == 4096
    if case.family == "padded":
        return case.label == "documents" and case.direction == "forward"
    return case.family == "masks" and case.causal and case.window is not None
