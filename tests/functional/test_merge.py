"""Merging attention over parts of the keys, and prefixes that a batch shares."""

import math

import pytest
import torch

from fastattn import KVCache, PagedKVCache, cascade_attention, decode_attention, merge, reference
from fastattn.ops.merge import merge_forward
from fastattn.testing import assert_within_budget, worst_naive
from fastattn.testing.inputs import draws

BACKENDS = ("triton", "torch")


def parts_and_whole(
    dtype: torch.dtype, device: str, cut: int = 3
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]]:
    """(o1, lse1, o2, lse2) over keys before and from `cut` on, and (o, lse) over all, in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, T, 12, generator=generator, dtype=torch.float64).to(device)
        for T in (3, 8, 8)
    )
    first = reference.attention(q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
    second = reference.attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
    wide = torch.promote_types(dtype, torch.float32)
    parts = (first[0].to(dtype), first[1].to(wide), second[0].to(dtype), second[1].to(wide))
    return parts, reference.attention(q, k, v, return_lse=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_that_saw_nothing(backend: str, device: str) -> None:
    """Their output is not read: here it is NaN."""
    (o1, lse1, o2, lse2), _ = parts_and_whole(torch.float32, device)
    lse1[0, 0, 0] = lse2[0, 0, 1] = lse1[0, 0, 2] = lse2[0, 0, 2] = -math.inf
    o1[0, 0, 0] = o2[0, 0, 1] = o1[0, 0, 2] = o2[0, 0, 2] = math.nan
    o, lse = merge(o1, lse1, o2, lse2, backend=backend)
    torch.testing.assert_close(o[0, 0, 0], o2[0, 0, 0])
    torch.testing.assert_close(o[0, 0, 1], o1[0, 0, 1])
    torch.testing.assert_close(lse[0, 0, :2], torch.stack((lse2[0, 0, 0], lse1[0, 0, 1])))
    assert torch.equal(o[0, 0, 2], torch.zeros(12, device=device))
    assert lse[0, 0, 2] == -math.inf


def test_gradients(device: str) -> None:
    parts, _ = parts_and_whole(torch.float64, device)
    parts = tuple(x[:1, :1].detach().clone().requires_grad_() for x in parts)
    assert torch.autograd.gradcheck(merge, parts)
    assert torch.autograd.gradgradcheck(merge, parts)


def test_gradients_of_parts_that_saw_nothing_are_zero(device: str) -> None:
    (o1, lse1, o2, lse2), _ = parts_and_whole(torch.float32, device)
    lse1[0, 0, 0] = lse1[0, 0, 1] = lse2[0, 0, 1] = -math.inf
    o1[0, 0, 0] = math.nan
    leaves = [x.requires_grad_() for x in (o1, lse1, o2, lse2)]
    o, lse = merge(*leaves)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    grads = torch.autograd.grad((o.sum(), lse.sum()), leaves)
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[0, 0, 1].any()
    assert not grads[0][0, 0, 0].any()
    assert not grads[1][0, 0, 0].any()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"o1": 1.0}, TypeError, "o1 must be a float tensor"),
        ({"o2": torch.zeros(2, 3, dtype=torch.float16)}, TypeError, "o2 must have the dtype of o1"),
        ({"o2": torch.zeros(2, 4)}, ValueError, r"o2 must have shape \[2, 3\]"),
        ({"lse2": torch.zeros(3)}, ValueError, r"lse2 must have shape \[2\]"),
        ({"lse1": torch.zeros(2).half()}, TypeError, "lse1 must be float32 or float64"),
        ({"lse2": torch.zeros(2).double()}, TypeError, "lse2 must be .* as lse1 is"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_arguments_are_checked(change: dict, error: type[Exception], match: str) -> None:
    good = {
        "o1": torch.zeros(2, 3),
        "lse1": torch.zeros(2),
        "o2": torch.zeros(2, 3),
        "lse2": torch.zeros(2),
    }
    merge(**good)
    with pytest.raises(error, match=match):
        merge(**{**good, **change})


def test_a_forced_kernel_says_why_it_cannot(device: str) -> None:
    parts, _ = parts_and_whole(torch.float64, device)
    with pytest.raises(ValueError, match=r"cannot merge: .* float64"):
        merge(*parts, backend="triton")


def test_the_op_has_a_fake_and_a_schema(device: str) -> None:
    parts, _ = parts_and_whole(torch.float32, device)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(merge_forward.op, parts, test_utils=tests)


def prompt_and_rows(
    device: str, lengths: tuple[int, ...] = (5, 2, 3)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of a prefix of 10 tokens, and of those that follow it in each row."""
    draw, B = draws(2, device), len(lengths)
    prefix, rows = (1, 1, 10, 16), (B, 1, 5, 16)
    return draw(*prefix), draw(*prefix), draw(*rows), draw(*rows)


