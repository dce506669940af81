"""The append kernel: positions, padding, and as an operator; generated calls compare its bits."""

import torch
from torch import Tensor

from fastattn import KVCache
from fastattn.cache.append import append
from fastattn.rotary import apply_rotary, rotary_tables

B, H_Q, H_K, MAX = 3, 4, 2, 20


def tokens_of(
    T: int, D: int, D_v: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v of T tokens a row, in the strides of a projection [B, T, heads, width]."""

    def draw(H: int, width: int) -> Tensor:
        return torch.randn(B, T, H, width, device=device).to(dtype).transpose(1, 2)

    return draw(H_Q, D), draw(H_K, D), draw(H_K, D_v)


def contiguous(D, D_v, **options):
    return KVCache(B, H_K, MAX, D, value_dim=D_v, **options)


def assert_same_bits(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), f"{int((x != y).sum())} of {x.numel()} differ"


def test_positions_are_those_of_each_row(device):
    """Against the rotation of the whole sequence at once."""
    cache = contiguous(8, 8, device=device)
    cos, sin = rotary_tables(MAX, 8, device=device)
    q, k, v = tokens_of(14, 8, 8, device)
    taken = [0, 0, 0]
    whole_q, whole_k = (apply_rotary(x, cos[:14], sin[:14]) for x in (q, k))
    for new in ([7, 2, 5], [1, 4, 4]):
        part = [
            torch.stack([x[b, :, start : start + 7] for b, start in enumerate(taken)])
            for x in (q, k, v)
        ]
        counts = torch.tensor(new, device=device)
        turned = cache.append(*part[1:], counts, q=part[0], rotary=(cos, sin), backend="torch")
        for b, (start, n) in enumerate(zip(taken, new, strict=True)):
            assert torch.equal(turned[b, :, :n], whole_q[b, :, start : start + n])
        taken = [start + n for start, n in zip(taken, new, strict=True)]
    for b, n in enumerate(taken):
        assert torch.equal(cache.k[b, :, :n], whole_k[b, :, :n])
        assert torch.equal(cache.v[b, :, :n], v[b, :, :n])


def test_kernel_writes_real_tokens_and_nothing_else(device):
    """NaN in padding is not read, and slots that get no token keep the NaN that they had."""
    cache = contiguous(16, 16, device=device)
    q, k, v = tokens_of(4, 16, 16, device)
    count = [4, 1, 0]
    for b, n in enumerate(count):
        q[b, :, n:] = k[b, :, n:] = v[b, :, n:] = torch.nan
    rotary = rotary_tables(MAX, 16, device=device)
    counts = torch.tensor(count, device=device)
    turned = cache.append(k, v, counts, q=q, rotary=rotary, backend="triton")
    for b, n in enumerate(count):
        for stored in (cache.k, cache.v):
            assert stored[b, :, :n].isfinite().all()
            assert stored[b, :, n:].isnan().all()
        assert turned[b, :, :n].isfinite().all()
    assert cache.view().counters.tolist() == [0] * B


def test_compiles_as_one_graph_and_mutates_the_cache(device):
    def step(cache_view, q, k, v, rotary):
        turned = append(cache_view, k * 2, v, q=q, rotary=rotary, backend="triton")
        return turned + cache_view.lengths.sum()

    rotary = rotary_tables(MAX, 16, device=device)
    q, k, v = tokens_of(2, 16, 16, device)
    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = contiguous(16, 16, device=device)
        outputs = [function(cache.view(), q, k, v, rotary) for _ in range(2)]
        assert cache.lengths.tolist() == [4] * B
        outcomes.append([*outputs, cache.k[:, :, :4], cache.v[:, :, :4]])
    assert_same_bits(outcomes[1], outcomes[0])


def test_empty_steps_change_nothing(device):
    cache = contiguous(16, 16, device=device)
    q, k, v = tokens_of(0, 16, 16, device)
    rotary = rotary_tables(MAX, 16, device=device)
    turned = cache.append(k, v, q=q, rotary=rotary, backend="triton")
    assert turned.shape == q.shape
    assert cache.lengths.tolist() == [0] * B
