"""Which key blocks queries choose, and attention by that choice: NSA and MoBA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import reference
from fastattn.functional.selected import (
    choose,
    moba_attention,
    native_sparse_attention,
    pooled_attention,
    select_blocks,
)
from fastattn.testing import make_qkv
from fastattn.testing.compare import assert_all_near
from fastattn.testing.inputs import draws

BACKENDS = ("torch", "triton")


def chosen(indices: Tensor) -> list[Any]:
    """Blocks of each list, in order, without -1."""
    return [sorted(x for x in one.tolist() if x >= 0) for one in indices.flatten(0, 2)]


def best_blocks(scores: Tensor, n: int, always: Callable[[int], set[int]]) -> list[list[int]]:
    """The n best of each query's blocks, of scores [B, H_s, T_q, N], one after another."""
    chosen = []
    for b, h, t in ((b, h, t) for b, h, t in torch.ones(scores.shape[:3]).nonzero().tolist()):
        row = scores[b, h, t].tolist()
        taken = always(t)
        others = [j for j in range(len(row)) if j not in taken and row[j] != -torch.inf]
        others.sort(key=lambda j: -row[j])
        chosen.append(sorted([*taken, *others][:n] if len(taken) < n else sorted(taken)[:n]))
    return chosen


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_overlapping_keys_choose(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NSA's sum: p[(l'/d) j + m - n] over m < l'/d and n < l/d, and over the heads of a group."""
    monkeypatch.setattr(choose, "_AT_ONCE", 2**10)
    length, step, block, T, n = 8, 4, 8, 45, 3
    keys = (T - length) // step + 1
    q, k, _ = make_qkv(2, 4, 2, T, keys, 16, device=device, requires_grad=False)
    t, i = torch.arange(T)[:, None], torch.arange(keys)
    seen = (i * step + length - 1 <= t).to(device)
    lse = reference.attention(q, k, k, attn_mask=seen[None, None], return_lse=True)[1].float()
    x = torch.einsum("bhgtd,bhid->bhgti", q.unflatten(1, (2, 2)).double(), k.double()) / 4
    p = torch.where(seen, (x - lse.unflatten(1, (2, 2))[..., None]).exp(), 0.0).sum(2)
    blocks = -(-T // block)
    scores = torch.full((2, 2, T, blocks), -torch.inf, dtype=torch.float64)
    for query in range(T):
        for j in range(blocks):
            places = [block // step * j + m - o for m in range(block // step) for o in range(2)]
            there = [x for x in places if 0 <= x < keys and seen[query, x]]
            if there:
                scores[:, :, query, j] = p[:, :, query, there].sum(-1).cpu()
    actual = select_blocks(
        q, k, n, block_k=block, lse=lse, pool=(length, step), first=1, latest=1, backend=backend
    )
    expected = best_blocks(scores, n, lambda query: {0, query // block})
    # Blocks that begin behind the query are none of its.
    assert chosen(actual) == [
        [j for j in x if j <= place % T // block] for place, x in enumerate(expected)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_largest_scores_choose(backend: str, causal: bool, device: str) -> None:
    """The best of two, with a list for all heads; queries behind tokens that are there already."""
    T_q, offset, block, n = 9, 24, 8, 2
    T = T_q + offset
    q, k, _ = make_qkv(2, 4, 2, T_q, T, 16, device=device, requires_grad=False)
    x = torch.einsum("bhtd,bhjd->bhtj", q.double(), k.double().repeat_interleave(2, 1)).cpu()
    if causal:
        x = x.masked_fill(torch.arange(T) > torch.arange(T_q)[:, None] + offset, -torch.inf)
    x = torch.nn.functional.pad(x, (0, -T % block), value=-torch.inf)
    scores = x.unflatten(-1, (-1, block)).amax((1, -1))[:, None]
    actual = select_blocks(
        q, k, n, block_k=block, lists=1, causal=causal, latest=1, query_offset=offset,
        backend=backend,
    )  # fmt: skip
    assert chosen(actual) == best_blocks(scores, n, lambda t: {(t + offset) // block})
    few = select_blocks(q, k, 9, block_k=block, lists=1, query_offset=offset, backend=backend)
    assert few.shape == (2, 1, T_q, 9) and few.dtype == torch.int32
    assert bool((few[..., 5:] == -1).all()) and bool((few[:, :, -1, :5] >= 0).all())


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
    return reference.attention(q, k, v, attn_mask=keep)


def near(names: str, ours: Any, oracle: Any, tensors: list[Tensor]) -> None:
    """Results and gradients of ours within the budget of the oracle's."""

    def results(function: Any, given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        o = function(*leaves)
        do = draws(5)(*o.shape).to(o)
        return [o, *torch.autograd.grad(o, leaves, do)]

    exact = results(oracle, [x.double() for x in tensors])
    assert_all_near(names.split(), results(ours, tensors), exact, lambda: results(oracle, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", [(8, 4), (5, 5), (6, 3), (1, 1)])
def test_attention_to_pooled_keys(backend: str, pool: tuple[int, int], device: str) -> None:
    T = 26 if backend == "torch" else 14
    keys = (T - pool[0]) // pool[1] + 1
    q, k, v = make_qkv(1, 2, 1, T, keys, 8, device=device)
    last = torch.arange(keys, device=device) * pool[1] + pool[0] - 1
    keep = last <= torch.arange(T, device=device)[:, None]
    near(
        "o dq dk dv",
        lambda q, k, v: pooled_attention(q, k, v, pool, backend=backend)[0],
        lambda q, k, v: dense(q, k, v, keep),
        [q, k, v],
    )


def of_lists(indices: Tensor, block: int, q: Tensor) -> Tensor:
    """Mask of lists for blocks, causal."""
    T = q.shape[2]
    named = reference.selected_mask(indices, (1, block), q.shape[1], T, T, None)
    return named & torch.ones(T, T, dtype=torch.bool, device=q.device).tril()


@pytest.mark.parametrize("backend", BACKENDS)
def test_native_sparse_attention(backend: str, device: str) -> None:
    T = 40 if backend == "torch" else 24
    pool, block, n, window = (4, 2), 4, 3, 5
    keys = (T - pool[0]) // pool[1] + 1
    q, k, v = make_qkv(1, 2, 1, T, T, 8, device=device)
    _, k_pooled, v_pooled = make_qkv(1, 2, 1, T, keys, 8, device=device, seed=1)
    gates = draws(2, device)(1, 2, T, 3).sigmoid()
    lse = pooled_attention(q, k_pooled, v_pooled, pool, backend="torch")[1].detach()
    # The choice is that of `select_blocks`, which has tests of its own.
    indices = select_blocks(
        q, k_pooled, n, block_k=block, lse=lse, pool=pool, first=1, latest=2, backend="torch"
    )
    t = torch.arange(T, device=device)[:, None]
    ended = torch.arange(keys, device=device) * pool[1] + pool[0] - 1 <= t
    near_by = (t - t.mT >= 0) & (t - t.mT < window)

    def oracle(q: Tensor, k: Tensor, v: Tensor, kp: Tensor, vp: Tensor, g: Tensor) -> Tensor:
        branches = (
            dense(q, kp, vp, ended),
            dense(q, k, v, of_lists(indices, block, q)),
            dense(q, k, v, near_by),
        )
        return torch.stack(branches, -1).mul(g[..., None, :]).sum(-1)

    def ours(*tensors: Tensor) -> Tensor:
        return native_sparse_attention(
            *tensors, block_k=block, n=n, window=window, pool=pool, backend=backend
        )

    names = "o dq dk dv dk_pooled dv_pooled dgates"
    near(names, ours, oracle, [q, k, v, k_pooled, v_pooled, gates])


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixture_of_block_attention(backend: str, device: str) -> None:
    """Each head by itself: its own block, and the one before with the best mean."""
    T, block = 22, 4
    q, k, v = make_qkv(2, 2, 1, T, T, 8, device=device)
    means = torch.stack([x.mean(2) for x in k[:, :, :20].double().split(block, 2)], 2)
    gate = torch.einsum("bhtd,bhjd->bhtj", q.double(), means.expand(2, 2, 5, 8)).cpu()
    own = torch.arange(T) // block
    gate = gate.masked_fill(torch.arange(5) >= own[:, None], -torch.inf)
    best = gate.max(-1)
    other = best.indices.masked_fill(best.values == -torch.inf, -1)
    indices = torch.stack((own.expand_as(other), other), -1).to(device)
    near(
        "o dq dk dv",
        lambda q, k, v: moba_attention(q, k, v, block_k=block, n=2, backend=backend),
        lambda q, k, v: dense(q, k, v, of_lists(indices, block, q)),
        [q, k, v],
    )
