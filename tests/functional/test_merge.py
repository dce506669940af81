"""Merging attention over parts of the keys, and prefixes that a batch shares."""

import pytest
import torch
from fuzz.judges import check_by_kernels

from fastattn import (
    KVCache,
    PagedKVCache,
    attention_paged,
    cascade_attention,
    decode_attention,
    merge,
    shared_pages,
    view_of_tensors,
)
from fastattn.functional.merge import merge_into
from fastattn.ops.merge import merge_forward
from fastattn.testing.inputs import draws

BACKENDS = ("triton", "torch")


def parts(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """o and lse of two parts."""
    draw = draws(0, device, dtype)
    return [x for _ in range(2) for x in (draw(2, 2, 3, 12), draw(2, 2, 3))]


@pytest.mark.parametrize("seed", range(7))
def test_generated_calls(seed: int, one_thread: None, device: str) -> None:
    """Parts that saw nothing are NaN in some."""
    check_by_kernels("merge", seed, device)


def test_gradients(device: str) -> None:
    leaves = [x[:1, :1].clone().requires_grad_() for x in parts(torch.float64, device)]
    assert torch.autograd.gradcheck(merge, leaves)
    assert torch.autograd.gradgradcheck(merge, leaves)


def test_a_forced_kernel_says_why_it_cannot(device: str) -> None:
    with pytest.raises(ValueError, match=r"cannot merge: .* float64"):
        merge(*parts(torch.float64, device), backend="triton")


def test_the_op_has_a_fake_and_a_schema(device: str) -> None:
    tests = ("test_schema", "test_faketensor")
    given = tuple(parts(torch.float32, device))
    torch.library.opcheck(merge_forward.op, given, test_utils=tests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_that_rows_were_forked_from(backend: str, device: str) -> None:
    draw = draws(2, device)
    cache = PagedKVCache(8, 4, 1, 16, device=device)
    prompt = [cache.allocate() for _ in range(9)][-1]  # there are more rows than pages
    cache.append([prompt], draw(1, 1, 10, 16), draw(1, 1, 10, 16), backend="torch")
    rows = [cache.fork(prompt) for _ in range(3)]
    cache.append(rows, draw(3, 1, 5, 16), draw(3, 1, 5, 16), [5, 2, 3], backend="torch")
    q, views = draw(3, 2, 1, 16), (cache.view([prompt]), cache.view(rows))
    actual = cascade_attention(q, *views, forked=True, backend=backend, return_lse=True)
    expected = decode_attention(q, views[1], backend="torch", return_lse=True)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    # Without `forked` the prefix would count twice.
    twice = cascade_attention(q, *views, backend=backend)
    assert (twice - actual[0]).abs().max() > 0.01
    assert cascade_attention(q[:, :, :0], *views, backend=backend).shape == q[:, :, :0].shape


def test_prefixes_in_fp64_are_not_merged_by_an_lse_of_fp32(device: str) -> None:
    draw = draws(3, device, torch.float64)
    q, k, v = draw(1, 1, 1, 4), draw(1, 1, 6, 4), draw(1, 1, 6, 4)
    q[..., 0] = k[..., 0] = 100.0  # all scores are about 5000, and an lse of fp32 is off by 2e-4
    caches = [KVCache(1, 1, 6, 4, dtype=torch.float64, device=device) for _ in range(3)]
    for cache, part in zip(caches, (slice(0, 3), slice(3, 6), slice(0, 6)), strict=True):
        cache.append(k[:, :, part], v[:, :, part])
    prefix, own, whole = caches
    actual, expected = cascade_attention(q, prefix, own), decode_attention(q, whole)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    of_three = (x.view(2, 1, 3, 4) for x in (k, v))
    lengths, table, one = (torch.tensor(x, device=device) for x in ([6], [[0, 1]], [0, 1]))
    view = view_of_tensors(*of_three, lengths.int(), block_table=table.int())
    shared = shared_pages(view, one, one, lengths // 2)
    actual, lse = attention_paged(q[0], view, one, shared=shared, return_lse=True)
    torch.testing.assert_close(actual, expected[0], rtol=1e-12, atol=1e-12)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_prefix_is_merged_into_the_tokens_of_its_groups_alone(backend: str, device: str) -> None:
    """Whatever stands behind them, here finite numbers."""
    o1, o = torch.randn(2, 5, 2, 12, device=device)
    lse1, lse = torch.randn(2, 2, 5, device=device)
    lse1[0, 1], lse[1, 2] = float("-inf"), float("-inf")
    actual, found_lse = o.clone(), lse.clone()
    merge_into(o1, lse1, actual, found_lse, torch.tensor([0, 2, 3], device=device), backend)
    merged, merged_lse = merge(o1, lse1.T, o, lse.T, backend="torch")
    torch.testing.assert_close(actual[:3], merged[:3])
    torch.testing.assert_close(found_lse[:, :3], merged_lse.T[:, :3])
    assert torch.equal(actual[3:], o[3:]) and torch.equal(found_lse[:, 3:], lse[:, 3:])
    assert torch.equal(actual[1, 0], o[1, 0])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_group_may_have_more_queries_than_a_row_has_slots(backend: str, device: str) -> None:
    pages, q = torch.randn(5, 1, 4, 16, device=device), torch.randn(12, 1, 16, device=device)
    table, offsets = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]]), torch.tensor([0, 3, 6, 9, 12])
    table, offsets = table.to(device), offsets.to(device)
    view = view_of_tensors(pages, pages, torch.full_like(table[:, 0], 7), block_table=table)
    shared = shared_pages(view, offsets, table[:2, 1] * 4 - 4, table[:1, 1] * 4)
    o = attention_paged(q, view, offsets, shared=shared, backend=backend)
    torch.testing.assert_close(o, attention_paged(q, view, offsets, backend="torch"))


def test_a_padded_row_of_a_graph_takes_no_share_away(device: str) -> None:
    """It names a row in use, has no tokens, and is of no group."""
    pool = PagedKVCache(4, 4, 1, 8, max_rows=2, device=device)
    row = pool.allocate()
    pool.extend([row], 4)
    twin = pool.fork(row)
    pool.extend([row, twin], 1)
    numbers = ([row, twin, row], [0, 1, 2, 2], [0, 2], [4])
    index, offsets, rows, lengths = (torch.tensor(x, device=device) for x in numbers)
    view = pool.view([row])._replace(batch_index=index, length_bound=5)
    assert shared_pages(view, offsets, rows, lengths).starts.tolist() == [4, 4]
