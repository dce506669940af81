"""The kernels where there is nothing to attend to, memory is far, scores are -inf or NaN."""

import math
import mmap
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fuzz.judges import check_by_kernels
from public_calls import calls

import fastattn
from fastattn.kernels import backward, backward_dkv, forward
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    tile = tiles.TileConfig(16, 16)
    with tiles.forced(forward=tile, backward_dq=tile, backward_dkv=tile):
        yield


triton_attention = partial(fastattn.attention, backend="triton")
triton_varlen = partial(fastattn.attention_varlen, backend="triton")


def packed_inputs(T_q: int, T_k: int, D: int, device: str) -> list[torch.Tensor]:
    """q, k, v as [total, H, D], of two heads and one."""
    dense = make_qkv(1, 2, 1, T_q, T_k, D, device=device)
    return [x[0].transpose(0, 1).detach() for x in dense]


@triton.jit
def hide_far(x, b, h, q_pos, k_pos):
    """A score that is itself -inf, so that no mask says what is hidden."""
    return tl.where(tl.abs(q_pos - k_pos) > 9, float("-inf"), 2 * x)


@triton.jit
def hide_far_grad(dx, x, b, h, q_pos, k_pos):
    return 2 * dx


@triton.jit
def past(b, h, q_pos, k_pos):
    return k_pos < q_pos


@triton.jit
def by_distance(x, b, h, q_pos, k_pos):
    return x / (q_pos - k_pos)


@triton.jit
def by_distance_grad(dx, x, b, h, q_pos, k_pos):
    return dx / (q_pos - k_pos)


SIZES = (2, 2, 1, 21, 37, 16)  # B, H_q, H_k, T_q, T_k, D


@pytest.mark.parametrize("seed", range(20))
def test_packed_sequences(seed: int, one_thread: None, device: str) -> None:
    check_by_kernels("attention_varlen", seed, device)


def test_scores_that_hide_by_themselves(device: str) -> None:
    """A score_mod that returns -inf, for whole rows in some blocks and for one row everywhere."""
    q, k, v = make_qkv(*SIZES, device=device)
    assert_matches_reference(
        triton_attention, q, k, v, score_mod=hide_far, score_mod_grad=hide_far_grad, query_offset=26
    )


def test_hidden_scores_that_are_no_numbers(device: str) -> None:
    """At distance 0, which the mask hides, score and gradient are divided by 0."""
    q, k, v = make_qkv(*SIZES, device=device)
    mods = {"score_mod": by_distance, "score_mod_grad": by_distance_grad}
    assert_matches_reference(triton_attention, q, k, v, mask_mod=past, **mods)


def test_rows_of_nothing_but_minus_infinity(device: str) -> None:
    """A bias that hides every key of a row, in full blocks: o = 0, lse = -inf, no gradients."""
    q, k, v = make_qkv(*SIZES, device=device)
    bias = draw(2, 1, 21, 37).to(device)
    bias[:, :, 3] = -math.inf
    bias[1] = -math.inf
    for sinks in (None, draw(2).to(device)):
        assert_matches_reference(triton_attention, q, k, v, attn_bias=bias, sinks=sinks)
    o, lse = triton_attention(q, k, v, attn_bias=bias, return_lse=True)
    assert (o[1] == 0).all() and (lse[1] == -math.inf).all()
    assert (o[0, :, 3] == 0).all() and lse[0, :, 4].isfinite().all()


@pytest.mark.parametrize("lengths", [((), ()), ((0, 0), (0, 0)), ((0, 3), (4, 0)), ((0,), (7,))])
def test_packed_sequences_of_nothing(lengths: tuple[Any, Any], device: str) -> None:
    q, k, v = packed_inputs(sum(lengths[0]), sum(lengths[1]), 4, device)
    starts = [torch.tensor((0, *x), device=device).cumsum(0) for x in lengths]
    sinks = draw(2).to(device).requires_grad_()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o, lse = triton_varlen(*inputs, *starts, causal=True, sinks=sinks, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, (2, q.shape[0]))
    assert (o == 0).all(), "no sequence has both"
    assert torch.equal(lse, sinks.detach()[:, None].expand_as(lse))
    grads = torch.autograd.grad(o.sum() + lse.sum(), (*inputs, sinks))
    assert all((x == 0).all() for x in grads[:3])
    assert torch.equal(grads[3], torch.full_like(sinks, q.shape[0]))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_batches_of_no_rows(backend: str, device: str) -> None:
    q, k, x = (torch.zeros(0, *n, 16, device=device) for n in ((4, 5), (2, 5), (5,)))
    blocks: dict[str, Any] = {"block_k": 4, "n": 3, "backend": backend, "device": device}
    layers = fastattn.MoBAttention, partial(fastattn.NativeSparseAttention, pool=(4, 2), window=4)
    assert all(layer(16, 4, 2, **blocks)(x).shape == x.shape for layer in layers)
    for quantize in (None, "int8"):
        pool = fastattn.PagedKVCache(2, 4, 2, 16, quantize=quantize, device=device)
        pool.append([], k, k, backend=backend)
        assert fastattn.decode_attention(q, pool, backend=backend).shape == q.shape


