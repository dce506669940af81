"""Statistics of attention weights, by kernels and by torch, against the oracle's own weights."""

import math
from collections.abc import Iterator

import pytest
import torch
from fuzz.judges import check_by_kernels
from held import Held
from nightly import gate_cases
from torch import Tensor

import fastattn
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw
from fastattn.torch_backend import statistics

B, H_q, H_k, T_q, T_k, D = 2, 2, 1, 21, 25, 12


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Several blocks in every direction, full ones and others, at small lengths."""
    tile = TileConfig(16, 16)
    with tiles.forced(forward=tile, backward_dq=tile, backward_dkv=tile, relative=tile):
        yield


def make(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    q, k, _ = make_qkv(B, H_q, H_k, T_q, T_k, D, dtype=dtype, device=device, requires_grad=False)
    return q, k


@pytest.mark.parametrize("seed", gate_cases([0, 2, 5, 59, 74], [1, 3, 4, *range(6, 12)]))
def test_generated_calls(seed: int, one_thread: None, device: str) -> None:
    """In the gate, one has positions and sinks, one a query of relative keys, one wide heads."""
    check_by_kernels("attention_statistics", seed, device)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_of_equal_scores_the_first_keys_are_listed(backend: str, device: str) -> None:
    """Blocks at the left edge of a window are visited after those inside it."""
    T, left = 60, 40
    q, k, _ = make_qkv(1, 1, 1, T, T, 16, device=device, requires_grad=False)
    k = k[:, :, :1].expand(1, 1, T, 16)
    actual = fastattn.attention_statistics(q, k, window=(left, 0), top=3, backend=backend)
    first = (torch.arange(T) - left).clamp(min=0)[:, None] + torch.arange(3)
    expected = torch.where(first <= torch.arange(T)[:, None], first, -1)
    assert torch.equal(actual.top_positions[0, 0].cpu(), expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_in_padding_reaches_nothing(backend: str, device: str) -> None:
    q, k = make(device=device)
    padding = torch.ones(B, T_k, dtype=torch.bool, device=device)
    padding[0, 18:] = False
    padding[1, 2:20:3] = False
    dirty = torch.where(padding[:, None, :, None], k, math.nan)
    clean = fastattn.attention_statistics(q, k, key_padding_mask=padding, top=2, backend=backend)
    actual = fastattn.attention_statistics(
        q, dirty, key_padding_mask=padding, top=2, backend=backend
    )
    assert all(torch.equal(x, y) for x, y in zip(actual, clean, strict=True))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_parts_under_a_common_lse_add_up(backend: str, device: str) -> None:
    """Keys divided in two, as among devices: the lse of all makes each side a part of the whole."""
    q, k = make(device=device)
    whole = fastattn.attention_statistics(q, k, backend=backend)
    _, lse = fastattn.attention(q, k, k, return_lse=True, backend=backend)
    parts = [
        fastattn.attention_statistics(q, half, lse=lse, backend=backend)
        for half in k.split((18, T_k - 18), dim=2)
    ]
    torch.testing.assert_close(parts[0].entropy + parts[1].entropy, whole.entropy)
    received = torch.cat([part.received for part in parts], -1)
    torch.testing.assert_close(received, whole.received)
    part = fastattn.attention_weights(q, k[:, :, :18], lse=lse, backend=backend)
    torch.testing.assert_close(part, fastattn.attention_weights(q, k, backend=backend)[..., :18])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_has_no_gradient(backend: str, device: str) -> None:
    """Results of an lse without a gradient have none."""
    q, k, v = make_qkv(1, 1, 1, 5, 5, 16, device=device)
    lse = fastattn.attention(q, k, v, return_lse=True, backend=backend)[1]
    actual = fastattn.attention_statistics(q, k, lse=lse.detach(), backend=backend)
    assert not any(x.requires_grad for x in actual)
    weights = fastattn.attention_weights(q, k, lse=lse.detach(), backend=backend)
    assert not weights.requires_grad
    actual = fastattn.attention_statistics(q, k, lse=lse, backend=backend)
    ours = torch.autograd.grad(actual.entropy.sin().sum(), q)[0]

    def entropy(q: Tensor, k: Tensor) -> Tensor:
        return fastattn.attention_statistics(q, k, backend=backend).entropy.sin().sum()

    torch.testing.assert_close(ours, torch.autograd.grad(entropy(q, k), q)[0])
    torch.testing.assert_close(ours, torch.func.grad(entropy)(q, k))
    compiled = torch.compile(entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(compiled(q, k), q)[0])


def test_torch_holds_the_scores_of_some_queries_at_a_time(monkeypatch) -> None:
    q, k = make()
    options = {
        "causal": True,
        "key_padding_mask": draw(B, T_k) > 0,
        "attn_mask": draw(B, 1, T_q, 1) > -1,
        "attn_bias": draw(T_q, T_k),
        "documents": (draw(B, T_q).long(), draw(B, T_k).long()),
        "relative_keys": draw(1, 9, D),
        "relative_query": draw(B, H_q, T_q, D),
        "query_offset": torch.tensor([3, 0]),
    }
    whole = fastattn.attention_statistics(q, k, top=3, backend="torch", **options)
    rows = 3
    monkeypatch.setattr(statistics, "_SCORES", rows * B * H_q * T_k)
    with Held() as held:
        parts = fastattn.attention_statistics(q, k, top=3, backend="torch", **options)
    for x, y in zip(parts, whole, strict=True):
        torch.testing.assert_close(x, y)
    assert rows * B * H_q * T_k <= held.largest < B * H_q * T_q * T_k / 2


def test_kernels_allocate_nothing_of_all_scores(monkeypatch, device: str) -> None:
    q, k, _ = make_qkv(1, 1, 1, 100, 100, 16, device=device, requires_grad=False)
    made = []
    for name in ("new_empty", "new_zeros"):
        allocate = getattr(torch.Tensor, name)

        def noting(*args, allocate=allocate, **kwargs):
            made.append(allocate(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(torch.Tensor, name, noting)
    fastattn.attention_statistics(q, k, causal=True, top=2, backend="triton")
    assert len(made) >= 4
    assert max(x.numel() for x in made) <= q.numel()


def test_operators_tell_tracers_what_they_return(device: str) -> None:
    q, k = make(device=device)
    options = {"causal": True, "backend": "triton"}
    for top in (0, 3):
        wanted = fastattn.attention_statistics(q, k, top=top, **options)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = mode.from_tensor(q), mode.from_tensor(k)
            actual = fastattn.attention_statistics(*fakes, top=top, **options)
        assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in wanted]
    with torch._subclasses.FakeTensorMode() as mode:
        actual = fastattn.attention_weights(mode.from_tensor(q), mode.from_tensor(k), **options)
    assert (actual.shape, actual.dtype) == ((B, H_q, T_q, T_k), torch.float32)


def test_the_largest_score_of_packed_sequences_is_traced(device: str) -> None:
    q, k, _ = make_qkv(1, 2, 1, T_q, T_q, 16, device=device, requires_grad=False)
    q, k = (x[0].transpose(0, 1) for x in (q, k))
    offsets = torch.tensor([0, 5, 9, T_q], device=device)

    def call(q: Tensor) -> tuple[Tensor, ...]:
        return fastattn.attention_varlen(q, k, k, offsets, return_max=True, backend="triton")

    compiled = torch.compile(call, backend="aot_eager")
    torch.testing.assert_close(compiled(q), call(q), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_cache_stands_for_its_keys(backend: str, device: str) -> None:
    """The newest queries over rows of one length or several, in place or in pages, and of codes."""
    q, k = make(device=device)
    q, bias = q[:, :, -5:], draw(H_q, 5, T_k + 9).to(device)
    for lengths in ([T_k, T_k], [T_k, 9]):
        cache = fastattn.KVCache(B, H_k, T_k + 9, D, device=device)
        pool = fastattn.PagedKVCache(40, 4, H_k, D, device=device)
        if lengths[1] == T_k:
            cache.append(k, k)
        else:
            cache.append(k, k, torch.tensor(lengths, device=device))
        pool.append([pool.allocate() for _ in range(B)], k, k, lengths)
        for given in (cache, pool):
            how = {"top": 3, "softcap": 2.0, "backend": backend}
            actual = fastattn.attention_statistics(q, given, attn_bias=bias, **how)
            for b, n in enumerate(lengths):
                row = (q[b : b + 1], k[b : b + 1, :, :n])
                how |= {"causal": True, "attn_bias": bias[..., :n]}
                expected = fastattn.attention_statistics(*row, **how)
                for name, x, y in zip(actual._fields, actual, expected, strict=True):
                    x = x[b, :, :n] if name == "received" else x[b]
                    torch.testing.assert_close(x, y[0])
            assert (actual.received[1, :, lengths[1] :] == 0).all()
    codes = fastattn.QuantizedKVCache(B, H_k, T_k, D, quantize="int8", device=device)
    codes.append(k, k)
    of_codes = fastattn.attention_statistics(q, codes, backend=backend).received
    read = codes.view().gather()[0]
    expected = fastattn.attention_statistics(q, read, causal=True, backend=backend).received
    torch.testing.assert_close(of_codes, expected)
    ring = fastattn.KVCache(B, H_k, 9, D, window=4, device=device)
    with pytest.raises(ValueError, match=r"k must hold every token, got a ring of window=4"):
        fastattn.attention_statistics(q, ring)
