"""Launches of every kernel on meta tensors, by the words of a table: what compilers are given."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from fuzz.mods import ahead_or_near, halved, halved_grad
from torch import Tensor

from fastattn import kernels
from fastattn.jit_functions import derivative
from fastattn.kernels.hopper.tile_table import HopperConfig, backward_config
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.block_sparsity import mask_for_keys, mask_for_queries
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bool": torch.bool,
    "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip


def meta(*shape: int, dtype: str = "bf16") -> Tensor:
    return torch.empty(*shape, dtype=DTYPES[dtype], device="meta")


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype="fp32")


def integers(*shape: int) -> Tensor:
    return meta(*shape, dtype="int32")


def rows(
    D: int, dtype: str = "bf16", T: int = 1000, B: int = 2, H_k: int = 2, H_q: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, which is v too, and lse."""
    q, k = (meta(B, H, T, D, dtype=dtype) for H in (H_q, H_k))
    return q, k, floats(B, H_q, T)


def sized(given: dict[str, Any], **usual: Any) -> Any:
    """Sizes of a launch, of which some are given."""
    assert given.keys() <= usual.keys(), given
    return SimpleNamespace(**usual | given)


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
    lengths, ids, of_tokens = integers(B), integers(B, T), integers(1, T)
    bits, padding = meta(B, 1, T, T, dtype="bool"), meta(B, T, dtype="bool")
    slopes, starts, read = floats(H), integers(9), (integers(T),)
    dropout = {"dropout": 0.1, "dropout_seed": meta(2, dtype="int64")}
    documents = {"q_documents": ids, "k_documents": ids}
    packed = {"query_offset": None, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    near = {"left": 9, "right": 9}
    band = {**packed, **near, "key_lengths": integers(8), "sinks": slopes}
    by_position = {"causal": True, "left": 300}
    of_causal: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"left": 99},
        # All that the largest tiles serve.
        "plain": {"key_lengths": lengths, "query_offsets": lengths, "sinks": slopes},
        "documents": documents,
        "mask_mod": {"mask_mod": before, "mod_tensors": read},
        "varlen": packed,
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes, "sinks": slopes},
        "relative_bias": {"relative_bias": floats(H, 257)},
        # Every tensor for distances that there is.
        "relative": {
            "relative_bias": meta(H, 513, dtype=dtype),
            "relative_keys": meta(1, 513, D, dtype=dtype),
            "relative_query": meta(B, H, T, D, dtype=dtype),
        },
        "two": {"query2": meta(B, H, T, 64, dtype=dtype), "key2": meta(B, 1, T, 64, dtype=dtype)},
        "attn_bias": {"attn_bias": meta(1, H, T, T)},
        "attn_bias-fp32": {"attn_bias": floats(1, H, T, T)},
        "attn_bias-by-pointers": {"attn_bias": meta(1, H, T, T + 1)[..., :T]},
        "dropout": dropout,
        "key_padding": {"key_padding_mask": padding},
        "derived": {"score_mod": bent, "score_mod_grad": derivative.score_mod_grad(bent, ())},
        "reading": {"score_mod": reading, "mod_tensors": (floats(H, 4096),)},
        # A part of a sequence that is spread over GPUs, for the Hopper kernels.
        "part": {"q_positions": of_tokens, "k_positions": of_tokens, "fp32_results": True},
    }
    every: dict[str, dict[str, Any]] = {name: {"right": 0, **x} for name, x in of_causal.items()}
    every |= {
        "full": {},
        # Masks that cost registers in the loop over boundary blocks.
        "masks": {
            "key_padding_mask": padding, "key_lengths": lengths, "query_offsets": lengths, **near,
        },
        # Every mask and score at once, but relative keys.
        "heavy": {
            **documents, **dropout, "prefix_lengths": lengths, "attn_mask": bits, "left": 9,
            "alibi_slopes": slopes, "attn_bias": meta(1, H, T, T), "relative_bias": floats(H, 257),
            "sinks": slopes, "mod_tensors": read, "causal": True, "keep_first": 4, "stride": 7,
            "softcap": 30.0, "mask_mod": before, "score_mod": steeper,
            "score_mod_grad": steeper_grad,
        },
        "prefix": {"causal": True, "prefix_lengths": lengths},
        "first": {"causal": True, "left": 9, "keep_first": 4},
        "attn_mask": {"attn_mask": bits},
        "functions": {
            "mask_mod": ahead_or_near, "score_mod": halved, "score_mod_grad": halved_grad,
        },
        "stride": {"causal": True, "left": 127, "stride": 128},
        "positions": {
            **by_position, "q_positions": of_tokens, "k_positions": ids, "alibi_slopes": slopes,
            "fp32_results": True,
        },
        "row-positions": {**by_position, "q_positions": ids, "k_positions": of_tokens},
        "band": band,
        "capped-band": {**band, "softcap": 5.0},
    }  # fmt: skip
    results: dict[str, object] = {}
    for name in names.split("+"):
        results |= every[name]
    return Options(**results, scale=0.1)


