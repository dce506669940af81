"""Packed queries over pages where generated calls do not go: splits, a call's tensors, bounds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from nightly import gate_cases
from torch import Tensor

from fastattn import PagedKVCache, attention_paged
from fastattn.functional import call_memo
from fastattn.kernels.decode import launch_packed, packed
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options
from fastattn.testing.decoding import Filled, assert_paged, fill

BACKENDS = ("triton", "torch")
H_Q, H_K, D, D_V = 6, 2, 16, 24


class Step(NamedTuple):
    """New tokens of each row, and tokens that it holds with them."""

    new: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor((0, *self.new)).cumsum(0).int()


# Chunks that end their prompt and that are all of it, drafts, and a row that holds nothing.
SMALL = Step((33, 1, 0, 3, 17, 1, 1), (61, 40, 9, 3, 20, 0, 16))
# Rows of so many blocks of keys may be split; in the last step those of two tiles are.
LONG = Step(SMALL.new, (161, 140, 9, 150, 20, 0, 16))
LONGER = Step((11, 1, 0, 3, 1), (270, 140, 9, 150, 16))
SMALL_TILES = {"decode": TileConfig(16, 16), "decode_chunk": TileConfig(32, 16)}


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    with tiles.forced(**SMALL_TILES):
        yield


def filled(step: Step, dtype: torch.dtype, device: str) -> Filled:
    """A pool whose unused slots and pages are NaN."""
    generator = torch.Generator().manual_seed(7)
    shape = len(step.held), H_K, max(step.held)
    k, v = (torch.randn(*shape, n, generator=generator).to(device, dtype) for n in (D, D_V))
    cache = fill("pages-of-3", k, v, torch.tensor(step.held, dtype=torch.int32, device=device))
    assert cache.view.block_table is not None
    columns = -(-max(step.held) // cache.view.page_size) + 1
    table = cache.view.block_table[: len(step.held), :columns].contiguous()
    return replace(cache, view=cache.view._replace(block_table=table))


def query(step: Step, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    q = torch.randn(sum(step.new), H_Q, D, generator=torch.Generator().manual_seed(1))
    return q.to(device, dtype)


@pytest.mark.parametrize(("multiprocessors", "step"), [(1, LONG), (16, LONG), (16, LONGER)])
def test_keys_are_split_for_as_many_multiprocessors_as_there_are(
    multiprocessors: int, step: Step, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of few rows and in those of a chunk; with one nothing is split."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: multiprocessors)
    call_memo.forget()
    merged, combine = set(), packed.combine_launch

    def recorded(parts: Tensor, *arguments: Any, **how: Any) -> Any:
        merged.add(parts.shape[2])
        return combine(parts, *arguments, **how)

    monkeypatch.setattr(packed, "combine_launch", recorded)
    total = sum(step.new)
    tree = torch.randn(total, max(step.new) + 2, generator=torch.Generator().manual_seed(3)) > -0.3
    cache = filled(step, torch.float32, device)
    q, offsets = query(step, device), step.offsets
    how = {"tree_mask": tree.to(device)}
    actual = attention_paged(
        q, cache.view, offsets.to(device), backend="triton", return_lse=True, **how
    )

    assert_paged(actual, q, cache, offsets.to(device), **how)
    assert merged == (set() if multiprocessors == 1 else {16, 32})


@pytest.mark.parametrize(("first", "backend"), [(0, "triton"), (3, "triton"), (0, "torch")])
def test_out_is_written_in_place(first: int, backend: str, device: str) -> None:
    """And nothing beside it; tokens that no row has are 0. Rows may start anywhere."""
    view, q = filled(SMALL, torch.float16, device).view, query(SMALL, device, torch.float16)
    q, offsets = torch.cat((q, q[:3])), SMALL.offsets.to(device)
    memory = torch.full((q.shape[0], H_Q, 2 * D_V), 7.0, dtype=q.dtype, device=device)
    before, out = memory.clone(), memory[..., first : first + D_V]
    expected = attention_paged(q, view, offsets, backend=backend)
    assert attention_paged(q, view, offsets, out=out, backend=backend) is out
    assert torch.equal(out, expected) and not out[-3:].any()
    out[:] = 7.0
    assert torch.equal(memory, before)


def test_caches_themselves_and_tensors_are_taken(device: str) -> None:
    cache = PagedKVCache(12, 4, H_K, D, device=device)
    rows = [cache.allocate() for _ in range(2)]
    k, v = torch.randn(2, 2, H_K, 6, D, device=device)
    cache.append(rows, k, v, [6, 3], backend="torch")
    q, offsets = torch.randn(4, H_Q, D, device=device), torch.tensor([0, 3, 4], device=device)
    slopes = torch.rand(2, H_Q, device=device)  # of each row by itself
    how: Any = {"cu_seqlens_q": offsets, "alibi_slopes": slopes}
    expected = attention_paged(q, cache.view(rows), backend="torch", **how)
    tensors = (cache.k[0], cache.v[0], cache.block_table[:2], cache.lengths[:2])
    for given in (cache, tensors):
        for backend in BACKENDS:
            actual = attention_paged(q, given, backend=backend, **how)
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "torch"), (torch.half, "triton")])
def test_lse_is_in_fp32(dtype: torch.dtype, backend: str, device: str) -> None:
    view, q = filled(SMALL, dtype, device).view, query(SMALL, device, dtype)
    how = {"return_lse": True, "backend": backend}
    o, lse = attention_paged(q, view, SMALL.offsets.to(device), **how)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)


def test_a_known_call_brings_its_own_tensors(device: str) -> None:
    """Other rows, lengths and tokens in tensors of the same layout, as a replay has them."""
    first = filled(SMALL, torch.float32, device)
    other = Step(SMALL.new[::-1], SMALL.held[::-1])
    q, again = query(SMALL, device), query(SMALL, device).flip(0)
    call_memo.forget()
    how: Any = {"backend": "triton", "sinks": torch.ones(H_Q, device=device)}
    attention_paged(q, first.view, SMALL.offsets.to(device), **how)
    assert call_memo._slot.cache_info().currsize == 1
    second = filled(other, torch.float32, device).view
    actual = attention_paged(again, second, other.offsets.to(device), **how)
    assert call_memo._slot.cache_info().currsize == 1, "it was another call"
    call_memo.forget()
    assert torch.equal(actual, attention_paged(again, second, other.offsets.to(device), **how))
    with pytest.raises(ValueError, match="cu_seqlens_q must run from 0"):
        attention_paged(again, second, other.offsets.flip(0).to(device) * 0 + 3, **how)


FAR = 2**33


@pytest.mark.parametrize(
    "offsets",
    gate_cases(
        [[0, 9, 2, 40, -5, FAR, 57, 0]], [[5, -FAR, 57, 57, 0, 57, 3, 57], [0] * 8, [57] * 8]
    ),
    ids=str,
)
def test_no_access_leaves_the_tensors_whatever_they_hold(
    offsets: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter raises for an access that does; what the host knows is refused before."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: 16)
    view, q = filled(LONG, torch.float32, device).view, query(LONG, device)
    assert view.block_table is not None
    table = view.block_table.clone()
    table[::2, ::3], table[1::2, 1::2] = 2**31 - 1, -(2**31)
    lengths = torch.tensor([FAR, -FAR, -1, 70, 12, 2**31, 3], device=device)
    index = torch.tensor([0, 6, FAR, -FAR, 3, 7, 1], device=device)
    cache = CacheTensors(view.k, view.v, None, None, table, lengths, lengths, index, None)
    flat = torch.ones(40, dtype=torch.bool, device=device)
    starts = torch.tensor([FAR, -FAR, 0, 30, 39, 40, -1], device=device)
    o, lse = torch.zeros_like(query(SMALL, device).repeat(1, 1, 2))[..., :D_V], lse_of(q)
    for tree, begin in ((None, None), (flat, starts), (flat.view(1, 40).expand(57, 40), None)):
        options = Options(scale=1.0, causal=True, tree_mask=tree, tree_starts=begin)
        launch_packed(
            q, torch.tensor(offsets, device=device), cache, None, o, lse, options, longest=57
        )


def lse_of(q: Tensor) -> Tensor:
    return torch.zeros(H_Q, q.shape[0], device=q.device)


def test_a_compiled_step_writes_into_out(device: str) -> None:
    """In one graph of torch.compile."""
    view, q = filled(SMALL, torch.float32, device).view, query(SMALL, device)
    offsets = SMALL.offsets.to(device)

    def step(q: Tensor, out: Tensor) -> Tensor:
        return attention_paged(q * 2, view, offsets, out=out, backend="triton") + 1

    out, expected = torch.zeros(2, q.shape[0], H_Q, D_V, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, out), step(q, expected))
    torch.testing.assert_close(out, expected)
