"""Decoding that merges its parts in its own launch: the bits of two launches, and its counters."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nightly import gate_cases
from torch import Tensor

from fastattn import attention_paged, decode_attention
from fastattn.kernels.decode import launch, launch_packed, packed
from fastattn.kernels.launch import arrivals, decode_splits, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options
from fastattn.testing import make_qkv
from fastattn.testing.decoding import Filled, assert_decodes, fill

TILES = {"decode": TileConfig(16, 16), "decode_chunk": TileConfig(32, 16)}
LENGTHS = (140, 3)
# Kinds of caches and numbers of splits; None: by the work of rows.
CACHES = gate_cases(
    [("contiguous", 17), ("pages-int8", None)],
    [("left-padded", 3), ("pages-of-3", None), ("ring-keep-first", 2), ("fp8", 17)],
)


def filled(
    kind: str, lengths: tuple[int, ...], T_q: int, device: str, dtype: torch.dtype = torch.float16,
    heads: tuple[int, int] = (4, 2), D: int = 16,
) -> tuple[Tensor, Filled]:  # fmt: skip
    """New queries, and a cache of one of `decoding.KINDS`."""
    q, k, v = make_qkv(
        len(lengths), *heads, T_q, max(lengths), D, dtype=dtype, device=device, requires_grad=False
    )
    return q, fill(kind, k, v, torch.tensor(lengths, dtype=torch.int32, device=device))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tensor]:
    """The counters of all launches of a test: what one leaves, the next one finds."""
    kept = torch.zeros(4096, dtype=torch.int32)

    def of_device(device: torch.device, count: int) -> Tensor:
        assert count <= kept.numel()
        return kept.to(device) if device.type == "cpu" else arrivals.arrival_counters(device, count)

    for module in (launch, packed):
        monkeypatch.setattr(module, "arrival_counters", of_device)
    monkeypatch.setattr(decode_splits, "_LOADS_OF_A_LAUNCH", 1 << 20)
    with tiles.forced(**TILES):
        yield kept


def both_ways(call: Callable[[], tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Results of two launches, and of two calls in a row of one."""
    results = []
    for one in (False, True, True):
        with tiles.forced(one_launch=one):
            results.append(call())
    return results


def assert_same_bits(results: list[tuple[Tensor, Tensor]]) -> None:
    (o, lse), *others = results
    assert o.isfinite().all()
    for result in others:
        assert torch.equal(result[0], o) and torch.equal(result[1], lse)


@pytest.mark.parametrize(("kind", "splits"), CACHES)
def test_one_launch_gives_the_bits_of_two(
    kind: str, splits: int | None, counters: Tensor, launched: list[str], device: str
) -> None:
    """A row of many parts and one of few keys, with empty parts; two tokens of two heads each."""
    q, cache = filled(kind, LENGTHS, 2, device)
    sinks = torch.randn(4, device=device)
    how: dict[str, Any] = {"backend": "triton", "num_splits": splits, "sinks": sinks}
    assert_same_bits(both_ways(lambda: decode_attention(q, cache.view, return_lse=True, **how)))
    assert launched == ["decode_kernel", "combine_kernel", "decode_kernel", "decode_kernel"]
    assert not counters.any()
    with tiles.forced(one_launch=True):
        del how["sinks"]
        assert_decodes(q, cache, how=how, sinks=sinks)


