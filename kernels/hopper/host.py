"""Host code of the Hopper kernels: TMA descriptors, persistent grids, and served calls."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction

from ..launch import tiles as launch_tiles
from ..launch.arguments import aligned, bias_by_tma, copied, strides, tiles_of
from ..launch.block_sparsity import CallTables, launch_mask, per_head
from ..launch.descriptors import tma_strides
from ..launch.packed_order import order_of_tiles
from ..launch.tiles import TileConfig
from ..rules.mask import Mask
from ..rules.score import Score
from ..rules.tile import ORDERED
from .pipeline import ROWS
from .tile_table import APART_HEAD_DIM, HEAD_DIMS, HopperConfig, backward_config, tile_columns

if TYPE_CHECKING:
    from ...options import Options

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_TYPES = {**_DTYPES, torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv}
# Share of the 50 MB of L2 on H100 and H200 for K and V of the active heads.
_L2_BYTES = 32 << 20
# Tiles per multiprocessor from which on tiles of packed sequences are sorted.
_ROUNDS = 4
# Parts of a tile of keys: at most as many as waves. Cost of writing and reading a part in fp32, in
# queries: 16 bytes per column of each of its 128 keys at 23 GB/s of a multiprocessor, against 8
# operations per column at 4.5 TFLOP/s; and the cost of the launches that add.
_PART_ROUNDS = 8
_PART_QUERIES = 400
_ADDING_QUERIES = 1500
# Default: H100 and H200 SXM.
_MULTIPROCESSORS = 132
# Positions and sides of a band are added in int32.
_MAX_LENGTH = 1 << 28
# Fields of Options that the kernels support; the others must have their defaults.
_SERVED_IN_8_BITS = {
    "key_lengths", "query_offsets", "prefix_lengths", "query_offset", "left", "right", "causal",
    "keep_first", "scale", "softcap", "sinks", "cu_seqlens_q", "cu_seqlens_k",
    "atomic_dq", "fp32_results", "q_positions", "k_positions",
    # Only dropout and functions use them.
    "first_head", "all_heads",
}  # fmt: skip
_SERVED = _SERVED_IN_8_BITS | {
    "key_padding_mask", "q_documents", "k_documents", "attn_mask", "alibi_slopes", "attn_bias",
    "relative_bias", "dropout", "dropout_seed", "mask_mod", "mod_tensors",
    "score_mod", "score_mod_grad",
}  # fmt: skip
_SECOND = ("query2", "key2")
_OF_HEADS = "each head has an attn_mask of its own, and heads share keys"
_MAYBE_OF_HEADS = (
    "mask_mod may differ between heads that share keys; a BlockMask can promise per_head=False"
)
# Functions and methods of Triton whose result takes the layout of their operands.
_ELEMENTWISE = {
    "abs", "add", "cast", "cdiv", "ceil", "clamp", "constexpr", "cos", "div_rn", "dtype", "erf",
    "exp", "exp2", "fdiv", "floor", "fma", "load", "log", "log2", "logical_and", "logical_or",
    "maximum", "minimum", "mul", "range", "rint", "rsqrt", "sigmoid", "sin", "sqrt", "sqrt_rn",
    "static_assert", "static_print", "static_range", "sub", "to", "umulhi", "where",
}  # fmt: skip


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason that the Hopper kernels cannot serve this call on any sm_90 GPU, or None."""
    if (reason := _why_not_heads(q.shape[-1], v.shape[-1])) is not None:
        return reason
    if q.dtype not in _DTYPES:
        return f"q is {str(q.dtype).removeprefix('torch.')}; they take bfloat16 and float16"
    return _why_not(q, k, v, options, _SERVED)


def why_not_hopper_fp8(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dtype: torch.dtype
) -> str | None:
    """`why_not_hopper` for e4m3 q [B, H_q, T_q, D], k and v, and o in `dtype`."""
    if dtype not in _DTYPES:
        return f"out_dtype is {str(dtype).removeprefix('torch.')}; they write bfloat16 and float16"
    D, D_v = q.shape[-1], v.shape[-1]
    if D_v != D:
        return f"head dims of q and v differ ({D} and {D_v})"
    if D not in HEAD_DIMS:
        return f"head dim {D} is none of {', '.join(map(str, HEAD_DIMS))}"
    return _why_not(q, k, v, options, _SERVED_IN_8_BITS)


