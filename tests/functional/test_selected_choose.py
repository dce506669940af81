"""Key blocks that queries choose, and attention by that choice: NSA and MoBA."""

import itertools
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
from fastattn.kernels.launch import tiles
from fastattn.testing import make_qkv
from fastattn.testing.calls import Draw
from fastattn.testing.compare import assert_all_near
from fastattn.testing.inputs import draws

BACKENDS = ("torch", "triton")


def scores_of_blocks(x: Tensor, weights: bool, how: dict[str, Any], T: int) -> list[float]:
    """Scores of a query's blocks, of those of its keys [heads, keys], -inf where it sees none.

    NSA's sum of p[(l'/d) j + m - n] over m < l'/d and n < l/d, or the largest.
    """
    length, step = how["pool"]
    begun, overlaps = how["block_k"] // step, length // step
    scores = []
    for j in range(-(-T // how["block_k"])):
        places = [begun * j + m - o for m in range(begun) for o in range(overlaps)]
        own = x[:, [i for i in places if 0 <= i < x.shape[1]]]
        own = own[:, (own > -torch.inf).all(0)]
        best = (own.exp().sum() if weights else own.max()) if own.numel() else -torch.inf
        scores.append(float(best))
    return scores


def assert_best(indices: list[int], scores: list[float], own: int, how: dict[str, Any]) -> None:
    """Blocks that are always taken, then the best; of causal queries those that began."""
    always = {*range(how["first"]), *range(own - how["latest"] + 1, own + 1)}
    scores = [torch.inf if j in always else x for j, x in enumerate(scores)]
    if how["causal"]:
        scores = [x if j <= own else -torch.inf for j, x in enumerate(scores)]
    listed = [j for j in indices if j >= 0]
    expected = [x for x in sorted(scores, reverse=True) if x > -torch.inf][: len(indices)]
    assert [scores[j] for j in listed] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len({*listed}) == len(listed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(24))
def test_generated_choices(
    seed: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Weights or scores, over the heads of a list; queries behind tokens that are there already."""
    random = Draw(f"choice {seed}")
    step, T_q = random.choice(1, 1, 4, 3), random.choice(1, 15, 16, 17, 40)
    length = step * random.choice(1, 1, 2)
    how: dict[str, Any] = {
        "block_k": step * random.choice(1, 2, 8, 16, 32), "pool": (length, step),
        "query_offset": random.choice(0, random.integer(1, 70), 33),
        "causal": random.chance(0.7), "first": random.integer(0, 2), "latest": random.integer(0, 2),
    }  # fmt: skip
    T = T_q + how["query_offset"]
    n = max(1, how["first"] + how["latest"] + random.integer(0, 3))
    H_k, G = random.choice((1, 2), (2, 1), (2, 2))
    how["lists"], weights = random.choice(H_k, 1, H_k * G), random.chance(0.5)
    sizes = (1, H_k * G, H_k, T_q, max(1, (T - length) // step + 1), 16)
    q, k, _ = make_qkv(*sizes, device=device, requires_grad=False, seed=seed)
    x = torch.einsum("bhtd,bhid->bhti", q.double(), k.double().repeat_interleave(G, 1))[0].cpu() / 4
    t, i = torch.arange(T_q)[:, None] + how["query_offset"], torch.arange(x.shape[2])
    if how["causal"]:
        x = x.masked_fill(i * step + length - 1 > t, -torch.inf)
    if weights:
        lse = x.logsumexp(-1, keepdim=True)
        x = torch.where(lse.isfinite(), x - lse, -torch.inf)
        how["lse"] = lse[None, ..., 0].float().to(device)
    monkeypatch.setattr(choose, "_AT_ONCE", random.choice(2**9, 2**24))
    with tiles.forced(backward_dq=tiles.TileConfig(16, 16)):
        actual = select_blocks(q, k, n, backend=backend, **how)
    assert actual.shape == (1, how["lists"], T_q, n) and actual.dtype == torch.int32
    x = x.unflatten(0, (how["lists"], -1))
    for h, query in itertools.product(range(len(x)), range(T_q)):
        scores = scores_of_blocks(x[h, :, query], weights, how, T)
        own = (query + how["query_offset"]) // how["block_k"]
        assert_best(actual[0, h, query].tolist(), scores, own, how)


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
    return reference.attention(q, k, v, attn_mask=keep)


def near(names: str, ours: Any, oracle: Any, tensors: list[Tensor]) -> None:
    """Results and gradients within the budget of the oracle's."""

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
    # Inductor would copy another layout for a backward, with the strides of one length.
    compiled = torch.compile(pooled_attention, backend="eager", fullgraph=True)
    assert compiled(q, k, v, pool, backend=backend)[0].is_contiguous()


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
