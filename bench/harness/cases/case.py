"""A benchmark case, and the kinds of cases that `sets` has.

The sweep at 16384 tokens and hidden size 2048 follows FlashAttention-3 (Shah et al. 2024, section
4.1). Llama 3 70B has 64 query heads on 8 key/value heads of width 128, Llama 3 8B 32 on 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Direction = Literal["forward", "backward", "forward_backward"]

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
    which excludes host time. option: of `attention`, one of `inputs.OPTIONS`, for calls that are
    not plain; in decoding the cache, one of `inputs.CACHES`.
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
    option: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Case:
        """The case of `to_dict`, also of an older one with other fields."""
        return cls(**{x.name: record[x.name] for x in fields(cls) if x.name in record})

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

    @property
    def kernels(self) -> tuple[str, ...]:
        """Classes of the kernels that it launches, the timed one last: kernel, head dim, option."""
        mask = "padding" if self.padding_side == "left" else "lengths" if self.lengths else ""
        window = "window" if self.window is not None else ""
        of = ("decode",) if self.family == "decode" else ("forward", "backward")
        of = of[:1] if self.direction == "forward" else of
        parts = (f"D {self.D}", self.dtype, self.option, mask, window)
        return tuple(" ".join(filter(None, (kernel, *parts))) for kernel in of)

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


def grouped(direction: Direction, T: int, causal: bool, H_q: int = 64, H_k: int = 8) -> Case:
    """Many query heads on few key/value heads, one sequence."""
    return plain(direction, 1, H_q, H_k, T, 128, causal)


def padded(direction: Direction, kind: str, T: int, causal: bool) -> Case:
    """A padded batch of 16 rows: kind "dense" (no mask), "half" (half full), "documents"."""
    documents = tuple(min(n, T) for n in DOCUMENT_LENGTHS[::2])
    lengths = {"dense": None, "half": (T // 2,) * 16, "documents": documents}[kind]
    return Case("padded", direction, 16, 32, 8, T, T, 128, causal, lengths=lengths, label=kind)


def decode(B: int, T_k: int, H_q: int = 32, *, graph: bool = False, cache: str = "") -> Case:
    """Make a case of decoding: B sequences, a full cache of T_k keys, one of `inputs.CACHES`.

    "latent": DeepSeek-V3's 128 heads on 512 latent and 64 rotary columns.
    """
    heads, D = ((128, 1), 576) if cache == "latent" else ((H_q, 8), 128)
    case = Case("decode", "forward", B, *heads, 1, T_k, D, causal=True, layout="bhtd")
    return replace(case, graph=graph, option=cache)


# Masks that are sizes of a case; other options have a tensor or a number in `inputs`.
MASKS = ("lengths", "padding", "window")


def masked(direction: Direction, D: int, option: str) -> Case:
    """The causal case of the sweep at 4096 tokens with one of MASKS or an option of `inputs`."""
    case = replace(sweep(direction, D, 4096, causal=True), family="masks")
    if option == "window":
        return replace(case, window=(1023, 0))
    if option not in MASKS:
        return replace(case, option=option)
    label, side = ("lengths", "right") if option == "lengths" else ("left-padded", "left")
    lengths = tuple(4096 * (4 - b) // 4 for b in range(case.B))
    return replace(case, lengths=lengths, padding_side=side, label=label)  # type: ignore[arg-type]


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
