"""DeepSeek's indexer: the tokens that it chooses, and the loss that trains it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from held import Held
from torch import Tensor

from fastattn import indexer_loss, select_tokens
from fastattn.testing import make_qkv
from fastattn.testing.compare import assert_all_near
from fastattn.testing.inputs import draws
from fastattn.torch_backend.selected import indexer

T_Q, T_K = 7, 11
LENGTHS = (9, 0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_AT_ONCE", 2**8)


def made(device: str, dtype: torch.dtype = torch.float32, D: int = 8) -> list[Tensor]:
    """q_index, k_index, w, q, k of two rows, the keys past LENGTHS of NaN."""
    q_index, k_index, _ = make_qkv(2, 3, 1, T_Q, T_K, D, dtype=dtype, device=device)
    w = draws(1, device)(2, 3, T_Q).to(dtype)
    q, k, _ = make_qkv(2, 4, 2, T_Q, T_K, D, dtype=dtype, device=device, seed=1)
    for x in (k_index, k):
        for b, length in enumerate(LENGTHS):
            x.data[b, :, length:] = torch.nan
    return [x.detach() for x in (q_index, k_index, w, q, k)]


def seen(b: int, t: int, offset: int) -> list[int]:
    """Keys of a query by `causal` and `key_lengths`."""
    return list(range(min(max(t + offset + 1, 0), LENGTHS[b])))


def score(q: Tensor, k: Tensor, w: Tensor, b: int, t: int, keys: Sequence[int]) -> Tensor:
    """I[t, s] of some keys."""
    return torch.stack([(w[b, :, t] * (q[b, :, t] @ k[b, 0, s]).clamp(min=0)).sum() for s in keys])


@pytest.mark.parametrize("offset", [T_K - T_Q, -2])
def test_best_tokens(offset: int, device: str) -> None:
    n = 6
    q, k, w, _, _ = made(device)
    lengths = torch.tensor(LENGTHS, device=device)
    actual = select_tokens(q, k, w, n, causal=True, query_offset=offset, key_lengths=lengths)
    assert actual.dtype == torch.int32 and actual.shape == (2, 1, T_Q, n)
    q, k, w = (x.double() for x in (q, k, w))
    for b, t in torch.ones(2, T_Q).nonzero().tolist():
        keys, row = seen(b, t, offset), actual[b, 0, t].tolist()
        count = min(n, len(keys))
        assert row[count:] == [-1] * (n - count)
        assert set(row[:count]) <= set(keys) and len(set(row[:count])) == count
        if count:
            best = score(q, k, w, b, t, keys).sort(descending=True).values[:count]
            torch.testing.assert_close(score(q, k, w, b, t, row[:count]), best, atol=1e-5, rtol=0)
    assert select_tokens(q[:, :, :0], k, w[..., :0], n).shape == (2, 1, 0, n)
    few = select_tokens(q, k[:, :, :0], w, n)
    assert few.shape == (2, 1, T_Q, n) and bool((few == -1).all())


def divergence(given: list[Tensor], rows: Any, options: dict[str, Any]) -> Tensor:
    """KL of each query, one after another; rows(b, t): its keys."""
    q_index, k_index, w, q, k = given
    actual = w.new_zeros(2, T_Q)
    cap, sinks = options.get("softcap"), options.get("sinks")
    for b, t in torch.ones(2, T_Q).nonzero().tolist():
        keys = rows(b, t)
        if not keys:
            continue
        p = torch.zeros(len(keys), dtype=w.dtype, device=w.device)
        for h in range(4):
            x = k[b, h // 2, keys] @ q[b, h, t] / q.shape[-1] ** 0.5
            x = x if cap is None else cap * (x / cap).tanh()
            p += x.exp() / (x.exp().sum() + (0 if sinks is None else sinks[h].to(x).exp()))
        p = (p / p.sum()).detach()
        weights = score(q_index, k_index, w, b, t, keys).exp()
        terms = p * (p.log() - weights.log() + weights.sum().log())
        actual = actual.index_put((torch.tensor(b), torch.tensor(t)), terms.sum())
    return actual


CASES: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "warm-up": (False, T_K - T_Q, {}),
    "warm-up, sinks and rows of nothing": (False, -2, {"sinks": draws(3)(4), "softcap": 2.0}),
    "sparse": (True, T_K - T_Q, {}),
    "sparse, sinks and rows of nothing": (True, -2, {"sinks": draws(3)(4), "softcap": 2.0}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case: str, dtype: torch.dtype, device: str) -> None:
    sparse, offset, options = CASES[case]
    options = {name: x.to(device) if name == "sinks" else x for name, x in options.items()}
    tensors = made(device, dtype)
    # Names of keys twice, of none, of such that are not seen.
    drawn = torch.randint(-1, T_K, (2, 1, T_Q, 6), generator=torch.Generator().manual_seed(2))
    masks = {
        "causal": True, "query_offset": offset, "key_lengths": torch.tensor(LENGTHS, device=device),
    }  # fmt: skip

    def rows(b: int, t: int) -> list[int]:
        named = set(drawn[b, 0, t].tolist()) if sparse else set(range(T_K))
        return [s for s in seen(b, t, offset) if s in named]

    def results(function: Any, given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        actual = function(leaves)
        grads = torch.autograd.grad(
            actual, leaves, draws(5, device)(*actual.shape).to(actual), allow_unused=True
        )
        assert grads[3:] == (None, None)
        return [actual, *grads[:3]]  # type: ignore[list-item]

    def ours(given: list[Tensor]) -> Tensor:
        return indexer_loss(*given, drawn.to(device) if sparse else None, **options, **masks)

    def oracle(given: list[Tensor]) -> Tensor:
        return divergence(given, rows, options)

    actual = results(ours, tensors)
    assert actual[0].dtype == torch.float32
    exact = results(oracle, [x.double() for x in tensors])
    assert_all_near(
        ("loss", "dq_index", "dk_index", "dw"), actual, exact, lambda: results(oracle, tensors)
    )


@pytest.mark.parametrize("of", ["choice", "warm-up", "sparse"])
def test_memory_grows_with_the_tokens(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_AT_ONCE", 2**12)

    def peak(T: int) -> int:
        q_index, k_index, q = (torch.randn(1, heads, T, 2) for heads in (2, 1, 2))
        with Held() as held:
            if of == "choice":
                select_tokens(q_index, k_index, q[..., 0], 4, causal=True)
                return held.most
            indices = torch.randint(T, (1, 1, T, 4)) if of == "sparse" else None
            leaves = [x.requires_grad_() for x in (q_index, k_index)]
            loss = indexer_loss(*leaves, q[..., 0], q, q[:, :1], indices, causal=True)
            torch.autograd.grad(loss.sum(), leaves)
        return held.most

    assert peak(128) < 2.5 * peak(64)


def test_autocast_takes_its_dtype_and_computes_in_fp32() -> None:
    narrow = [x[:, :, :9] for x in made("cpu", torch.bfloat16)]
    narrow[1], narrow[4] = (x.nan_to_num(0.5) for x in (narrow[1], narrow[4]))
    expected = indexer_loss(*narrow), select_tokens(*narrow[:3], 3)
    with torch.autocast("cpu", torch.bfloat16):
        actual = (
            indexer_loss(*(x.float() for x in narrow)),
            select_tokens(*(x.float() for x in narrow[:3]), 3),
        )
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
