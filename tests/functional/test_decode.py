"""Decoding: every cache against the oracle, its pages, splits and lengths, on both backends."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz.judges import check_by_kernels

from fastattn import KVCache, decode_attention, reference
from fastattn.cache.views import view_of_tensors
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import make_qkv
from fastattn.testing.decoding import Filled, assert_decoded, assert_decodes, fill

BACKENDS = ("triton", "torch")


def tokens(
    device: str,
    lengths: tuple[int, ...] = (13, 21),
    T_q: int = 1,
    H_q: int = 4,
    H_k: int = 2,
    D: int = 16,
    D_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of the newest T_q tokens, k and v of all, and how many of them each row has."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)

    def draw(H: int, T: int, width: int) -> torch.Tensor:
        return torch.randn(B, H, T, width, generator=generator).to(device, dtype)

    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    D_v = D if D_v is None else D_v
    return draw(H_q, T_q, D), draw(H_k, T, D), draw(H_k, T, D_v), counts


MORE = {"append": 12, "decode_attention": 30, "attention_paged": 20}


@pytest.mark.parametrize(
    ("call", "seed"), [(call, seed) for call, count in MORE.items() for seed in range(count)]
)
def test_generated_calls(call: str, seed: int, one_thread: None, device: str) -> None:
    """Every kind of cache, option and split; what holds no token is NaN: every empty tensor is."""
    check_by_kernels(call, seed, device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "D", "D_v"), [("contiguous", 15, 20), ("pages-of-3", 60, 59), ("pages-of-16", 15, 20)]
)
def test_rows_without_padding(kind: str, D: int, D_v: int, backend: str, device: str) -> None:
    """Somebody else's cache, whose rows are no whole 16 bytes and start anywhere."""
    q, k, v, lengths = tokens(device, D=D, D_v=D_v, dtype=torch.float16)
    filled = fill(kind, k, v, lengths)
    own = filled.view
    view = view_of_tensors(
        own.k.contiguous(),
        own.v.contiguous(),
        own.lengths,
        block_table=own.block_table,
        batch_index=own.batch_index,
    )
    assert view.k.stride(2) == D
    assert_decodes(q, replace(filled, view=view), how={"backend": backend})


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("window", [None, 1, (4, 0)])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ((1, 1), None), ((70, 70), None), ((7, 7), (9, 2)), ((70, 70), (3, 0)), ((70, 66), None),
        ((3, 0), None), ((70, 66), (69, 9)),
    ],
)  # fmt: skip
def test_steps_of_a_cache_on_a_cpu(
    lengths: Any, starts: Any, window: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row at a time by as many threads as it has heads, or with a mask; known or not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, k, v, counts = tokens("cpu", lengths, D_v=24)
    cache = KVCache(2, 2, 80, 16, value_dim=24)
    for x in (cache.k, cache.v):
        x.fill_(torch.nan)
    alike = len(set(lengths)) == 1
    cache.append(k, v, None if alike else counts, backend="torch")
    masks = {}
    if starts is not None:
        cache.set_starts(torch.tensor(starts))
    options: dict[str, Any] = {} if window is None else {"window": window}
    for _ in range(2):
        if starts is not None:
            masks["key_padding_mask"] = torch.arange(k.shape[2]) >= torch.tensor(starts)[:, None]
        o = decode_attention(q, cache, backend="torch", **options)
        _, lse = decode_attention(q, cache, return_lse=True, backend="torch", **options)
        assert_decoded((o, lse), q, Filled(cache.view(), k, v, counts, masks), **options)
        new_k, new_v = k.roll(1, 2)[:, :, :1], v.roll(1, 2)[:, :, :1]
        cache.append(new_k, new_v, backend="torch")
        k, v = (torch.cat((x, x[:, :, :1]), 2) for x in (k, v))
        for row, n in enumerate(counts.tolist()):
            k[row, :, n], v[row, :, n] = new_k[row, :, 0], new_v[row, :, 0]
        counts = counts + 1


def test_a_narrower_window_in_a_ring(device: str) -> None:
    q, k, v, lengths = tokens(device)
    filled = fill("ring", k, v, lengths)
    filled.masks["window"] = (3, None)
    for backend in BACKENDS:
        assert_decodes(q, filled, how={"backend": backend}, window=(3, None))


@pytest.fixture
def blocks_of_16() -> Iterator[None]:
    """Few enough keys a block for short rows to be split in several places."""
    with tiles.forced(decode=TileConfig(16, 16)):
        yield


@pytest.mark.usefixtures("blocks_of_16")
def test_more_parts_than_are_loaded_at_a_time(device: str) -> None:
    q, k, v, lengths = tokens(device, (330, 40))
    filled = fill("contiguous", k, v, lengths)
    assert_decodes(q, filled, how={"backend": "triton", "num_splits": 20})


def test_one_launch_serves_lengths_that_grow(device: str) -> None:
    """A replayed CUDA graph: only the contents of tensors may change between calls."""
    q, k, v, lengths = tokens(device, (13, 21))
    filled = fill("contiguous", k, v, lengths)
    filled.view.lengths.copy_(lengths - 9)
    stale = filled.view._replace(length_bound=12)
    shorter = Filled(stale, filled.k, filled.v, lengths - 9, {})
    assert_decodes(q, shorter, how={"backend": "triton", "num_splits": 2})
    stale.lengths.copy_(lengths)
    assert_decodes(q, filled, how={"backend": "triton", "num_splits": 2})


def test_lengths_past_the_end_read_nothing_there(device: str, unread: None) -> None:
    """A graph that is replayed too often: tokens that had no room do not exist."""
    q, k, v, lengths = tokens(device, (13, 24))
    filled = fill("contiguous", k, v, lengths)  # of 27 slots, the last three NaN
    filled.view.k[:, :, 24:], filled.view.v[:, :, 24:] = 0, 0
    filled.view.lengths[1] = 40
    o = decode_attention(q, filled.view, backend="triton")
    assert o.isfinite().all()


@pytest.mark.parametrize(("window", "keep_first"), [(20, 0), (20, 2), (3, 40), (33, 17)])
def test_rings_give_the_bits_of_whole_caches(window: int, keep_first: int, device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 150, 32, requires_grad=False, device=device)
    slots = keep_first + window + 2
    ring = KVCache(1, 1, slots, 32, window=window, keep_first=keep_first, device=device)
    whole = KVCache(1, 1, 150, 32, device=device)
    how: dict[str, Any] = {"backend": "triton", "batch_invariant": True, "return_lse": True}
    options: dict[str, Any] = {"window": window, "keep_first": keep_first}
    for first in range(0, 150, 3):
        for cache in (ring, whole):
            cache.append(k[:, :, first : first + 3], v[:, :, first : first + 3])
        if first in (0, 33, 63, 66, 147):
            with tiles.forced(decode=TileConfig(16, 16)):
                o, lse = decode_attention(q, ring, **how)
                expected = decode_attention(q, whole, **options, **how)
            assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
            keys = (x[:, :, : first + 3] for x in (k, v))
            exact = reference.attention(q, *keys, causal=True, **options)
            torch.testing.assert_close(o, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["contiguous", "pages-of-3"])
def test_autocast_rounds_nothing(kind: str, backend: str, device: str) -> None:
    """A query has its cache's dtype, and its result has that too."""
    q, k, v, lengths = tokens(device)
    filled = fill(kind, k, v, lengths)
    expected = decode_attention(q, filled.view, backend=backend)
    whole = KVCache(2, 2, 21, 16, device=device)
    whole.append(k, v)
    wholes = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            actual = decode_attention(q, filled.view, backend=backend)
            wholes.append(decode_attention(q, whole, backend=backend))
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*wholes)


def test_a_gradient_that_a_transform_hides_is_refused(device: str) -> None:
    q, k, v, lengths = tokens(device)
    view = fill("contiguous", k, v, lengths).view
    q.requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return x * decode_attention(1 * q, view).sum()

    with pytest.raises(RuntimeError, match="decode_attention has no gradients"):
        torch.func.grad(loss)(torch.ones((), device=device))