def attention(names: str, D: int, options: str, dtype: str = "bf16", T: int = 1000, B: int = 2,
              H_k: int = 2) -> None:  # fmt: skip
    """Launch kernels of attention, joined by "+".

    "scores": the gradients of biases; "plain-forward": with the tile of a plain call.
    "max-forward": with the largest score of each row. "mods": the gradients of what a score_mod
    reads, by exact sums and by atomics.
    """
    given = options_of(options, B, T, 4, D, dtype)
    B = 1 if given.cu_seqlens_q is not None else B
    q, k, lse = rows(D, dtype, T, B, H_k)
    backward = (q, lse if "masks" in options else None, q, k, k, q, lse)

    def plain_forward() -> None:
        with tiles.forced(forward=tiles.lookup("forward", 2, D)):
            kernels.forward.launch_forward(q, k, k, given)

    def mods() -> None:
        function, loads = derivative.load_gradients(reading, given.mod_tensors, [True])
        for atomic in (False, True):
            asked = given._replace(score_mod_grad=function, atomic_dq=atomic)
            kernels.backward_mods.launch_backward_mods(q, None, q, k, k, q, lse, loads, asked)

    def scores() -> None:
        launch = kernels.backward_relative.launch_backward_relative
        if given.attn_bias is not None:
            launch = kernels.backward_bias.launch_backward_bias
        launch(q, q, k, k, lse, lse, given)

    launches_by_name: dict[str, Callable[[], object]] = {
        "forward": lambda: kernels.forward.launch_forward(q, k, k, given),
        "max-forward": lambda: kernels.forward.launch_forward_with_max(q, k, k, given),
        "plain-forward": plain_forward,
        "backward": lambda: kernels.backward.launch_backward(*backward, "qkv", given),
        "one-pass": lambda: kernels.backward.launch_backward_one_pass(*backward, given),
        "mods": mods,
        "scores": scores,
    }
    for kernel in names.split("+"):
        launches_by_name[kernel]()


def tangent(D: int, options: str, dtype: str = "bf16", T: int = 1000, B: int = 2) -> None:
    """Tangents of o and lse from those of q, k, v and of the biases that there are."""
    given, (q, k, lse) = options_of(options, B, T, 4, D, dtype), rows(D, dtype, T, B)
    of = kernels.tangent.InputTangents(q, k, k, given.attn_bias, given.relative_bias, given.sinks)
    kernels.tangent.launch_tangent(q, k, k, of, q, lse, given)


def tangent_backward(D: int, options: str, do: str = "do", dtype: str = "bf16") -> None:
    """Backward of o and its tangent; do: "-" without a gradient of o, as in a double backward."""
    given, (q, k, stats) = options_of(options, D=D, dtype=dtype), rows(D, dtype)
    of = kernels.tangent.InputTangents(q, k, k, given.attn_bias, given.relative_bias, None)
    do_dlse = (q, stats) if do else (None, None)
    kernels.tangent_backward.launch_tangent_backward(
        *do_dlse, q, stats, q, k, k, of, q, stats, q, stats, given
    )


def biases(D: int, **sizes: int) -> None:
    """Launch the gradient of a bias of B, H, M and N, and with as many tokens."""
    s = sized(sizes, B=2, H=4, M=64, N=64)
    q, _, lse = rows(D, T=max(s.M, s.N))
    given = Options(right=0, scale=0.1, attn_bias=meta(s.B, s.H, s.M, s.N))
    kernels.backward_bias.launch_backward_bias(q, q, q, q, lse, lse, given)


def heads(D: int, first: int = 1) -> None:
    """Launch the forward of some of 64 heads."""
    q, _, _ = rows(D)
    given = options_of("dropout")._replace(mask_mod=ahead_or_near, first_head=first, all_heads=64)
    kernels.forward.launch_forward(q, q, q, given)


def beside(D: int) -> None:
    """Launch the kernels beside attention, with the tiles that its options take."""
    documents, (q, k, _) = options_of("documents"), rows(D)
    mask_for_queries(documents, q, k, kernels.arguments.tile_for("backward_dq", documents, q, D))
    mask_for_keys(documents, q, k, kernels.arguments.tile_for("backward_dkv", documents, q, D))