def _why_not_heads(D: int, D_v: int) -> str | None:
    """Reason that tiles do not fit head dims D and D_v, or None."""
    for name, columns in (("q", D), ("v", D_v)):
        if not HEAD_DIMS[0] // 2 < columns <= HEAD_DIMS[-1]:
            return (
                f"head dim {columns} of {name} is not in {HEAD_DIMS[0] // 2 + 1}..{HEAD_DIMS[-1]}"
            )
        if columns % 8:
            return f"head dim {columns} of {name} is no multiple of 8: rows are stored by 16 bytes"
    if tile_columns(D_v) > tile_columns(D):
        return f"head dim {D_v} of v takes a wider tile than {D} of q"
    return None


def _why_not(q: Tensor, k: Tensor, v: Tensor, options: Options, served: set[str]) -> str | None:
    # Packed sequences are [total, H, D] before an operator adds the batch dim.
    T_q, T_k = (x.shape[0] if x.dim() == 3 else x.shape[2] for x in (q, k))
    D = tile_columns(q.shape[-1])
    defaults = options._field_defaults.values()
    for name, value, default in zip(options._fields, options, defaults, strict=True):
        if value is not default and value != default and name not in served:
            hint = "; concatenate its columns to q and k" if name in _SECOND else ""
            return f"they do not support {name}{hint}"
    for name in ("mask_mod", "score_mod", "score_mod_grad"):
        mod = getattr(options, name)
        operation = None if mod is None else not_elementwise(getattr(mod, "mask_mod", mod))
        if operation is not None:
            return f"{name} uses {operation}, which is not known to be elementwise"
    if options.score_mod is not None and D == APART_HEAD_DIM:
        return f"score_mod with tiles of {D} columns needs too many registers"
    if _grouped(q, k) and per_head(options):
        of_mask = per_head(options._replace(mask_mod=None))
        return _OF_HEADS if of_mask else _MAYBE_OF_HEADS
    if options.attn_bias is not None and (reason := _why_not_bias(options.attn_bias, T_q, D)):
        return reason
    longest = max(T_k, T_q)
    if T_k == 0:
        return "there are no keys"
    if longest >= _MAX_LENGTH:
        return f"{longest} positions, more than {_MAX_LENGTH}"
    return None


def _why_not_bias(bias: Tensor, T_q: int, D: int) -> str | None:
    """Reason that TMA cannot load a bias [B or 1, H or 1, T_q or 1, T_k or 1], or None."""
    if bias.element_size() != 2:
        dtype = str(bias.dtype).removeprefix("torch.")
        return f"attn_bias is {dtype}; they have room for tiles of 16 bits"
    if D == APART_HEAD_DIM:
        return f"there is no room for tiles of attn_bias with {D} columns"
    if bias.shape[2] != T_q or bias.shape[3] == 1 or bias.stride(2) == 0:
        return "attn_bias is broadcast along queries or keys, which TMA does not support"
    steps = zip(bias.shape[:3], bias.stride()[:3], strict=True)
    if bias.stride(3) != 1 or any(size > 1 and stride % 8 for size, stride in steps):
        return "rows of attn_bias are not aligned to 16 bytes"
    return None


