"""Calls on CUDA tensors, for whatever plays the GPU: small, in bfloat16, most of head dim 64."""

from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import fastattn
from fastattn import KVCache, PagedKVCache, attention, decode_attention
from fastattn.cache.append import append
from fastattn.kernels.launch import tiles
from fastattn.rotary import rotary_tables
from fastattn.testing.calls import CALLS, Draw

# Few instructions of a thread, which compile fast; and loads by TMA where there are such.
SMALL = {
    kind: tiles.TileConfig(16, 16, 4, 1, descriptors=kind == "forward") for kind in tiles.KINDS
}


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", requires_grad=True)


def ones(B: int) -> Tensor:
    return torch.ones(B, dtype=torch.int32, device="cuda")


def train(B: int, T: int, D: int = 64, backend: str = "triton", **options: Any) -> None:
    q, k, v = (random(B, H, T, D, grad=True) for H in (4, 2, 2))
    attention(q, k, v, backend=backend, **options).float().sum().backward()


@triton.jit
def far_keys(score, b, h, q_pos, k_pos, weight):
    return score + tl.load(weight + h) * k_pos


@triton.jit
def far_keys_grad(gradient, score, b, h, q_pos, k_pos, weight):
    return gradient


def packed(*lengths: int, backend: str = "triton", **options: Any) -> None:
    q, k, v = (random(sum(lengths), H, 64, grad=True) for H in (4, 2, 2))
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    o = fastattn.attention_varlen(q, k, v, offsets, causal=True, backend=backend, **options)
    o.float().sum().backward()


def named(name: str, B: int, T: int, D: int = 64, **options: Any) -> None:
    """A call of `fastattn.testing.calls`, and its backward."""
    call = CALLS[name]
    qkv = (random(B, H, T, D, grad=call.learns) for H in (4, 2, 2))
    o = call.function(**call.make(Draw(name), *qkv).arguments, **options)
    if call.learns:
        o.float().sum().backward()


def chosen(B: int, T: int) -> None:
    q, k, v = (random(B, H, T, 64, grad=True) for H in (4, 2, 2))
    fastattn.moba_attention(q, k, v, block_k=16, n=2).float().sum().backward()
    k_pooled, v_pooled = (random(B, 2, (T - 8) // 4 + 1, 64, grad=True) for _ in range(2))
    gates = random(B, 4, T, 3, grad=True)
    o = fastattn.native_sparse_attention(
        q, k, v, k_pooled, v_pooled, gates, block_k=16, n=3, window=8, pool=(8, 4)
    )
    o.float().sum().backward()


def many_rows(B: int) -> None:
    """For more batch rows than a grid's second dim may have."""
    q = random(1, 1, 1, 64).expand(B, 1, 2, 64)
    ids = torch.zeros(B, 2, dtype=torch.int32, device="cuda")
    attention(q, q, q, documents=ids, backend="triton")
    held = KVCache(B, 1, max_length=2, head_dim=64, device="cuda", dtype=torch.bfloat16)
    held.append(q, q)


def dense(B: int, room: int, cache: Any = KVCache, steps: int = 1, **kind: Any) -> Any:
    held = cache(B, 2, max_length=room, head_dim=64, device="cuda", dtype=torch.bfloat16, **kind)
    for T in (12, *[1] * steps):
        held.append(random(B, 2, T, 64), random(B, 2, T, 64))
    decode_attention(random(B, 8, 1, 64), held)


def paged(rows: int, page_size: int) -> None:
    place = {"device": "cuda", "dtype": torch.bfloat16}
    held = PagedKVCache(64, page_size, num_kv_heads=2, head_dim=64, **place)
    row_numbers = [held.allocate() for _ in range(rows)]
    held.append(row_numbers, random(rows, 2, 40, 64), random(rows, 2, 40, 64))
    held.fork(row_numbers[0])
    decode_attention(random(rows, 8, 1, 64), held.view(row_numbers))


def rotated(B: int, T: int) -> None:
    held = KVCache(B, 2, max_length=256, head_dim=64, device="cuda", dtype=torch.bfloat16)
    tables = tuple(x.to("cuda") for x in rotary_tables(256, 64))
    q, k, v = random(B, 8, T, 64), random(B, 2, T, 64), random(B, 2, T, 64)
    append(held.view(), k, v, q=q, rotary=tables, rotary_style="half")


def merged(B: int, T: int) -> None:
    q, k, v = (random(B, H, T, 64) for H in (4, 2, 2))
    part = attention(q, k, v, causal=True, return_lse=True, backend="triton")
    fastattn.merge(*part, *part)