def whole_attention(
    q: torch.Tensor, tokens: tuple[torch.Tensor, ...], lengths: torch.Tensor, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact, naive) o over prefix and row behind one another."""
    prefix_k, prefix_v, k, v = tokens
    B = q.shape[0]
    k = torch.cat((prefix_k.expand(B, -1, -1, -1), k), 2)
    v = torch.cat((prefix_v.expand(B, -1, -1, -1), v), 2)
    lengths = lengths + 10

    def run(dtype: torch.dtype) -> torch.Tensor:
        return reference.attention(
            *(x.to(dtype) for x in (q, k, v)),
            causal=True,
            key_lengths=lengths,
            query_offset=lengths - q.shape[2],
            **options,
        )

    exact = run(torch.float64)
    return exact, worst_naive(exact, lambda: run(q.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.4}, {"sinks": True}])
def test_a_prefix_in_a_cache_of_its_own(options: dict, backend: str, device: str) -> None:
    tokens = prompt_and_rows(device)
    lengths = torch.tensor([5, 2, 3], dtype=torch.int32, device=device)
    prefix, own = KVCache(1, 1, 10, 16, device=device), KVCache(3, 1, 8, 16, device=device)
    prefix.append(*tokens[:2], backend="torch")
    own.append(*tokens[2:], lengths, backend="torch")
    q = torch.randn(3, 2, 2, 16, generator=torch.Generator().manual_seed(3)).to(device)
    if "sinks" in options:
        options = {"sinks": torch.tensor([0.5, -1.0], device=device)}
    o = cascade_attention(q, prefix, own, backend=backend, **options)
    assert_within_budget("o", o, *whole_attention(q, tokens, lengths, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_that_rows_were_forked_from(backend: str, device: str) -> None:
    tokens = prompt_and_rows(device)
    lengths = torch.tensor([5, 2, 3], dtype=torch.int32, device=device)
    cache = PagedKVCache(20, 4, 1, 16, device=device)
    prompt = cache.allocate()
    cache.append([prompt], *tokens[:2], backend="torch")
    rows = [cache.fork(prompt) for _ in range(3)]
    cache.append(rows, *tokens[2:], lengths.tolist(), backend="torch")
    q = torch.randn(3, 2, 1, 16, generator=torch.Generator().manual_seed(3)).to(device)
    o, lse = cascade_attention(
        q, cache.view([prompt]), cache.view(rows), forked=True, backend=backend, return_lse=True
    )
    assert_within_budget("o", o, *whole_attention(q, tokens, lengths))
    _, expected = decode_attention(q, cache.view(rows), backend="torch", return_lse=True)
    torch.testing.assert_close(lse, expected)
    # Without `forked` the prefix would count twice.
    twice = cascade_attention(q, cache.view([prompt]), cache.view(rows), backend=backend)
    assert (twice - o).abs().max() > 0.01


def test_cascades_are_checked(device: str) -> None:
    cache = KVCache(2, 1, 8, 16, device=device)
    k = torch.zeros(2, 1, 3, 16, device=device)
    cache.append(k, k, backend="torch")
    q = torch.zeros(2, 1, 1, 16, device=device)
    with pytest.raises(ValueError, match="prefix must have one row, got 2"):
        cascade_attention(q, cache, cache)
    alone = KVCache(1, 1, 8, 16, device=device)
    for prefix, own, name in (([], cache, "prefix"), (alone, q, "cache")):
        with pytest.raises(TypeError, match=f"{name} must be a KVCache, a PagedKVCache or a Cach"):
            cascade_attention(q, prefix, own)
    with pytest.raises(ValueError, match=r"q must have shape \[2, H_q, T_q, 16\] to match"):
        cascade_attention(q[0], alone, cache)
    with pytest.raises(TypeError, match="cascade_attention takes no window"):
        cascade_attention(q, cache, cache, window=3)
    ring = KVCache(1, 1, 8, 16, window=4, device=device)
    with pytest.raises(TypeError, match="forked must be a bool, got int"):
        cascade_attention(q, cache, cache, forked=2)
    for prefix, own, name in ((ring, alone, "prefix"), (alone, ring, "cache")):
        with pytest.raises(ValueError, match=f"{name} must hold every token, got a ring of win"):
            cascade_attention(q[:1], prefix, own)
    padded = KVCache(1, 1, 8, 16, device=device)
    padded.set_starts(torch.tensor([2], device=device))
    with pytest.raises(ValueError, match="forked: the cache's rows begin with padding"):
        cascade_attention(q[:1], alone, padded, forked=True)