def selected(D: int, dtype: str, block_q: int = 1, block_k: int = 64, options: str = "causal",
             T: int = 1000, B: int = 2, H_k: int = 2, H_q: int = 32,
             n: int = 16) -> None:  # fmt: skip
    """Launch forward and backward over lists of n blocks, one list a K/V head."""
    (q, k, lse), given = rows(D, dtype, T, B, H_k, H_q), options_of(options, B, T, H_q)
    shape = (B, H_k, -(-T // block_q))
    lists = integers(*shape, n), integers(*shape), (block_q, block_k)
    kernels.selected_forward.launch_selected_forward(q, k, k, *lists, given)
    kernels.selected_backward.launch_selected_backward(q, lse, q, k, k, q, lse, *lists, given)


def block_scores(D: int, dtype: str, T: int = 1000, B: int = 2, first: int = 0) -> None:
    """Score blocks of 64 tokens by weights of keys of 32, and by the largest scores of tokens."""
    q, _, lse = rows(D, dtype, T, B, H_q=32)
    of_rows, blocks = (first, T), -(-T // 64)
    for pool, given in (((32, 16), lse), ((1, 1), None)):
        keys = meta(B, 2, max(1, (T - pool[0]) // pool[1] + 1), D, dtype=dtype)
        how = (2, 64 // pool[1], pool, blocks, of_rows, first, 0.1, True)
        kernels.selected_choose.launch_block_scores(q, keys, given, *how)


def statistics(D: int, dtype: str, options: str = "masks", top: int = 8, **sizes: int) -> None:
    """Launch every kernel of statistics."""
    s = sized(sizes, T=1000, B=2, H_k=2, H_q=4)
    (q, k, lse), given = rows(D, dtype, **vars(s)), options_of(options, s.B, s.T)
    kernels.statistics.launch_row_statistics(q, k, lse, given, top)
    kernels.statistics.launch_received(q, k, lse, given)
    kernels.statistics.launch_weights(q, k, lse, given)


def cache_of(kind: str, D: int, dtype: str, s: Any) -> CacheTensors:
    """Tensors of a cache: "contiguous", "sliced", "ring", or "paged-128", pages of 128 slots.

    "latent" and "latent-128" have keys of 64 columns more, which are the values but for those;
    "record" keeps four groups of codes with scales, and those 64 columns as they are. dtype: of
    numbers, or of codes with scales.
    """
    kind, _, page = kind.partition("-")
    slots = int(page or s.slots)
    # Somebody else's rows may be parts of longer ones, which start anywhere.
    width = D + {"sliced": 2, "latent": 64, "record": 16 + 128}.get(kind, 0)
    stored = meta(9, s.H_k, slots, width, dtype=dtype)
    k, stored = stored[..., D:], stored[..., :D]
    scale = floats(9, s.H_k, slots) if "8" in dtype else None
    shared, k_scale = kind in ("latent", "record"), scale
    if kind == "record":
        k, k_scale = k[..., 16:].view(torch.bfloat16), None
        scale = floats(9, s.H_k, slots, width // 4)[..., :4]
    paged = kind == "paged" or page != ""
    table = integers(9, s.table_width) if paged else None
    index = integers(s.B) if paged else None
    lengths = integers(9)
    turn = 3 if kind == "ring" else None
    k = k if shared else stored
    return CacheTensors(k, stored, k_scale, scale, table, lengths, lengths, index, turn, shared)


def decoding_options(name: str, H_q: int, total: int = 1) -> Options:
    slopes = floats(H_q)
    scores = {"softcap": 30.0, "alibi_slopes": slopes, "sinks": slopes}
    every: dict[str, dict[str, Any]] = {
        "causal": {},
        "mod": {"mask_mod": ahead_or_near},
        "tree": {"tree_mask": meta(total, 64, dtype="bool")},
        "scores": {"left": 900, "keep_first": 4, **scores},
    }
    return Options(scale=0.1, causal=True, **every[name])


def decode(kind: str, D: int, dtype: str = "bf16", codes: str | None = None, T: int = 1,
           options: str = "causal", **sizes: Any) -> None:  # fmt: skip
    """Decode from one kind of cache, in the layout of a projection."""
    s = sized(sizes, B=2, H_q=8, H_k=2, slots=4096, table_width=300, splits=4)
    cache = cache_of(kind, D, codes or dtype, s)
    width = cache.shared * D + cache.k.shape[3]
    q = meta(s.B, T, s.H_q, width, dtype=dtype).transpose(1, 2)
    kernels.decode.launch_decode(
        q, cache, None, None, decoding_options(options, s.H_q), splits=s.splits
    )


def decode_once(*arguments: Any) -> None:
    """`decode`, whose last programs merge the parts."""
    with tiles.forced(one_launch=True):
        decode(*arguments)


def packed(D: int, dtype: str = "bf16", codes: str | None = None, options: str = "causal",
           **sizes: Any) -> None:  # fmt: skip
    """Launch a step of a server, whose pages have K beside V, as vLLM's have."""
    s = sized(sizes, page_size=16, B=17, total=90, longest=None, H_q=8, H_k=2, pages=300)
    kv = meta(40, s.H_k, s.page_size, 2 * D, dtype=codes or dtype)
    scale = floats(1, s.H_k, 1).expand(40, s.H_k, s.page_size) if codes else None
    lengths, table = integers(s.B), integers(s.B, s.pages)
    tensors = (kv[..., :D], kv[..., D:], scale, scale, table, lengths, lengths, None, None)
    given = decoding_options(options, s.H_q, s.total)
    q, lse = meta(s.total, s.H_q, D, dtype=dtype), floats(s.H_q, s.total)
    longest = s.total if s.longest is None else s.longest
    cache = CacheTensors(*tensors)
    kernels.decode.launch_packed(q, integers(s.B + 1), cache, None, q, lse, given, longest=longest)


def few_queries(by_token: int = 0, T: int = 4096, H_k: int = 2) -> None:
    """Decode keys without a cache, stored by head or by token."""
    sizes, dims = ((T, H_k), (1, 2)) if by_token else ((H_k, T), (1, 1))
    k = meta(1, *sizes, 48).transpose(*dims)
    kernels.forward.launch_few_queries(meta(1, 8, 1, 48), k, k, Options(scale=0.1, causal=True))


def merge(D: int) -> None:
    kernels.combine.launch_merge(meta(7, D), floats(7), meta(7, D), floats(7))
    o, lse = meta(7, 8, D), floats(8, 7)
    kernels.combine.launch_merge_prefix(o, lse, o, lse, integers(3))


def append(
    kind: str, codes: str | None, rotary: str | None, D: int = 128, T: int = 5, **sizes: int
) -> None:
    """Append to one kind of cache, in the layout of a projection; "slots": to those of one row."""
    s = sized(sizes, B=2, H_q=4, H_k=2, slots=100, table_width=7)
    given: dict[str, Any] = {}
    if kind == "slots":
        s.B, given = 1, {"slots": integers(T), "positions": integers(T) if rotary else None}
    q, k = (meta(s.B, T, H, D).transpose(1, 2) for H in (s.H_q, s.H_k))
    tables = (floats(64, D // 4),) * 2 if rotary else (None, None)
    cache = cache_of("paged" if given else kind, D, codes or "bf16", s)
    new_lengths = None if given or kind == "contiguous" else integers(s.B)
    kernels.append.launch_append(
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
    (q, k, lse), (o, v, _) = rows(D, T=T, B=1), rows(D_v, T=T, B=1)
    if kernel == "forward":
        config = kernels.hopper_forward.configure(given, q, v)._replace(PING_PONG=how == "turns")
        name = "launch_hopper_forward" + "_with_max" * (how == "max")
        with mock.patch.object(kernels.hopper_forward, "configure", lambda *_: config):
            launches.forget()
            getattr(kernels.hopper_forward, name)(q, k, v, given)
        return
    forced = {"hopper_one_pass": one_pass_config(D, how)} if how else {}
    with tiles.forced(**forced):
        given = given._replace(atomic_dq=kernel == "one-pass")
        kernels.hopper_backward.launch_hopper_backward(o, lse, q, k, v, o, lse, "qkv", given)


def hopper_fp8(D: int, options: str, T: int = 1000, B: int = 3, H: int = 2) -> None:
    given = Options(right=0, scale=0.1)
    scales, lengths = (floats(B, 2 * H), floats(B, H), floats(B, H)), integers(B)
    if options == "all":
        given = Options(
            left=9, right=9, key_lengths=lengths, query_offsets=lengths, prefix_lengths=lengths,
            causal=True, keep_first=2, scale=0.1, softcap=5.0, sinks=floats(2 * H),
        )  # fmt: skip
    if options == "packed":
        offsets = integers(B + 1)
        given, B = given._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets), 1
    q, k, v = (
        meta(B, *shape, dtype="fp8")
        for shape in ((2 * H, T, D), (H, T, D), (H, D, -(-T // 16) * 16))
    )
    kernels.hopper_forward.launch_hopper_forward_fp8(q, k, v, scales, torch.bfloat16, given)


def fp8_codes(D: int, T: int = 1000, B: int = 3, H: int = 2) -> None:
    """Quantise, packed and not, and pack, rows of lengths and packed sequences."""
    x = meta(B, T, H, D).transpose(1, 2)
    for given, lengths, offsets in ((x, integers(B), None), (x[:1], None, integers(B + 1))):
        for as_packed in (False, True):
            kernels.fp8_quantize.launch_head_codes(given, lengths, offsets, as_packed)
        kernels.fp8_values.launch_pack_values(given.to(DTYPES["fp8"]), offsets)


LAUNCHES: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (attention, tangent, tangent_backward, biases, heads, beside, selected,
              block_scores, statistics, decode, decode_once, packed,
              few_queries, merge, append, hopper, hopper_fp8, fp8_codes)
}  # fmt: skip
