"""batch_invariant: bits of a token, whatever is computed beside it, from training to serving.

The interpreter shows the order of sums and which tiles they are over, not those of matrix units;
that tiles are the same is all that can be seen of these without a GPU.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fastattn import (
    CausalGQAttention,
    KVCache,
    PagedKVCache,
    attention,
    attention_paged,
    attention_varlen,
    decode_attention,
)
from fastattn.functional import call_memo
from fastattn.kernels.launch import decode_splits, tiles
from fastattn.kernels.launch.arguments import block_dim, tile_for
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw, to_device

BACKENDS = ("triton", "torch")
T, H_q, H_k, D = 101, 4, 2, 16
WINDOW, FIRST = 40, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "near": {
        "window": WINDOW, "keep_first": FIRST, "softcap": 2.0, "sinks": draw(H_q),
        "alibi_slopes": draw(H_q).abs(),
    },
}  # fmt: skip
Call = tuple[str, slice, Tensor, Tensor]  # name, tokens of row 0, o [n, H_q, D] and lse [H_q, n]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that are large enough for keys to be split, and a row's bits independent of its place.

    BLAS gives the rows of a product other bits by their place; matrix units do not.
    """
    matmul = np.matmul
    monkeypatch.setattr(
        np, "matmul", lambda a, b, **_: matmul(a.astype(np.float64), b.astype(np.float64))
    )
    monkeypatch.setattr(decode_splits, "MANY_KEYS", 16)
    call_memo.forget()
    other = {"decode": TileConfig(16, 32), "decode_chunk": TileConfig(64, 64)}
    with tiles.forced(forward=TileConfig(32, 16), **other):
        yield
    call_memo.forget()


def tokens(x: Tensor, *rows: slice) -> Tensor:
    """Parts of the first batch row behind one another, [total, H, D]."""
    return torch.cat([x[0, :, part].transpose(0, 1) for part in rows])


