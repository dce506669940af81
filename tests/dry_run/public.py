"""A call of every public name, by that name; the second word of a key says which one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import calls
import torch
import torch.nn.functional as F
import triton
from calls import (
    chosen,
    dense,
    far_keys,
    named,
    ones,
    packed,
    paged,
    random,
    train,
    zeros,
)
from torch import Tensor, nn

import fastattn
from fastattn import BlockMask, KVCache, QuantizedKVCache
from fastattn.testing.compare import DIFFERENTIABLE
from fastattn.testing.inputs import to_device
from fastattn.testing.option_examples import option_examples

Calls = dict[str, Callable[[], object]]
# What others return, raise or are given; and what looks at numbers and times, of which a dry run
# has none.
NO_CALLS = {
    "AttentionStatistics", "BlockGradients", "CacheView", "Explanation", "OutOfPages",
    "PackedValues", "tune", "verify",
}  # fmt: skip
# Called by custom operators whether or not something traces, so here their fakes answer.
BY_OPERATOR = {"selected_attention", "moba_attention"}
# Refused where something traces.
UNTRACED = {"attention mod_tensors"}
KERNELS_BY_OPERATOR = {
    "attention_tangent_kernel", "block_scores_kernel", "selected_forward_kernel",
    "selected_backward_dq_kernel", "selected_backward_dkv_kernel", "tangent_backward_dkv_kernel",
    "tangent_backward_dq_kernel",
}  # fmt: skip
# Of `option_examples`, one for each option.
EXAMPLES = (
    "window-first", "stride", "prefix", "documents", "lengths", "padding", "mask", "mask-mod",
    "offsets", "positions", "softcap", "alibi", "relative-bias", "relative-query", "two-products",
    "bias", "sinks", "score-mod", "heads",
)  # fmt: skip
B, H, T, D = 2, 4, 64, 64


@triton.jit
def checkered(b, h, q_pos, k_pos):
    return (q_pos + k_pos) % 2 == 0


def all_calls() -> Calls:
    actual = {**attention_calls(), **cache_calls(), **module_calls(), **other_calls()}
    named = {*actual, *without_launches()}
    left = set(fastattn.__all__) - NO_CALLS - {name.split()[0] for name in named}
    assert not left, f"{sorted(left)} have no call here"
    return actual


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


def learned(option: dict[str, Any]) -> dict[str, Any]:
    """An option on the GPU, whose gradients are asked."""
    on_gpu = to_device(option, "cuda")
    for name in on_gpu.keys() & set(DIFFERENTIABLE):
        if on_gpu[name].is_floating_point():
            on_gpu[name] = on_gpu[name].bfloat16().requires_grad_()
    return on_gpu


def attention_calls() -> Calls:
    examples = option_examples(H, 2, T, T, D, reach=16)
    options: dict[str, dict[str, Any]] = {
        "causal": {},
        "full": {"causal": False},
        **{name: learned(examples[name]) for name in EXAMPLES},
        "attn_bias": {"attn_bias": zeros(1, H, 1, T)},
        "mod_tensors": {"score_mod": far_keys, "mod_tensors": (gpu(H).requires_grad_(),)},
        "deterministic": {"deterministic": False},
        "hopper": {"backend": "hopper"},
        "hopper,one_pass": {"backend": "hopper", "deterministic": False},
        "hopper,mask_mod": {"backend": "hopper", "mask_mod": BlockMask(checkered, per_head=False)},
    }
    calls_by_name: Calls = {
        f"attention {name}": partial(train, B, T, **{"causal": True, **given})
        for name, given in options.items()
    }
    mask = BlockMask(checkered)
    return calls_by_name | {
        "BlockMask": lambda: train(B, T, mask_mod=mask),
        "attention twice": differentiated_twice,
        "attention_varlen": lambda: packed(10, 54),
        "attention_varlen dropout": lambda: packed(10, 54, dropout=0.1),
        "attention_varlen hopper": lambda: packed(10, 54, backend="hopper"),
        "attention_varlen hopper, tiles in order": lambda: packed(50000, 54, backend="hopper"),
        "selected_attention": lambda: named("selected_attention", B, T),
        "native_sparse_attention": lambda: chosen(B, T),
        "moba_attention": lambda: chosen(B, T),
        "decode_selected": selected_pages,
        "select_blocks": lambda: fastattn.select_blocks(
            random(B, 4, T, D), random(B, 2, T, D), 2, block_k=16
        ),
        "attention_block_forward": lambda: of_a_part(torch.float32),
        "attention_block_backward": lambda: of_a_part(torch.float32, sinks=zeros(H)),
        "dot_product_attention": lambda: named("dot_product_attention", B, T),
        "multiplicative_attention": lambda: named("multiplicative_attention", B, T),
        "merge": lambda: calls.merged(B, T),
        "warmup": lambda: fastattn.warmup(D, calls=("causal", "varlen+causal")),
    }


def of_a_part(out_dtype: torch.dtype, **options: Any) -> None:
    q, k, v, do = (random(B, H, T, D) for _ in range(4))
    how: dict[str, Any] = {"out_dtype": out_dtype, **options}
    o, lse = fastattn.attention_block_forward(q, k, v, **how)
    fastattn.attention_block_backward(do, q, k, v, o, lse, **how)


def differentiated_twice() -> None:
    q, k, v = (torch.randn(B, H, 16, D, device="cuda", requires_grad=True) for _ in range(3))
    (once,) = torch.autograd.grad(fastattn.attention(q, k, v).sum(), q, create_graph=True)
    once.sum().backward()


def cache_calls() -> Calls:
    pages = random(9, 2, 16, D), random(9, 2, 16, D)
    quantized = partial(dense, B, T, QuantizedKVCache)
    return {
        "KVCache": lambda: dense(B, T),
        "KVCache ring": lambda: dense(B, T, window=8, keep_first=2, steps=70),
        "KVCache books": keep_books,
        "KVCache rotary": lambda: calls.rotated(B, 3),
        "QuantizedKVCache int8": lambda: quantized(quantize="int8"),
        "QuantizedKVCache fp8": lambda: quantized(quantize="fp8"),
        "PagedKVCache": lambda: paged(B, 16),
        "decode_attention options": partial(
            fastattn.decode_attention,
            random(B, 8, 3, D),
            filled(),
            window=8,
            sinks=gpu(8),
            alibi_slopes=gpu(8),
            new_lengths=ones(B),
            num_splits=2,
            return_lse=True,
        ),
        "attention_paged": paged_step,
        "attention_paged tree": lambda: paged_step(
            tree_mask=gpu(70, 66, dtype=torch.bool), window=8, alibi_slopes=gpu(8)
        ),
        "shared_pages": lambda: paged_step(share=True, softcap=2.0),
        "append_paged": lambda: fastattn.append_paged(
            pages, random(70, 2, D), random(70, 2, D), ones(70)
        ),
        "cascade_attention": lambda: fastattn.cascade_attention(
            random(3, 8, 1, D), filled(1), filled(3)
        ),
        "view_of_tensors": lambda: fastattn.decode_attention(
            random(B, 8, 1, D),
            fastattn.view_of_tensors(random(B, 2, T, D), random(B, 2, T, D), ones(B)),
        ),
    }


def paged_step(share: bool = False, **options: Any) -> None:
    k, v = random(9, 2, 16, D), random(9, 2, 16, D)
    view = fastattn.view_of_tensors(k, v, ones(4), block_table=gpu(4, 8, dtype=torch.int32))
    q, offsets = random(70, 8, D), ones(5)
    if share:
        options["shared"] = fastattn.shared_pages(view, offsets, ones(3), ones(2))
    for out in (None, random(70, 8, D)):
        fastattn.attention_paged(q, view, offsets, out=out, return_lse=True, **options)
    fastattn.attention_paged(q, view, offsets, max_seqlen_q=1, **options)


def filled(rows: int = B) -> KVCache:
    cache = KVCache(rows, 2, max_length=T, head_dim=D, device="cuda", dtype=torch.bfloat16)
    cache.append(random(rows, 2, 12, D), random(rows, 2, 12, D))
    return cache


def keep_books() -> None:
    cache = filled()
    cache.append(random(B, 2, 3, D), random(B, 2, 3, D), new_lengths=ones(B))
    cache.truncate(5)
    cache.truncate(ones(B))
    cache.reorder(ones(B).long())
    cache.set_starts(ones(B))
    fastattn.decode_attention(random(B, 8, 1, D), cache)
    cache.reset()


def module_calls() -> Calls:
    layers = {
        "GQAttention": partial(fastattn.GQAttention, num_kv_heads=1),
        "CausalGQAttention": partial(fastattn.CausalGQAttention, num_kv_heads=1),
        "CausalGQAttention rotary": partial(
            fastattn.CausalGQAttention, rotary="half", attention_dropout=0.1
        ),
        "NativeSparseAttention": partial(
            fastattn.NativeSparseAttention, num_kv_heads=1, block_k=16, n=3, window=8, pool=(8, 4)
        ),
        "MoBAttention": partial(fastattn.MoBAttention, block_k=16, n=2),
        "swap": swapped_layer,
    }
    of_layers: Calls = {name: partial(forward_backward, make) for name, make in layers.items()}
    return of_layers | {
        "CausalGQAttention cached": cached_layer,
        "MultiheadLatentAttention": lambda: forward_backward(latent_layer),
        "LatentCache": latents,
        "PagedLatentCache": latent_pages,
        "CrossGQAttention": cross_layer,
        "MultiheadAttention": multihead,
        "patch_sdpa": patched,
        "unpatch_sdpa": patched,
    }


ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def forward_backward(make: Callable[..., nn.Module]) -> None:
    make(128, 2, **ON_GPU)(random(B, T, 128, grad=True)).float().sum().backward()


def latent_layer(*sizes: int, **place: Any) -> nn.Module:
    return fastattn.MultiheadLatentAttention(
        *sizes, kv_latent_dim=32, nope_dim=32, rope_dim=16, **place
    )


def latents() -> None:
    layer = latent_layer(128, 2, **ON_GPU)
    cache = layer.new_cache(B, T + 1)
    with torch.no_grad():
        layer(random(B, T, 128), cache=cache)
        layer(random(B, 1, 128), cache=cache)


def selected_pages() -> None:
    cache = fastattn.PagedLatentCache(
        8, 16, 128, 32, quantize="fp8_ds_mla", device="cuda", dtype=torch.bfloat16
    )
    cache.append([cache.allocate()], random(1, 1, 40, 160).bfloat16())
    q, lists = random(1, 4, 1, 160).bfloat16(), gpu(1, 1, 1, 3).int()
    fastattn.decode_selected(q, cache, lists, block_k=8, scale=0.1)


def latent_pages() -> None:
    cache = fastattn.PagedLatentCache(9, 16, 32, 16, **ON_GPU)
    rows = [cache.allocate() for _ in range(B)]
    cache.append(rows, random(B, 1, 3, 48))
    fastattn.decode_attention(random(B, 2, 1, 48), cache, scale=0.1)


def swapped_layer(*sizes: int, **place: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, **place)
    fastattn.swap(layer)
    return layer


def cached_layer() -> None:
    layer = fastattn.CausalGQAttention(128, 2, rotary="half", **ON_GPU).eval()
    with torch.no_grad():
        cache = layer.new_cache(batch_size=B, max_length=T)
        layer(random(B, 8, 128), cache=cache, key_lengths=ones(B))
        layer(random(B, 1, 128), cache=cache)


def cross_layer() -> None:
    layer = fastattn.CrossGQAttention(128, 2, **ON_GPU)
    memory = random(B, 9, 128)
    layer(random(B, 5, 128), memory, memory_lengths=ones(B)).float().sum().backward()


def multihead() -> None:
    layer = fastattn.MultiheadAttention(128, 2, batch_first=True, **ON_GPU)
    x = random(B, T, 128)
    o, _ = layer(x, x, x, key_padding_mask=gpu(B, T) == 0, need_weights=False)
    o.float().sum().backward()
    layer(x, x, x)


def patched() -> None:
    x = random(B, 2, T, D, grad=True)
    fastattn.patch_sdpa()
    try:
        F.scaled_dot_product_attention(x, x, x, is_causal=True).float().sum().backward()
    finally:
        fastattn.unpatch_sdpa()


def other_calls() -> Calls:
    q, k = random(B, H, T, D), random(B, 2, T, D)
    return {
        "attention_statistics": lambda: fastattn.attention_statistics(q, k, causal=True, top=4),
        "attention_weights": lambda: fastattn.attention_weights(q, k, causal=True),
        **{
            f"{name} {backend}": partial(named, name, B, T, causal=True, backend=backend)
            for name in ("attention_fp8", "attention_varlen_fp8")
            for backend in ("auto", "hopper")
        },
        "quantize_fp8": lambda: fastattn.quantize_fp8(k, ones(B)),
        "pack_values": lambda: fastattn.pack_values(fastattn.quantize_fp8(k)[0]),
    }


def without_launches() -> Calls:
    """Calls that launch no kernel."""
    q, k = random(B, H, T, D), random(B, 2, T, D)
    codes = q.to(torch.float8_e4m3fn)
    return {
        "additive_attention": lambda: named("additive_attention", B, T),
        "attention torch": lambda: train(B, T, causal=True, window=8, backend="torch"),
        "explain": lambda: str(fastattn.explain(q, k, k, causal=True)),
        "explain_decode": lambda: str(fastattn.explain_decode(random(B, 8, 1, D), filled())),
        "explain_paged": lambda: str(
            fastattn.explain_paged(random(B, 8, D), filled(), gpu(B + 1, dtype=torch.int32))
        ),
        "indexer_loss": lambda: fastattn.indexer_loss(q, k[:, :1], q[..., 0], q, k),
        "select_tokens": lambda: fastattn.select_tokens(q, k[:, :1], q[..., 0], 4),
        "block_indices": lambda: fastattn.block_indices(gpu(B, H, 4, 4) > 0),
        "explain_selected": lambda: str(
            fastattn.explain_selected(
                *[random(B, 2, T, D)] * 3, torch.zeros(B, 1, T, 1, dtype=torch.int32, device="cuda")
            )
        ),
        "explain_fp8": lambda: str(fastattn.explain_fp8(codes, codes, codes)),
        "alibi_slopes": lambda: fastattn.alibi_slopes(H, device="cuda"),
        "t5_relative_bias": lambda: fastattn.t5_relative_bias(gpu(32, H), 16),
        "document_ids": lambda: fastattn.document_ids(gpu(3, dtype=torch.int32), T),
        "dropout_keep_mask": lambda: fastattn.dropout_keep_mask(
            gpu(2, dtype=torch.int64), 0.1, B, H, T, T
        ),
    }
