"""Launches of every kernel on meta tensors, by the words of a table: what compilers are given."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from fastattn.jit_functions import derivative
from fastattn.kernels.additive import launch_additive_backward, launch_additive_forward
from fastattn.kernels.append import launch_append
from fastattn.kernels.backward import launch_backward, launch_backward_one_pass
from fastattn.kernels.backward_bias import launch_backward_bias
from fastattn.kernels.backward_mods import launch_backward_mods
from fastattn.kernels.backward_relative import launch_backward_relative
from fastattn.kernels.combine import launch_merge, launch_merge_prefix
from fastattn.kernels.decode import launch_decode
from fastattn.kernels.forward import (
    launch_few_queries,
    launch_forward,
    launch_forward_with_max,
)
from fastattn.kernels.forward_mode.backward_dq import launch_tangent_backward
from fastattn.kernels.forward_mode.tangent import InputTangents, launch_tangent
from fastattn.kernels.fp8.quantize import launch_head_codes
from fastattn.kernels.fp8.values import launch_pack_values
from fastattn.kernels.hopper import forward as hopper_forward
from fastattn.kernels.hopper.backward import launch_hopper_backward
from fastattn.kernels.hopper.host import end_early
from fastattn.kernels.hopper.tile_table import HopperConfig, backward_config, forward_config
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.arguments import tile_for
from fastattn.kernels.launch.block_sparsity import mask_for_keys, mask_for_queries
from fastattn.kernels.paged import launch_packed
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.kernels.selected.backward import launch_selected_backward
from fastattn.kernels.selected.choose import launch_block_scores
from fastattn.kernels.selected.forward import launch_selected_forward
from fastattn.kernels.statistics import launch_received, launch_row_statistics, launch_weights
from fastattn.options import Options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


@triton.jit
def before(b, h, q_pos, k_pos, limits_ptr):
    return tl.load(limits_ptr + k_pos) <= q_pos


@triton.jit
def steeper(x, b, h, q_pos, k_pos, limits_ptr):
    return 1.5 * x


@triton.jit
def steeper_grad(dx, x, b, h, q_pos, k_pos, limits_ptr):
    return 1.5 * dx


@triton.jit
def every_other(b, h, q_pos, k_pos):
    return (q_pos // 3 + h + b) % 2 == k_pos % 2


@triton.jit
def by_distance(x, b, h, q_pos, k_pos):
    return x + 0.1 * tl.abs(q_pos - k_pos)


@triton.jit
def by_distance_grad(dx, x, b, h, q_pos, k_pos):
    return dx


@triton.jit
def bent(x, b, h, q_pos, k_pos):
    return tl.where(x > 1, x, x / (1 + tl.abs(x))) + tl.exp(-x * x)


@triton.jit
def reading(x, b, h, q_pos, k_pos, table):
    near, row = q_pos - k_pos, table + h * 4096
    x = x * tl.load(table + h) + tl.load(row + q_pos) - tl.load(row + k_pos)
    return x + tl.load(row + near, mask=(near >= 0) & (near < 128), other=0.0)


def options_of(names: str, B: int = 2, T: int = 1000, H: int = 4, D: int = 64,
               dtype: str = "bf16") -> Options:  # fmt: skip
    """Options by their names, joined by "+"; a causal mask beside those that have none."""
    rows, ids, bits = integers(B), integers(B, T), meta(B, 1, T, T, dtype=torch.bool)
    slopes, starts, seed = floats(H), integers(9), meta(2, dtype=torch.int64)
    packed = {"query_offset": None, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    by_position = {"causal": True, "left": 300}
    every = {
        "full": {},
        "causal": {"right": 0},
        "window": {"right": 0, "left": 99},
        # All that the largest tiles serve.
        "plain": {"right": 0, "key_lengths": rows, "query_offsets": rows, "sinks": slopes},
        # Masks that cost registers in the loop over boundary blocks.
        "masks": {
            "key_padding_mask": meta(B, T, dtype=torch.bool), "key_lengths": rows,
            "query_offsets": rows, "left": 9, "right": 9,
        },
        # Every mask and score at once, but relative keys.
        "heavy": {
            "prefix_lengths": rows, "q_documents": ids, "k_documents": ids, "attn_mask": bits,
            "alibi_slopes": slopes, "dropout_seed": seed, "attn_bias": meta(1, H, T, T),
            "relative_bias": floats(H, 257), "sinks": slopes, "mod_tensors": (integers(T),),
            "left": 9, "causal": True, "keep_first": 4, "stride": 7, "softcap": 30.0,
            "dropout": 0.1, "mask_mod": before, "score_mod": steeper,
            "score_mod_grad": steeper_grad,
        },
        "prefix": {"causal": True, "prefix_lengths": rows},
        "first": {"causal": True, "left": 9, "keep_first": 4},
        "documents": {"right": 0, "q_documents": ids, "k_documents": ids},
        "mask_mod": {"right": 0, "mask_mod": before, "mod_tensors": (integers(T),)},
        "varlen": {"right": 0, **packed},
        "softcap": {"right": 0, "softcap": 30.0},
        "alibi": {"right": 0, "alibi_slopes": slopes, "sinks": slopes},
        "relative_bias": {"right": 0, "relative_bias": floats(H, 257)},
        # Every tensor for distances that there is.
        "relative": {
            "right": 0,
            **{name: meta(*shape, dtype=DTYPES[dtype]) for name, shape in (
                ("relative_bias", (H, 513)), ("relative_keys", (1, 513, D)),
                ("relative_query", (B, H, T, D)),
            )},
        },
        "two": {"right": 0, **{name: meta(B, heads, T, 64, dtype=DTYPES[dtype])
                               for name, heads in (("query2", H), ("key2", 1))}},
        "attn_bias": {"right": 0, "attn_bias": meta(1, H, T, T)},
        "attn_bias-fp32": {"right": 0, "attn_bias": floats(1, H, T, T)},
        "attn_bias-by-pointers": {"right": 0, "attn_bias": meta(1, H, T, T + 1)[..., :T]},
        "dropout": {"right": 0, "dropout": 0.1, "dropout_seed": seed},
        "key_padding": {"right": 0, "key_padding_mask": meta(B, T, dtype=torch.bool)},
        "attn_mask": {"attn_mask": bits},
        "functions": {
            "mask_mod": every_other, "score_mod": by_distance, "score_mod_grad": by_distance_grad,
        },
        "derived": {
            "right": 0, "score_mod": bent, "score_mod_grad": derivative.score_mod_grad(bent, ()),
        },
        "reading": {"right": 0, "score_mod": reading, "mod_tensors": (floats(H, 4096),)},
        "stride": {"causal": True, "left": 127, "stride": 128},
        "positions": {
            **by_position, "q_positions": integers(1, T), "k_positions": ids,
            "alibi_slopes": slopes, "fp32_results": True,
        },
        "row-positions": {**by_position, "q_positions": ids, "k_positions": integers(1, T)},
        # A part of a sequence that is spread over GPUs, for the Hopper kernels.
        "part": {
            "right": 0, "q_positions": integers(1, T), "k_positions": integers(1, T),
            "fp32_results": True,
        },
        "band": {
            **packed, "left": 9, "right": 9, "key_lengths": integers(8), "sinks": slopes,
        },
        "capped-band": {
            **packed, "left": 9, "right": 9, "key_lengths": integers(8), "sinks": slopes,
            "softcap": 5.0,
        },
    }  # fmt: skip
    results: dict[str, object] = {}
    for name in names.split("+"):
        results |= every[name]
    return Options(**results, scale=0.1)


def attention(
    kernels: str,
    D: int,
    options: str,
    dtype: str = "bf16",
    T: int = 1000,
    B: int = 2,
    H_k: int = 2,
) -> None:
    """Launch kernels of attention, joined by "+".

    "scores": the gradients of biases; "plain-forward": with the tile of a plain call.
    "max-forward": with the largest score of each row. "mods": the gradients of what a score_mod
    reads, by exact sums and by atomics.
    """
    given = options_of(options, B, T, 4, D, dtype)
    B = 1 if given.cu_seqlens_q is not None else B
    q, k = meta(B, 4, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    lse = floats(B, 4, T)
    backward = (q, lse if "masks" in options else None, q, k, k, q, lse, given)
    for kernel in kernels.split("+"):
        if kernel == "forward":
            launch_forward(q, k, k, given)
        elif kernel == "max-forward":
            launch_forward_with_max(q, k, k, given)
        elif kernel == "plain-forward":
            with tiles.forced(forward=tiles.lookup("forward", 2, D)):
                launch_forward(q, k, k, given)
        elif kernel == "backward":
            launch_backward(*backward)
        elif kernel == "one-pass":
            launch_backward_one_pass(*backward)
        elif kernel == "mods":
            function, loads = derivative.load_gradients(reading, given.mod_tensors, [True])
            given = given._replace(score_mod_grad=function)
            for atomic in (False, True):
                asked = given._replace(atomic_dq=atomic)
                launch_backward_mods(q, None, q, k, k, q, lse, loads, asked)
        elif given.attn_bias is not None:
            launch_backward_bias(q, q, k, k, lse, lse, given)
        else:
            launch_backward_relative(q, q, k, k, lse, lse, given)


def tangent(D: int, options: str, dtype: str = "bf16", T: int = 1000, B: int = 2) -> None:
    """Tangents of o and lse from those of q, k, v and of the biases that there are."""
    given = options_of(options, B, T, 4, D, dtype)
    q, k = meta(B, 4, T, D, dtype=DTYPES[dtype]), meta(B, 2, T, D, dtype=DTYPES[dtype])
    of = InputTangents(q, k, k, given.attn_bias, given.relative_bias, given.sinks)
    launch_tangent(q, k, k, of, q, floats(B, 4, T), given)


def tangent_backward(
    D: int, options: str, do: str = "do", dtype: str = "bf16", T: int = 1000
) -> None:
    """Backward of o and its tangent; do: "-" without a gradient of o, as in a double backward."""
    given, stats = options_of(options, 2, T, 4, D, dtype), floats(2, 4, T)
    q, k = meta(2, 4, T, D, dtype=DTYPES[dtype]), meta(2, 2, T, D, dtype=DTYPES[dtype])
    of = InputTangents(q, k, k, given.attn_bias, given.relative_bias, None)
    do_dlse = (q, stats) if do else (None, None)
    launch_tangent_backward(*do_dlse, q, stats, q, k, k, of, q, stats, q, stats, given)


def biases(D: int, **shape: int) -> None:
    """Launch the gradient of a bias of B, H, M and N, and with as many tokens."""
    B, H, M, N = (shape.get(name, n) for name, n in {"B": 2, "H": 4, "M": 64, "N": 64}.items())
    T = max(M, N)
    q, lse = meta(2, 4, T, D), floats(2, 4, T)
    given = Options(right=0, scale=0.1, attn_bias=meta(B, H, M, N))
    launch_backward_bias(q, q, q, q, lse, lse, given)


def heads(D: int, first: int = 1) -> None:
    """Launch the forward of some of 64 heads."""
    q = meta(2, 4, 1000, D)
    given = options_of("dropout")._replace(mask_mod=every_other, first_head=first, all_heads=64)
    launch_forward(q, q, q, given)


def beside(D: int) -> None:
    """Launch the kernels beside attention, with the tiles that its options take."""
    q, k, documents = meta(2, 4, 1000, D), meta(2, 2, 1000, D), options_of("documents")
    mask_for_queries(documents, q, k, tile_for("backward_dq", documents, q, D))
    mask_for_keys(documents, q, k, tile_for("backward_dkv", documents, q, D))


def additive(D: int, dtype: str, options: str = "masks", T: int = 1000, B: int = 2, H_k: int = 2,
             H_q: int = 4) -> None:  # fmt: skip
    """Launch forward and backward, hidden and value widths D."""
    q, k = meta(B, H_q, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    u, lse, given = floats(H_q, D), floats(B, H_q, T), options_of(options, B, T)
    launch_additive_forward(q, k, k, u, given)
    launch_additive_backward(q, lse, q, k, k, u, q, lse, given)


def selected(D: int, dtype: str, block_q: int = 1, block_k: int = 64, options: str = "causal",
             T: int = 1000, B: int = 2, H_k: int = 2, H_q: int = 32,
             n: int = 16) -> None:  # fmt: skip
    """Launch forward and backward over lists of n blocks, one list a K/V head."""
    q, k = meta(B, H_q, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    rows, lse, given = -(-T // block_q), floats(B, H_q, T), options_of(options, B, T, H_q)
    lists = integers(B, H_k, rows, n), integers(B, H_k, rows), (block_q, block_k)
    launch_selected_forward(q, k, k, *lists, given)
    launch_selected_backward(q, lse, q, k, k, q, lse, *lists, given)


def block_scores(D: int, dtype: str, T: int = 1000, B: int = 2, H_k: int = 2, H_q: int = 32,
                 first: int = 0) -> None:  # fmt: skip
    """Score blocks of 64 tokens by weights of keys of 32, and by the largest scores of tokens."""
    q, lse = meta(B, H_q, T, D, dtype=DTYPES[dtype]), floats(B, H_q, T)
    rows, blocks = (first, T), -(-T // 64)
    for pool, given in (((32, 16), lse), ((1, 1), None)):
        keys = meta(B, H_k, max(1, (T - pool[0]) // pool[1] + 1), D, dtype=DTYPES[dtype])
        how = (H_k, 64 // pool[1], pool, blocks, rows, first, 0.1, True)
        launch_block_scores(q, keys, given, *how)


def statistics(D: int, dtype: str, options: str = "masks", T: int = 1000, B: int = 2, H_k: int = 2,
               H_q: int = 4, top: int = 8) -> None:  # fmt: skip
    """Launch every kernel of statistics."""
    q, k = meta(B, H_q, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    lse, given = floats(B, H_q, T), options_of(options, B, T)
    launch_row_statistics(q, k, lse, given, top)
    launch_received(q, k, lse, given)
    launch_weights(q, k, lse, given)


def cache_of(kind: str, D: int, dtype: str, codes: str | None, B: int, H_k: int, slots: int,
             table_width: int) -> CacheTensors:  # fmt: skip
    """Tensors of a cache: "contiguous", "sliced", "ring", or "paged-128", pages of 128 slots.

    "latent" and "latent-128" have keys of 64 columns more, which are the values but for those;
    "record" keeps four groups of codes with scales, and those 64 columns as they are.
    """
    kind, _, page = kind.partition("-")
    slots = int(page or slots)
    # Somebody else's rows may be parts of longer ones, which start anywhere.
    width = D + {"sliced": 2, "latent": 64, "record": 16 + 128}.get(kind, 0)
    stored = meta(9, H_k, slots, width, dtype=STORAGE[codes] if codes else DTYPES[dtype])
    k, stored = stored[..., D:], stored[..., :D]
    scale = floats(9, H_k, slots) if codes else None
    shared, k_scale = kind in ("latent", "record"), scale
    if kind == "record":
        k, k_scale = k[..., 16:].view(torch.bfloat16), None
        scale = floats(9, H_k, slots, width // 4)[..., :4]
    paged = kind == "paged" or page != ""
    table = integers(9, table_width) if paged else None
    index = integers(B) if paged else None
    lengths = integers(9)
    turn = 3 if kind == "ring" else None
    k = k if shared else stored
    return CacheTensors(k, stored, k_scale, scale, table, lengths, lengths, index, turn, shared)


def decode(
    kind: str,
    D: int,
    dtype: str = "bf16",
    codes: str | None = None,
    T: int = 1,
    options: str = "causal",
    B: int = 2,
    H_q: int = 8,
    H_k: int = 2,
    slots: int = 4096,
    table_width: int = 300,
    splits: int | None = 4,
) -> None:
    """Decode from one kind of cache, in the layout of a projection."""
    slopes = floats(H_q)
    given = Options(scale=0.1, causal=True, **{
        "causal": {}, "mod": {"mask_mod": every_other},
        "scores": {
            "left": 900, "keep_first": 4, "softcap": 30.0, "alibi_slopes": slopes, "sinks": slopes,
        },
    }[options])  # fmt: skip
    cache = cache_of(kind, D, dtype, codes, B, H_k, slots, table_width)
    width = cache.shared * D + cache.k.shape[3]
    q = meta(B, T, H_q, width, dtype=DTYPES[dtype]).transpose(1, 2)
    launch_decode(q, cache, None, None, given, splits=splits)


def packed(
    D: int,
    dtype: str = "bf16",
    codes: str | None = None,
    options: str = "plain",
    page_size: int = 16,
    B: int = 17,
    total: int = 90,
    longest: int | None = None,
    H_q: int = 8,
    H_k: int = 2,
    pages: int = 300,
) -> None:
    """Launch a step of a server, whose pages have K beside V, as vLLM's have."""
    kv = meta(40, H_k, page_size, 2 * D, dtype=STORAGE[codes] if codes else DTYPES[dtype])
    scale = floats(1, H_k, 1).expand(40, H_k, page_size) if codes else None
    lengths, table, slopes = integers(B), integers(B, pages), floats(H_q)
    tensors = (kv[..., :D], kv[..., D:], scale, scale, table, lengths, lengths, None, None)
    given = Options(scale=0.1, causal=True, **{
        "plain": {},
        "tree": {"tree_mask": meta(total, 64, dtype=torch.bool)},
        "scores": {
            "left": 900, "keep_first": 4, "softcap": 30.0, "alibi_slopes": slopes, "sinks": slopes,
        },
    }[options])  # fmt: skip
    q, lse = meta(total, H_q, D, dtype=DTYPES[dtype]), floats(H_q, total)
    longest = total if longest is None else longest
    cache = CacheTensors(*tensors)
    launch_packed(q, integers(B + 1), cache, None, q, lse, given, longest=longest)