def test_rows_past_the_last_add_nothing_whatever_their_scores(device: str) -> None:
    """5 queries of a tile of 16 exist; the exponentials of the others would be infinite."""
    T_q, T_k, reach = 5, 20, 25
    bias = torch.zeros(2, 2 * reach + 1, device=device)
    bias[:, reach + T_k :] = 300.0
    inputs = make_qkv(1, 2, 1, T_q, T_k, 8, device=device)
    assert_matches_reference(triton_attention, *inputs, relative_bias=bias)


def test_neighbours_in_the_pack_reach_nothing(device: str) -> None:
    """NaN in one sequence stays in it."""
    q, k, v = packed_inputs(41, 41, 8, device)
    starts = torch.tensor([0, 20, 41], device=device)
    k = k.index_fill(0, torch.arange(20, 41, device=device), math.nan)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = triton_varlen(*inputs, starts)
    grads = torch.autograd.grad(o.sum(), inputs)
    for x in (o, *grads[:2]):
        assert x[:20].isfinite().all()
        assert x[20:].isnan().any()


# Python names it from 3.13 on. Memory that is not written needs no page, and no promise of one.
_NO_RESERVE = 0x4000


def sparse(*sizes: int, strides: tuple[int, ...], dtype: Any = torch.float16) -> torch.Tensor:
    """A tensor in many GiB of which only those pages exist that were written; else zero."""
    elements = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    assert elements > 2**31, "the point of it"
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, dtype.itemsize * elements, flags=flags), dtype=dtype)
    return memory.as_strided(sizes, strides)


def filled(x: torch.Tensor, *strides: int) -> torch.Tensor:
    return sparse(*x.shape, strides=strides, dtype=x.dtype).copy_(x)


FAR = 2**31 + 2**20
# Of [2, 2, 20, 8]: every dim goes past 2^31 elements by itself, the last within a tile of 16 rows.
FAR_STRIDES = (8 * FAR, 3 * FAR, FAR // 8)


on_memory_with_holes = pytest.mark.skipif(
    not tiles._INTERPRETING or sys.platform != "linux",
    reason="memory with holes is Linux's, and no GPU has it",
)


@on_memory_with_holes
def test_offsets_past_two_to_the_31(monkeypatch: Any) -> None:
    """Inputs, outputs and gradients spread over more than 2^31 elements, in memory with holes."""

    def far(_: object, like: torch.Tensor, heads: int, rows: int, cols: int) -> torch.Tensor:
        return sparse(like.shape[0], heads, rows, cols, strides=(*FAR_STRIDES, 1))

    for module in (forward, backward, backward_dkv):
        monkeypatch.setattr(module, "result_in_layout", far)
    clean = make_qkv(2, 2, 2, 20, D=8, dtype=torch.float16)
    q, k, v = (filled(x.detach(), *FAR_STRIDES, 1) for x in clean)
    mask = draw(2, 2, 20, 20) < 1
    bias = draw(2, 2, 20, 20).half()
    far_bias = filled(bias, *FAR_STRIDES, 1)
    assert_matches_reference(triton_attention, q, k, v, clean=clean, attn_mask=mask, attn_bias=bias)
    o, expected = (triton_attention(q, k, v, attn_bias=x) for x in (far_bias, bias))
    assert torch.equal(o, expected)


def far(x: torch.Tensor, within: int = FAR // 2) -> torch.Tensor:
    """x with more than 2^31 elements between its rows, if it has rows of heads.

    within: elements from a row of one head to the next.
    """
    if x.dim() < 3:
        return x
    apart = [math.prod(x.shape[dim:-1]) * FAR for dim in range(1, x.dim() - 1)]
    return filled(x, *apart, within, 1)


def parts(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result.values() if isinstance(result, dict) else result or ():
            yield from parts(part)


# additive_attention has no kernel, and BLAS other bits for other strides.
@on_memory_with_holes
@pytest.mark.parametrize("name", [name for name in calls("cpu") if name != "additive_attention"])
def test_every_call_with_offsets_past_two_to_the_31(name: str) -> None:
    function, tensors = calls("cpu")[name]
    spread = {name: far(x) for name, x in tensors.items()}
    if name == "decode_attention":
        with pytest.raises(ValueError, match=r"k must have .* slots less than 4194304 numbers"):
            function("triton", **spread)
        spread = {name: far(x, 2**22 - 4) for name, x in tensors.items()}
    near, actual = (parts(function("triton", **given)) for given in (tensors, spread))
    assert all(torch.equal(x, y) for x, y in zip(near, actual, strict=True))


@on_memory_with_holes
def test_pages_with_offsets_past_two_to_the_31() -> None:
    """A pool of pages that is larger than 2^31 elements is read and written."""
    pages = draw(6, 2, 8, 16), draw(6, 2, 8, 16, seed=1)
    table, lengths = torch.tensor([[5, 0, 3], [1, 4, 2]]), torch.tensor([20, 13])
    q, slots = draw(5, 4, 16), torch.tensor([5 * 8 + 1, 4 * 8])

    def steps(k: torch.Tensor, v: torch.Tensor) -> Iterator[torch.Tensor]:
        view = fastattn.view_of_tensors(k, v, lengths, block_table=table)
        fastattn.append_paged(view, q[:2, :2], q[2:4, :2], slots, backend="triton")
        yield fastattn.attention_paged(q, view, torch.tensor([0, 4, 5]), backend="triton")
        yield fastattn.decode_attention(q[:2, :, None], view, backend="triton")

    apart = [far(x, 16) for x in pages]
    assert all(torch.equal(x, y) for x, y in zip(steps(*apart), steps(*pages), strict=True))