def test_packed_queries(
    counters: Tensor, launched: list[str], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Chunks with several tiles, single tokens, and a row without one."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: 4)
    q, cache = filled("pages-of-16", (200, 140, 10, 90), 23, device)
    new = torch.tensor((20, 1, 0, 2))
    offsets = torch.cat((torch.zeros(1), new.cumsum(0))).int().to(device)
    rows = q[0].transpose(0, 1)[: int(new.sum())].contiguous()
    call = {"q": rows, "cache": cache.view, "cu_seqlens_q": offsets, "backend": "triton"}
    assert_same_bits(both_ways(lambda: attention_paged(**call, return_lse=True)))
    assert launched == ["decode_kernel", "combine_kernel"] * 2 + ["decode_kernel"] * 4
    assert not counters.any()


@pytest.mark.parametrize(("lengths", "T"), [((140,) * 6, 40), ((40, 40, 40, 40, 140, 40), 24)])
def test_invalid_offsets_leave_no_counter(
    lengths: tuple[int, ...], T: int, counters: Tensor, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Rows that overlap have more tiles than there are programs; later calls find zeros.

    In the second case programs end within the parts of a tile.
    """
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: 4)
    q, cache = filled("pages-of-16", lengths, T, device)
    rows, view = q[0].transpose(0, 1).contiguous(), cache.view
    tensors = CacheTensors(
        view.k, view.v, None, None, view.block_table, view.lengths, None, view.batch_index, None
    )
    offsets = torch.tensor((0, T) * 3 + (0,), dtype=torch.int32, device=device)
    o, lse = torch.zeros_like(rows), torch.zeros(4, T, device=device)
    with tiles.forced(one_launch=True):
        options = Options(scale=1.0, causal=True)
        launch_packed(rows, offsets, tensors, None, o, lse, options, longest=T)
    assert not counters.any()


def test_many_rows_or_parts_take_two_launches(launched: list[str], device: str) -> None:
    """And without tuning, every split."""
    q, cache = filled("contiguous", (40,), 2, device)

    def kernels(T_q: int, splits: int) -> list[str]:
        launched.clear()
        decode_attention(q[:, :, :T_q], cache.view, backend="triton", num_splits=splits)
        return [name.removesuffix("_kernel") for name in launched]

    with tiles.forced(**TILES):
        assert kernels(1, 2) == ["decode", "combine"]
        with tiles.forced(one_launch=True):
            assert kernels(1, 2) == kernels(2, 32) == ["decode"]
            assert kernels(1, 1) == ["decode"]
            assert kernels(2, 33) == ["decode", "combine"]


def test_streams_and_graphs_share_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's launches share counters; a graph's have their own, or take two launches."""
    stream, capturing, zeros = [1], [True], torch.zeros
    device: Any = torch.device("cuda", 0)
    active = SimpleNamespace(get_current_stream=lambda index: stream[0])
    monkeypatch.setattr(arrivals.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(
        arrivals.torch, "zeros", lambda size, **where: zeros(size, dtype=torch.int32)
    )
    cuda = arrivals.torch.cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: capturing[0])
    synchronized = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(cuda, "current_stream", lambda device: synchronized)
    monkeypatch.setattr(arrivals, "_RESERVED", 256)
    for name in ("_of_streams", "_reserves", "_taken"):
        monkeypatch.setattr(arrivals, name, {})

    def place(count: int) -> tuple[int, int] | None:
        x = arrivals.arrival_counters(device, count)
        if x is None:
            return None
        assert x.numel() >= count and x.data_ptr() % 16 == 0 and not x.any()
        return x.data_ptr(), x.data_ptr() + 4 * x.numel()

    assert place(8) is None, "no call has made a reserve"
    capturing[0] = False
    first = place(8)
    assert place(40) == first
    stream[0] = 2
    assert place(8) != first
    stream[0] = 1
    assert place(5000) != first
    capturing[0] = True
    taken = [place(count) for count in (8, 33, 128)]
    assert all(x and y and x[1] <= y[0] for x, y in pairwise(taken))
    assert place(64) is None and place(32) is not None and place(1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["contiguous", "pages-of-16", "pages-int8"])
def test_bits_repeat_on_two_streams_and_in_a_graph(kind: str, launched: list[str]) -> None:
    """A program that merged too early, or counters that two launches share, would change them."""
    q, cache = filled(kind, (4096, 700, 3), 1, "cuda", torch.bfloat16, (32, 8), 128)

    def call() -> tuple[Tensor, Tensor]:
        return decode_attention(q, cache.view, backend="triton", return_lse=True)

    expected = call()
    assert launched == ["decode_kernel", "combine_kernel"]
    launched.clear()
    with tiles.forced(one_launch=True):
        assert_same_bits([expected, call()])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        streams = [torch.cuda.Stream() for _ in range(2)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for _ in range(1000):
            results = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(call())
            graph.replay()
            torch.cuda.synchronize()
            for result in (*results, captured):
                for x, y in zip(result, expected, strict=True):
                    wrong += (x != y).sum()
        assert int(wrong) == 0 and set(launched) == {"decode_kernel"}