def few_queries(by_token: int = 0, T: int = 4096, H_k: int = 2) -> None:
    """Decode keys without a cache, that lie by head or by token."""
    sizes, dims = ((T, H_k), (1, 2)) if by_token else ((H_k, T), (1, 1))
    k = meta(1, *sizes, 48).transpose(*dims)
    launch_few_queries(meta(1, 8, 1, 48), k, k, Options(scale=0.1, causal=True))


def merge(D: int) -> None:
    launch_merge(meta(7, D), floats(7), meta(7, D), floats(7))
    o, lse = meta(7, 8, D), floats(8, 7)
    launch_merge_prefix(o, lse, o, lse, integers(3))


def append(
    kind: str,
    codes: str | None,
    rotary: str | None,
    D: int = 128,
    B: int = 2,
    T: int = 5,
    H_q: int = 4,
    H_k: int = 2,
    slots: int = 100,
    table_width: int = 7,
) -> None:
    """Append to one kind of cache, in the layout of a projection; "slots": to those of one row."""
    given: dict[str, Any] = {}
    if kind == "slots":
        B, given = 1, {"slots": integers(T), "positions": integers(T) if rotary else None}
    q, k = (meta(B, T, H, D).transpose(1, 2) for H in (H_q, H_k))
    tables = (floats(64, D // 4),) * 2 if rotary else (None, None)
    held = "paged" if given else kind
    cache = cache_of(held, D, "bf16", codes, B, H_k, slots, table_width)
    new_lengths = None if given or kind == "contiguous" else integers(B)
    launch_append(
        q if rotary else None, k, k, new_lengths, cache, *tables,
        interleaved=rotary == "interleaved", advance=kind not in ("ring", "slots"), **given,
    )  # fmt: skip


def one_pass_config(D: int, how: str) -> HopperConfig:
    """One pass by TMA, or by threads that add to dQ; `how` may end with a number of stages."""
    config = backward_config("one_pass", D, False, False)
    if how.startswith("threads"):
        config = config._replace(DQ_BY_TMA=False, STAGES=int(how.partition("-")[2] or 2))
    return config


def head_dims(D: int | str) -> tuple[int, int]:
    """Head dims of q and of v, as "192/128" says them, or one for both."""
    first, _, second = str(D).partition("/")
    return int(first), int(second or first)


def hopper(kernel: str, D: int | str, options: str, how: str | None = None, T: int = 1000) -> None:
    """Launch a Hopper kernel. how: "turns", of consumers; "max", with each row's largest score; or
    as in `one_pass_config`.
    """
    D, D_v = head_dims(D)
    given = options_of(options, 1, T)
    T = 40000 if given.cu_seqlens_q is not None else T  # so many tiles are put in order
    q, k, lse = meta(1, 4, T, D), meta(1, 2, T, D), floats(1, 4, T)
    o, v = meta(1, 4, T, D_v), meta(1, 2, T, D_v)
    if kernel == "forward":
        config = forward_config(D, end_early(given), given.q_positions is not None, D_v)
        config = config._replace(PING_PONG=how == "turns")
        with mock.patch.object(hopper_forward, "forward_config", lambda *_: config):
            launches.forget()
            forward = hopper_forward.launch_hopper_forward
            if how == "max":
                forward = hopper_forward.launch_hopper_forward_with_max
            forward(q, k, v, given)
        return
    forced = {"hopper_one_pass": one_pass_config(D, how)} if how else {}
    with tiles.forced(**forced):
        given = given._replace(atomic_dq=kernel == "one-pass")
        launch_hopper_backward(o, lse, q, k, v, o, lse, given)


def hopper_fp8(D: int, options: str, T: int = 1000, B: int = 3, H: int = 2) -> None:
    given = Options(right=0, scale=0.1)
    scales = (floats(B, 2 * H), floats(B, H), floats(B, H))
    if options == "all":
        lengths = integers(B)
        given = Options(
            left=9, right=9, key_lengths=lengths, query_offsets=lengths, prefix_lengths=lengths,
            causal=True, keep_first=2, scale=0.1, softcap=5.0, sinks=floats(2 * H),
        )  # fmt: skip
    if options == "packed":
        offsets = integers(B + 1)
        given, B = given._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets), 1
    q, k, v = (
        meta(B, *shape, dtype=STORAGE["fp8"])
        for shape in ((2 * H, T, D), (H, T, D), (H, D, -(-T // 16) * 16))
    )
    hopper_forward.launch_hopper_forward_fp8(q, k, v, scales, torch.bfloat16, given)


def fp8_codes(D: int, T: int = 1000, B: int = 3, H: int = 2) -> None:
    """Quantise, packed and not, and pack, rows of lengths and packed sequences."""
    x = meta(B, T, H, D).transpose(1, 2)
    for rows, lengths, offsets in ((x, integers(B), None), (x[:1], None, integers(B + 1))):
        for packed in (False, True):
            launch_head_codes(rows, lengths, offsets, packed)
        launch_pack_values(rows.to(STORAGE["fp8"]), offsets)


LAUNCHES: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (attention, tangent, tangent_backward, biases, heads, beside, additive, selected,
              block_scores, statistics, decode, packed,
              few_queries, merge, append, hopper, hopper_fp8, fp8_codes)
}  # fmt: skip