def aligned_bias(options: Options) -> Options:
    """The options, with attn_bias copied if its address is unaligned for TMA."""
    bias = options.attn_bias
    if bias is None or bias.data_ptr() % 16 == 0:
        return options
    once = bias[: 1 if bias.stride(0) == 0 else None, : 1 if bias.stride(1) == 0 else None]
    T_k = bias.shape[3]
    copy = bias.new_empty(*once.shape[:3], -(-T_k // 8) * 8)[..., :T_k]
    return options._replace(attn_bias=copy.copy_(once))


def describe_bias(
    options: Options, q: Tensor, rows: int, cols: int
) -> tuple[int, TensorDescriptor | None]:
    """Index of attn_bias among the options, and its descriptor in tiles [rows, cols] or None."""
    x = bias_by_tma(options, q)
    index = ~options._fields.index("attn_bias")
    return index, None if x is None else describe(x, rows, cols)


def _grouped(q: Tensor, k: Tensor) -> bool:
    """Whether query heads share keys, for [B, H, T, D] or packed [total, H, D]."""
    return q.shape[-3 if q.dim() == 4 else 1] != k.shape[-3 if k.dim() == 4 else 1]


def not_elementwise(function: Any) -> str | None:
    """Name of an operation of a @triton.jit function that may not be elementwise, or None."""
    # Such operations need layouts in Gluon; tiles here have other shapes than the portable ones.
    return _first_not_elementwise(function)


# torch.compile takes the result for a constant.
not_elementwise._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(256)
def _first_not_elementwise(function: Any) -> str | None:
    return next(_not_elementwise(function), None)


def _not_elementwise(function: Any) -> Iterator[str]:
    """Names of all such operations, also of functions that it calls."""
    used = inspect.getclosurevars(function.fn)
    scope = {**used.builtins, **used.globals, **used.nonlocals}
    values = function.fn.__code__.co_varnames
    source = getattr(function, "src", None) or inspect.getsource(function.fn)

    def named(node: ast.AST) -> Any:
        """The object that an expression names, None for a value that Triton computes."""
        if isinstance(node, ast.Name) and node.id not in values:
            return scope.get(node.id)
        of = named(node.value) if isinstance(node, ast.Attribute) else None
        return None if of is None else getattr(of, node.attr, None)  # type: ignore[attr-defined]

    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.FunctionDef)
    for node in (x for statement in definition.body for x in ast.walk(statement)):
        x = named(node)
        of_user = getattr(x, "fn", None)
        name = None
        if isinstance(node, ast.Subscript) and named(node.value) is None:
            name = "a subscript"
        elif isinstance(x, ConstexprFunction):
            continue  # computes with constants
        elif inspect.isfunction(of_user) and not of_user.__module__.startswith("triton."):
            yield from _not_elementwise(x)
        elif x is not None and str(getattr(x, "__module__", "")).startswith("triton."):
            name = getattr(x, "__name__", None)
        elif isinstance(node, ast.Attribute) and named(node.value) is None:
            name = node.attr
        if name is not None and name not in _ELEMENTWISE:
            yield name


def why_not_worth_it(q: Tensor) -> str | None:
    """Reason that other kernels are faster for a call that these serve, or None."""
    T_q = q.shape[0] if q.dim() == 3 else q.shape[2]
    if T_q < ROWS.value:
        return f"{T_q} queries fill less than half of a tile of {2 * ROWS.value}"
    return None


def why_not_one_pass(q: Tensor, k: Tensor, options: Options) -> str | None:
    """Reason that a backward takes two kernels although atomics are permitted, or None."""
    D = q.shape[-1]
    if tile_columns(D) == APART_HEAD_DIM:
        return f"dK and dV of head dim {D} need a kernel each"
    if D not in HEAD_DIMS:
        return f"halves of head dim {D} are no tiles"
    if options.score_mod is not None:
        return "score_mod needs too many registers"
    if D == 128 and options.softcap is not None:
        return "softcap at head dim 128 needs too many registers"
    if options.dropout:
        return "dropout needs too many registers"
    if (parts := parts_of_keys(q, k, options)) > 1:
        return f"it would leave the GPU idle: two passes split a tile of keys in {parts} programs"
    return None


def parts_of_keys(q: Tensor, k: Tensor, options: Options) -> int:
    """Number of programs that share each tile of keys in dK and dV; q and k may be packed."""
    if q.dim() == 3:
        q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    tiles = tiles_of(options.cu_seqlens_k, 1, k.shape[2], 2 * ROWS.value)
    kernel = "dk" if tile_columns(q.shape[3]) == APART_HEAD_DIM else "dkv"
    return _key_parts(q, k, tiles, backward_config(kernel, q.shape[3], False, False).BLOCK, options)


def enough_tiles(heads: int, T_k: int, device: torch.device) -> bool:
    """Whether keys have so many tiles that no two programs share one."""
    return 2 * heads * (T_k // (2 * ROWS.value)) > _PART_ROUNDS * multiprocessors(device)


def walkable(x: Tensor) -> Tensor:
    """x [B, H, T, D] if TMA supports its strides, else a copy, also of expanded tensors."""
    x = aligned(x)
    return copied(x) if 0 in x.stride() else x


def describe(
    x: Tensor, rows: int, cols: int | None = None, piece: int | None = None
) -> TensorDescriptor:
    """TMA descriptor of tensors with the layout of x [B, H, T, D], from `walkable`.

    Tiles have `rows` rows of one head; cols: default all. Loads fill with zeros past the last row
    and column, stores clip there. piece: columns that a product may read alone; default 128 bytes.
    """
    steps = tma_strides(x)
    assert steps is not None
    block = [1, 1, rows, x.shape[3] if cols is None else cols]
    in_pieces = [*block[:3], block[3] if piece is None else piece]
    layout = gl.NVMMASharedLayout.get_default_for(in_pieces, _TYPES[x.dtype])
    descriptor = TensorDescriptor(x, list(x.shape), steps, block, layout)
    descriptor.base = None  # a cached launch outlives its tensors
    return descriptor


def end_early(options: Options) -> bool:
    """Whether a batch row's keys may end before the keys in memory, or have holes."""
    hidden = (options.key_padding_mask, options.k_documents)
    return any(x is not None for x in (options.key_lengths, options.cu_seqlens_k, *hidden))


def to_send(
    x: Tensor, options: Options, cols: int, piece: int | None = None
) -> TensorDescriptor | None:
    """Descriptor of an output [B, H, T, D], see `describe`; None if TMA does not write it."""
    return None if options.fp32_results else describe(x, ROWS.value, cols, piece)


def strides_to_send(x: Tensor, options: Options) -> tuple[int | None, ...] | None:
    """Strides of an output [B, H, T, D] that TMA does not write completely; see `pipeline.send`."""
    whole = options.cu_seqlens_q is None and not options.fp32_results
    return None if whole else strides(x)


def mask_of(
    options: Options, q: Tensor, k: Tensor, config: HopperConfig, sizes: Sequence[Any],
    *, of_keys: bool,
) -> tuple[Mask, Tensor | None, CallTables | None]:  # fmt: skip
    """`launch_mask` for a kernel with blocks of config.BLOCK rows, and the order of its tiles.

    sizes: from `query_grid` or `key_grid`. The order is None if it follows from the tiles' numbers,
    or if there are too few tiles for sorting to pay.
    """
    rows = ROWS.value * config.CONSUMERS
    shape = (rows, config.BLOCK) if of_keys else (config.BLOCK, rows)
    assert options.q_positions is None or max(shape) <= ORDERED.value
    mask, tables = launch_mask(options, q, k, TileConfig(*shape), of_keys=of_keys)
    heads, tiles = sizes[4:6]
    packed = options.cu_seqlens_q is not None and tables is None
    if not packed or heads * tiles < _ROUNDS * multiprocessors(q.device):
        return mask, None, tables
    rows_in_l2 = _L2_BYTES // (2 * q.element_size() * q.shape[3])
    order, tables = order_of_tiles(
        options, mask, q, k, tiles, (rows, config.BLOCK), rows_in_l2, tiles_of_keys=not of_keys
    )
    return mask, order, tables


def without_mods(mask: Mask, score: Score) -> tuple[Mask, Score, tuple[Any, Any, Any]]:
    """Users' functions apart, `HopperConfig.MASK_MOD` and so on: records that kernels make cannot
    hold them.
    """
    mods = mask.mod, score.mod, score.mod_grad
    return mask._replace(mod=None), score._replace(mod=None, mod_grad=None), mods


def query_grid(
    q: Tensor, k: Tensor, config: HopperConfig, options: Options
) -> tuple[tuple[int], tuple[int, ...]]:
    """Persistent grid over tiles of queries [B, H_q, T_q, D], and sizes for `Work`."""
    G = q.shape[1] // k.shape[1]
    tiles = tiles_of(options.cu_seqlens_q, 1, q.shape[2], ROWS.value * config.CONSUMERS)
    return _grid(q, k, q, G, tiles, heads_in_l2(k) * G, options)


def key_grid(
    q: Tensor, k: Tensor, config: HopperConfig, options: Options
) -> tuple[tuple[int], tuple[int | None, ...]]:
    """Persistent grid over tiles of keys [B, H_k, T_k, D], and sizes for `Work`.

    The last size is the number of parts of a tile, None for the kernel that sums dQ.
    """
    G = q.shape[1] // k.shape[1]
    tiles = tiles_of(options.cu_seqlens_k, 1, k.shape[2], ROWS.value * config.CONSUMERS)
    parts = 1 if options.atomic_dq else _key_parts(q, k, tiles, config.BLOCK, options)
    group = max(1, heads_in_l2(q) * parts // G)
    grid, sizes = _grid(q, k, k, G, tiles, group, options, parts)
    return grid, (*sizes, None if options.atomic_dq else parts)


def _key_parts(q: Tensor, k: Tensor, tiles: int, block: int, options: Options) -> int:
    """Number of programs that share each tile of keys, with the least modelled time."""
    of_heads, T_q = max(1, k.shape[0] * k.shape[1] * tiles), q.shape[2]
    if options.cu_seqlens_q is not None:
        T_q = -(-T_q // max(1, options.cu_seqlens_q.shape[0] - 1))
    slanted = (options.causal or options.right is not None) and options.left is None
    queries = q.shape[1] // k.shape[1] * (T_q // 2 if slanted else T_q)
    if options.left is not None:
        queries = min(queries, q.shape[1] // k.shape[1] * (options.left + 2 * ROWS.value))
    programs = multiprocessors(q.device)
    most = max(1, min(_PART_ROUNDS * programs // of_heads, queries // block))
    return _cheapest_parts(of_heads, queries, most, programs, slanted)


@lru_cache(1024)
def _cheapest_parts(of_heads: int, queries: int, most: int, programs: int, slanted: bool) -> int:
    """Number of parts, up to `most`, for tiles with this many queries."""

    def cost(parts: int) -> float:
        rounds = of_heads * parts / programs
        adding = _PART_QUERIES * rounds + _ADDING_QUERIES if parts > 1 else 0.0
        return of_heads * queries / programs / _busy(rounds, slanted) + adding

    return min(range(1, most + 1), key=cost)


def _busy(rounds: float, slanted: bool) -> float:
    """Utilisation of programs that get `rounds` tiles each, assigned in alternating order.

    slanted: lengths fall linearly to 0. Then two alternating rounds give all programs the same
    work, and a remaining round, or a part of it, gives the first program the most (in units of its
    tile); with a whole round and a part, the programs with both get the same.
    """
    whole = int(rounds)
    if not slanted:
        return rounds / math.ceil(rounds)
    even = whole - whole % 2
    most = even - even * even / (2 * rounds) + 1 - even / rounds
    if whole % 2:
        most = max(most, most + 1 - (whole + 1) / rounds)
    return rounds / 2 / most


def _grid(
    q: Tensor, k: Tensor, tiled: Tensor, G: int, tiles: int, group: int, options: Options,
    parts: int = 1,
) -> tuple[tuple[int], tuple[int, ...]]:  # fmt: skip
    """T_q, T_k, H, G, heads, tiles, group, pairs, pair_group after the grid; see `Work`."""
    B, H = tiled.shape[:2]
    heads = B * H * parts
    programs = min(heads * tiles, multiprocessors(q.device))
    pairs, pair_group = 0, 1
    in_order = options.cu_seqlens_q is None and options.q_positions is None
    if in_order and (options.causal or options.right is not None):
        # The last two to four rounds of tiles are assigned one by one: few enough that their keys
        # fit in L2, and enough to balance.
        pairs = max(0, heads // 2 * tiles - 2 * programs) // max(1, tiles)
        pair_group, group = max(1, group // 2), heads
    sizes = (q.shape[2], k.shape[2], H, G, heads, tiles, group, pairs, pair_group)
    return (programs,), sizes


def heads_in_l2(x: Tensor) -> int:
    """Number of heads of two tensors like x [B, H, T, D] that fit in L2, at least one."""
    head_bytes = 2 * x.element_size() * x.shape[2] * x.shape[3]
    return max(1, _L2_BYTES // max(1, head_bytes))


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the device."""
    return launch_tiles.multiprocessors(device) if device.type == "cuda" else _MULTIPROCESSORS