def dense(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return o[0].transpose(0, 1), lse[0]


def without_caches(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Iterator[Call]:
    whole, other = slice(0, T), slice(40, 61)
    with torch.autocast(q.device.type, torch.bfloat16, enabled=q.dtype is torch.bfloat16):
        alone = attention(q[:1], k[:1], v[:1], **how)
    yield "alone", whole, *dense(*alone)
    lengths = torch.tensor([T, 9], device=q.device)
    more = (torch.cat((x, x[:, :, :50]), 2) for x in (k, v))
    o, lse = attention(q, *more, key_lengths=lengths, query_offset=0, **how)
    yield "padded", whole, *dense(o, lse)
    offsets = torch.tensor([0, 21, 21 + T], device=q.device)
    o, lse = attention_varlen(*(tokens(x, other, whole) for x in (q, k, v)), offsets, **how)
    yield "packed", whole, o[21:], lse[:, 21:]
    for size in (1, 7, 50):
        for first in range(0 if size > 1 else T - 3, T, size):
            part = slice(first, min(first + size, T))
            row = (q[:1, :, part], k[:1, :, : part.stop], v[:1, :, : part.stop])
            yield f"chunks of {size}", part, *dense(*attention(*row, **how))
            offsets = (torch.tensor([0, x.shape[2]], device=q.device) for x in row[:2])
            o, lse = attention_varlen(*(tokens(x, slice(None)) for x in row), *offsets, **how)
            yield f"packed chunks of {size}", part, o, lse


def over_caches(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Iterator[Call]:
    sizes: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
    for n, step, room in ((T, 1, 7), (T, 5, 90), (70, 1, 90)):
        last = slice(n - step, n)
        cache = KVCache(2, H_k, T + room, D, **sizes)
        cache.append(k, v, torch.tensor([n, 31], device=q.device))
        yield f"{step} over a cache", last, *dense(*decode_attention(q[:, :, last], cache, **how))
        for size in (5, 16):
            pool = PagedKVCache(60, size, H_k, D, **sizes)
            rows = [pool.allocate() for _ in range(2)]
            for first in range(0, n, size):  # pages of the rows take turns
                part = slice(first, min(first + size, n))
                counts = [part.stop - part.start, max(0, min(part.stop, 31) - first)]
                pool.append(rows, k[:, :, part], v[:, :, part], counts)
            name = f"{step} over pages of {size}"
            yield name, last, *dense(*decode_attention(q[:, :, last], pool.view(rows), **how))
            for part in (last, slice(n - 45, n)):
                offsets = torch.tensor([0, 0, part.stop - part.start], device=q.device) + 9
                offsets[0] = 0
                mixed = torch.cat((tokens(q, slice(9)), tokens(q, part)))
                o, lse = attention_paged(mixed, pool.view(rows[::-1]), offsets, **how)
                yield f"mixed, {name}", part, o[9:], lse[:, 9:]
    if "window" in how:
        ring = KVCache(1, H_k, WINDOW + FIRST + 3, D, window=WINDOW, keep_first=FIRST, **sizes)
        for first in range(0, T, 4):
            part = slice(first, min(first + 4, T))
            ring.append(k[:1, :, part], v[:1, :, part])
        yield "over a ring", part, *dense(*decode_attention(q[:1, :, part], ring, **how))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "dtype"), [("causal", torch.float32), ("near", torch.bfloat16)])
def test_a_token_has_its_bits_in_every_call(
    name: str, dtype: torch.dtype, backend: str, device: str, one_thread: None
) -> None:
    q, k, v = make_qkv(2, H_q, H_k, T, T, D, dtype=dtype, device=device, requires_grad=False)
    options = to_device(OPTIONS[name], device)
    how: dict[str, Any] = {"backend": backend, "return_lse": True, "causal": True, **options}
    invariant = {**how, "batch_invariant": True}
    trained = dense(*attention(q, k, v, **invariant))
    parts = (call for calls in (without_caches, over_caches) for call in calls(q, k, v, invariant))
    for call, part, o, lse in parts:
        assert torch.equal(o, trained[0][part]), call
        assert torch.equal(lse, trained[1][:, part]), call
    if name == "causal":  # bf16 would round the difference away
        usual = (call for calls in (without_caches, over_caches) for call in calls(q, k, v, how))
        same = all(torch.equal(o, trained[0][part]) for _, part, o, _ in usual)
        assert not same, "without the option bits differ, or the comparison could not fail"


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_other_calls(backend: str, device: str) -> None:
    options = to_device(OPTIONS["near"], device)
    grads = []
    for invariant in (False, True):
        q, k, v = make_qkv(1, H_q, 1, 20, 20, D, device=device)
        how = {**options, "sinks": options["sinks"].clone().requires_grad_()}
        o = attention(q, k, v, causal=True, batch_invariant=invariant, backend=backend, **how)
        grads.append(torch.autograd.grad(o.square().sum(), (q, k, v, how["sinks"])))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx1100"])
def test_every_kernel_has_the_same_tile(arch: str) -> None:
    """Whatever options take in registers: other blocks of keys would give other bits, and so would
    warps in another layout.
    """
    bias = torch.empty(1, 1, 100, 100, dtype=torch.bfloat16, device="meta")
    records = (Options(causal=True), Options(softcap=2.0), Options(attn_bias=bias))
    with mock.patch.object(tiles, "current_arch", lambda: arch), mock.patch.dict(tiles._forced):
        tiles._forced.clear()
        for width in (64, 128, 256):
            q = torch.empty(1, 4, 100, width, dtype=torch.bfloat16, device="meta")
            cache = decode_splits.CacheTensors(q, q, None, None, None, None, None, None, None)
            tiled = []
            for options in records:
                given = options._replace(batch_invariant=True)
                sizes = (q, block_dim(width), block_dim(width))
                tiled.append(tile_for("forward", given, *sizes, streams_bias=True))
                tiled += [decode_splits.decode_tile(q, cache, given, few) for few in (True, False)]
            shapes = {(x.BLOCK_M, x.BLOCK_N, x.num_warps, x.sum_parts) for x in tiled}
            assert len(shapes) == 1, tiled


def test_a_layer_serves_with_the_bits_of_training(device: str) -> None:
    """Projections that pick out elements are exact, so that attention alone has bits to lose."""
    layer = CausalGQAttention(64, H_q, H_k, rotary="half", batch_invariant=True, device=device)
    with torch.no_grad():
        for x in layer.parameters():
            x.copy_(torch.eye(64, device=device)[torch.randperm(64)[: x.shape[0]]])
        x = torch.randn(1, T, 64, device=device)
        trained, cache = layer(x), layer.new_cache(1, T)
        served = [layer(part, cache=cache) for part in x.split((70, 23, 4, 1, 3), 1)]
    assert torch.equal(torch.cat(served, 1), trained)


def test_gradients_are_rounded_once() -> None:
    """And not for each tile: those of a bias cancel where all scores share a number."""
    narrow = [*make_qkv(1, 2, 1, 39, D=16, dtype=torch.bfloat16)]
    narrow.append(torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True))
    do = draw(1, 2, 39, 16).bfloat16()

    def gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        o = attention(q, k, v, attn_bias=bias, batch_invariant=True, backend="torch")
        return torch.autograd.grad(o, (q, k, v, bias), do.to(o))

    exact = gradients(*(x.detach().float().requires_grad_() for x in narrow))
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(gradients(*narrow), exact, strict=True))
