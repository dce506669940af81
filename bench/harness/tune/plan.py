"""The plan of a tuning run: a list of verifications and choices, the most important first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...kernels.launch import tiles
from .candidates import CALLS, NEW_TOKENS, SIZES, TMA, Shape, TableEntry, usual_shape
from .choices import (
    WAVES,
    Choice,
    backend_choice,
    hopper_choice,
    pass_choice,
    split_choice,
    tile_choice,
)

# Shapes to tune by default.
USUAL_SHAPES = tuple(
    usual_shape(D, dtype)
    for dtype, dims in (("bfloat16", (128, 64, 256)), ("float32", (64, 128, 256)))
    for D in dims
)
_ATTENTION = ("forward", "backward_dkv", "backward_dq", "backward_one_pass")
# Names in model configurations, ours and transformers'.
_FIELDS = {
    "heads": ("num_attention_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "width": ("hidden_size", "embed_dim", "n_embd", "d_model"),
    "head_dim": ("head_dim",),
    "tokens": ("max_position_embeddings", "context_length", "n_positions"),
}
_MOST_TOKENS = 8192


class Gpu(NamedTuple):
    """Properties of a GPU that a plan depends on.

    arch: name of the architecture. shared_bytes: most shared memory of a program. hopper: whether
    the Hopper kernels serve calls.
    """

    arch: str
    shared_bytes: int
    multiprocessors: int
    hopper: bool


class Verification(NamedTuple):
    """A step that verifies backends and families before choices of a size are timed.

    families: pairs of backend and family.
    """

    families: tuple[tuple[str, str], ...]
    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        families = ", ".join(" ".join(pair) for pair in self.families)
        return f"verify {self.dtype} D {self.head_dim}: {families}"


Step = Verification | Choice


def steps(shapes: Iterable[Shape], gpu: Gpu) -> list[Step]:
    """The steps for some shapes: plain calls and decoding first, then the other classes."""
    shapes = list(shapes)
    made: list[Step] = []
    for choices_of in (_plain_choices, _other_calls):
        for shape in shapes:
            choices = list(choices_of(shape, gpu))
            made += [_verification(shape, choices), *choices]
    return made


def _verification(shape: Shape, choices: Iterable[Choice]) -> Verification:
    pairs = (p for choice in choices for c in choice.candidates for p in c.verified)
    return Verification(tuple(dict.fromkeys(pairs)), shape.dtype, shape.BLOCK_D)


def _plain_choices(shape: Shape, gpu: Gpu) -> Iterator[Choice]:
    """Tiles, then backends, which are compared with the best tiles.

    Shapes of the Hopper kernels come late: no measured GPU gained from others.
    """
    hopper = gpu.hopper and hopper_choice("hopper_forward", shape) is not None
    for kernel in _ATTENTION:
        yield _tiles(kernel, "plain", shape, gpu)
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
        yield _tiles(kernel, "plain", shape, gpu)
    yield split_choice(shape)
    for kernel in tiles.HOPPER if hopper else ():
        if (shapes := hopper_choice(kernel, shape)) is not None:
            yield shapes


def _other_calls(shape: Shape, gpu: Gpu) -> Iterator[Choice]:
    for calls in CALLS:
        # A bias is loaded by TMA, or has no tiles of its own.
        by_tma = gpu.arch in TMA and SIZES[shape.dtype] == 2
        if calls == "plain" or (calls == "bias" and not by_tma):
            continue
        for kernel in _ATTENTION:
            yield _tiles(kernel, calls, shape, gpu)


def _tiles(kernel: str, calls: str, shape: Shape, gpu: Gpu) -> Choice:
    entry = TableEntry(kernel, SIZES[shape.dtype], shape.BLOCK_D, calls)
    return tile_choice(entry, gpu.arch, gpu.shared_bytes, shape)


def shapes_of(
    model: str | Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
) -> list[Shape]:
    """The shapes to tune, the most important first; default: USUAL_SHAPES.

    Args:
        model: a model's configuration as a JSON file, or the folder of its config.json or, for our
            checkpoints, checkpoint.json. Other arguments override it.
        heads, kv_heads: query heads, and key/value heads (default: heads).
        head_dims, dtypes: all combinations.

    Raises:
        ValueError: a configuration lacks heads, or a number or dtype cannot be served.
    """
    if model is None and heads is None and kv_heads is None and not head_dims and not dtypes:
        return list(USUAL_SHAPES)
    model_shape = {} if model is None else _configuration(Path(model))
    heads = heads or model_shape.get("heads")
    head_dims = head_dims or ([model_shape["head_dim"]] if model_shape else [128, 64])
    made = []
    for dtype, D in itertools.product(dtypes or ("bfloat16",), head_dims):
        if dtype not in SIZES:
            raise ValueError(f"dtype must be one of {', '.join(SIZES)}, got {dtype!r}")
        H_q = heads or usual_shape(D).H_q
        H_k = kv_heads or model_shape.get("kv_heads") or H_q
        if not 1 <= D <= 256 or H_q < 1 or H_q % H_k:
            raise ValueError(
                f"a head dim is 1 to 256, and heads are a multiple of kv_heads; got head dim "
                f"{D}, {H_q} heads on {H_k}"
            )
        made.append(Shape(D, H_q, H_k, dtype, model_shape.get("tokens", 4096)))
    return made


def _configuration(path: Path) -> dict[str, int]:
    files = (path / "config.json", path / "checkpoint.json") if path.is_dir() else (path,)
    file = next((file for file in files if file.exists()), files[0])
    data = json.loads(file.read_text("utf-8"))
    for part in ("config", "model", "text_config"):
        data = {**data, **data.get(part, {})}
    shape = {
        name: next(data[field] for field in fields if data.get(field))
        for name, fields in _FIELDS.items()
        if any(data.get(field) for field in fields)
    }
    if "heads" not in shape or not {"head_dim", "width"} & shape.keys():
        raise ValueError(f"{file} says neither {_FIELDS['heads'][0]} nor what goes with it")
    shape.setdefault("head_dim", shape.get("width", 0) // shape["heads"])
    if "tokens" in shape:
        shape["tokens"] = min(shape["tokens"], _MOST_TOKENS)
    return shape
