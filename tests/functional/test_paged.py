"""Packed queries over pages: caches of servers, splits, shared pages, and bounds, row by row."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from nightly import gate_cases
from torch import Tensor

from fastattn import PagedKVCache, attention_paged, reference, shared_pages, view_of_tensors
from fastattn.cache_view import CacheView
from fastattn.functional import call_memo
from fastattn.kernels.decode import launch_packed, packed
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options
from fastattn.quantization import codes_within, quantize_rows
from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_all_within_budget

BACKENDS = ("triton", "torch")
H_Q, H_K, D, D_V = 6, 2, 16, 24


class Step(NamedTuple):
    """New tokens of each row, and tokens that it holds with them."""

    new: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor((0, *self.new)).cumsum(0).int()


# One chunk of a prompt, fifteen rows that decode a token, and an empty one.
MIXED = Step((1, 300, 0, *[1] * 14), (70, 333, 5, *range(1, 99, 7)))
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


class Filled(NamedTuple):
    """A cache, and its tokens by position as attention reads them."""

    view: CacheView
    k: Tensor
    v: Tensor


def scale_for(x: Tensor, largest: float, per_head: bool) -> Tensor:
    sizes = x.float().abs().amax((0, 2, 3) if per_head else (0, 1, 2, 3))
    # Some numbers are past the largest code, and become it.
    return sizes.reshape(-1) / largest * 0.8


def fill(kind: str, step: Step, dtype: torch.dtype, device: str) -> Filled:
    """A pool whose unused slots and pages are NaN, the pages of a row anywhere in it."""
    name, _, how = kind.partition(" ")
    size = int(name) if name.isdigit() else 5
    B, T = len(step.held), max(step.held)
    generator = torch.Generator().manual_seed(7)
    k, v = (
        torch.randn(B, H_K, T, width, generator=generator).to(device, dtype) for width in (D, D_V)
    )
    columns = -(-T // size) + 1
    P = B * columns + 1
    table = torch.randperm(P, generator=generator)[: B * columns].view(B, columns).int().to(device)
    lengths = torch.tensor(step.held, dtype=torch.int32, device=device)
    stored, scales, read = [k, v], {}, [k, v]
    if how:
        codes, per = how.split(" a ")
        largest = 127.0 if codes == "int8" else 448.0
        for n, x in enumerate((k, v)):
            if per == "token":
                stored[n], scale = quantize_rows(x, codes)
                read[n] = stored[n].float() * scale[..., None]
                scales["kv"[n] + "_scale"] = scale
            else:
                scale = scale_for(x, largest, per == "head")
                of_heads = scale.view(-1, 1, 1)
                stored[n] = codes_within(x, of_heads, codes)
                read[n] = stored[n].float() * of_heads
                scales["kv"[n] + "_scale"] = scale
    pool = pages(name, P, size, stored)
    for b in range(B):
        for t in range(step.held[b]):
            page, slot = table[b, t // size], t % size
            for n in range(2):
                bytes_of(pool[n])[page, :, slot] = bytes_of(stored[n])[b, :, t]
    if how.endswith("token"):
        for x in ("k_scale", "v_scale"):
            of_tokens, scales[x] = scales[x], torch.full((P, H_K, size), torch.nan, device=device)
            for b in range(B):
                for t in range(step.held[b]):
                    scales[x][table[b, t // size], :, t % size] = of_tokens[b, :, t]
    view = view_of_tensors(*pool, lengths, block_table=table, dtype=dtype, **scales)
    return Filled(view, *read)


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def pages(name: str, P: int, size: int, like: list[Tensor]) -> list[Tensor]:
    """K and V pages [P, H_K, size, width] in the layout of a server, NaN throughout."""
    dtype, device = like[0].dtype, like[0].device
    if name == "vllm":  # [blocks, heads, size, D + D_v]
        both = empty(P, H_K, size, D + D_V, dtype=dtype, device=device)
        return [both[..., :D], both[..., D:]]
    if name == "blocks-outermost":  # [blocks, layers, size, heads, D + D_v], the second layer
        both = empty(P, 3, size, H_K, D + D_V, dtype=dtype, device=device)[:, 1].transpose(1, 2)
        return [both[..., :D], both[..., D:]]
    if name == "sglang":  # one pool of tokens each, and here pages of five of them
        buffers = [empty(P * size, H_K, width, dtype=dtype, device=device) for width in (D, D_V)]
        return [x.view(P, size, H_K, -1).transpose(1, 2) for x in buffers]
    return [empty(P, H_K, size, width, dtype=dtype, device=device) for width in (D, D_V)]


def empty(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return torch.full(shape, 127, dtype=torch.uint8, device=device).view(dtype)


def assert_step(
    step: Step, kind: str, options: dict[str, Any], device: str, dtype: torch.dtype, backend: str
) -> None:
    """Check o and lse of a step against the oracle, row by row."""
    filled = fill(kind, step, dtype, device)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(step.new), H_Q, D, generator=generator).to(device, dtype)
    offsets = step.offsets.to(device)
    actual = attention_paged(q, filled.view, offsets, return_lse=True, backend=backend, **options)
    held = torch.tensor(step.held)

    def oracle(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = (x.to(dtype) for x in (q, filled.k, filled.v))
        return reference.attention_paged(*rows, held, offsets, return_lse=True, **options)

    exact = oracle(torch.float64)
    assert_all_within_budget(
        ("o", "lse"), actual, exact, worst_naive(exact, lambda: oracle(q.dtype))
    )


CACHES = (
    "1", "3", "16", "256", "vllm", "blocks-outermost", "sglang", "5 int8 a token", "5 fp8 a token",
    "16 int8 a head", "vllm fp8 a tensor", "sglang fp8 a head",
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CACHES)
def test_caches(kind: str, backend: str, device: str) -> None:
    """And of the generated calls none has as many tokens of a row as the first of these has."""
    step = MIXED if (kind, backend) == ("blocks-outermost", "triton") else SMALL
    slopes = torch.rand(len(step.held), H_Q, device=device)
    options = {"sinks": torch.randn(H_Q, device=device), "alibi_slopes": slopes}
    assert_step(step, kind, options, device, torch.float16, backend)


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
    options = {"tree_mask": tree.to(device)}
    assert_step(step, "vllm", options, device, torch.float32, "triton")
    assert merged == (set() if multiprocessors == 1 else {16, 32})


def query(step: Step, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sum(step.new), H_Q, D, generator=torch.Generator().manual_seed(1)).to(
        device, dtype
    )


@pytest.mark.parametrize(
    ("layout", "backend"),
    gate_cases(
        [("part", "triton"), ("unaligned", "triton"), ("part", "torch")],
        [("dense", "triton"), ("heads first", "triton"), ("heads first", "torch")],
    ),
)
def test_out_is_written_in_place(layout: str, backend: str, device: str) -> None:
    """And nothing beside it, nor at tokens that no row has."""
    filled, q = fill("3", SMALL, torch.float16, device), query(SMALL, device, torch.float16)
    q = torch.cat((q, q[:3]))
    shape = (q.shape[0], H_Q, D_V)
    memory = torch.full((2, *shape[:2], 2 * D_V), 7.0, dtype=q.dtype, device=device)
    out = {
        "dense": torch.full(shape, 7.0, dtype=q.dtype, device=device),
        "heads first": memory.flatten()[: q.shape[0] * H_Q * D_V]
        .view(H_Q, -1, D_V)
        .transpose(0, 1),
        "part": memory[1, :, :, :D_V],
        "unaligned": memory[0, :, :, 3 : D_V + 3],
    }[layout]
    offsets = SMALL.offsets.to(device)
    expected = attention_paged(q, filled.view, offsets, backend=backend)[:-3]
    before = memory.clone()
    assert attention_paged(q, filled.view, offsets, out=out, backend=backend) is out
    assert torch.equal(out[:-3], expected)
    assert (out[-3:] == 7).all()
    out.fill_(7.0)
    assert torch.equal(memory, before)


# Groups of three rows and of two, one of which has no token, and two rows of no group.
SHARING = Step((1, 9, 1, 0, 3, 2, 5), (41, 60, 27, 20, 19, 30, 5))
GROUPS, SHARED = (0, 3, 5), (25, 15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", gate_cases(["5 int8 a token", "5"], ["vllm", "sglang", "1"]))
def test_pages_that_rows_share_are_read_for_all_of_them(
    kind: str, backend: str, device: str
) -> None:
    """Attention of each row to all that it holds; rows of no group keep their bits."""
    dtype = torch.float16
    filled, q = fill(kind, SHARING, dtype, device), query(SHARING, device, dtype)
    table, size = filled.view.block_table.clone(), filled.view.page_size
    k, v = filled.k.clone(), filled.v.clone()
    for (first, last), length in zip(pairwise(GROUPS), SHARED, strict=True):
        table[first:last, : length // size] = table[first, : length // size]
        for x in (k, v):
            x[first:last, :, :length] = x[first, :, :length]
    view, offsets = filled.view._replace(block_table=table), SHARING.offsets.to(device)
    groups, lengths = (torch.tensor(x, device=device) for x in (GROUPS, SHARED))
    shared = shared_pages(view, offsets, groups, lengths)
    tree = torch.ones(q.shape[0], 9, dtype=torch.bool, device=device).tril()
    how: Any = {"sinks": torch.ones(H_Q, device=device), "softcap": 2.0, "tree_mask": tree}
    q, out = torch.cat((q, q[:2])), torch.full((q.shape[0] + 2, H_Q, 2 * D_V), 7.0, dtype=dtype)
    out = out.to(device)[..., :D_V]
    how["tree_mask"] = torch.cat((tree, tree[:2]))
    actual = attention_paged(
        q, view, offsets, shared=shared, return_lse=True, backend=backend, out=out, **how
    )
    assert actual[0] is out and (out[-2:] == 7).all()
    plain = attention_paged(q, view, offsets, return_lse=True, backend=backend, **how)
    n = q.shape[0] - 2
    alone = offsets[GROUPS[-1]]
    assert torch.equal(out[alone:n], plain[0][alone:n])
    assert torch.equal(actual[1][:, alone:n], plain[1][:, alone:n])
    how["tree_mask"] = tree

    def oracle(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = (x.to(dtype) for x in (q[:n], k, v))
        held = torch.tensor(SHARING.held)
        return reference.attention_paged(*rows, held, offsets, return_lse=True, **how)

    exact = oracle(torch.float64)
    naive = worst_naive(exact, lambda: oracle(q.dtype))
    assert_all_within_budget(("o", "lse"), (out[:n], actual[1][:, :n]), exact, naive)


def test_caches_themselves_and_tensors_are_taken(device: str) -> None:
    cache = PagedKVCache(12, 4, H_K, D, device=device)
    rows = [cache.allocate() for _ in range(2)]
    k, v = torch.randn(2, 2, H_K, 6, D, device=device)
    cache.append(rows, k, v, [6, 3], backend="torch")
    q, offsets = torch.randn(4, H_Q, D, device=device), torch.tensor([0, 3, 4], device=device)
    expected = attention_paged(q, cache.view(rows), offsets, backend="torch")
    tensors = (cache.k[0], cache.v[0], cache.block_table[:2], cache.lengths[:2])
    for given in (cache, tensors):
        for backend in BACKENDS:
            actual = attention_paged(q, given, offsets, backend=backend)
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "torch"), (torch.half, "triton")])
def test_lse_is_in_fp32(dtype: torch.dtype, backend: str, device: str) -> None:
    filled, q = fill("3", SMALL, dtype, device), query(SMALL, device, dtype)
    how = {"return_lse": True, "backend": backend}
    o, lse = attention_paged(q, filled.view, SMALL.offsets.to(device), **how)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)


def test_a_known_call_brings_its_own_tensors(device: str) -> None:
    """Other rows, lengths and tokens in tensors of the same layout, as a replay has them."""
    first = fill("3", SMALL, torch.float32, device)
    other = Step(SMALL.new[::-1], SMALL.held[::-1])
    q, again = query(SMALL, device), query(SMALL, device).flip(0)
    call_memo.forget()
    how: Any = {"backend": "triton", "sinks": torch.ones(H_Q, device=device)}
    attention_paged(q, first.view, SMALL.offsets.to(device), **how)
    assert call_memo._slot.cache_info().currsize == 1
    second = fill("3", other, torch.float32, device).view
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
    filled, q = fill("3", LONG, torch.float32, device), query(LONG, device)
    view = filled.view
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
    filled, q = fill("3", SMALL, torch.float32, device), query(SMALL, device)
    offsets = SMALL.offsets.to(device)

    def step(q: Tensor, out: Tensor) -> Tensor:
        return attention_paged(q * 2, filled.view, offsets, out=out, backend="triton") + 1

    out, expected = torch.zeros(2, q.shape[0], H_Q, D_V, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, out), step(q, expected))
    torch.testing.assert_close(out, expected)
