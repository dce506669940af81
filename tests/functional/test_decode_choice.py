"""Decoding and packed queries over pages: the choice of a backend, and decoding under tracers."""

import pytest
import torch

from fastattn import KVCache, decode_attention, explain_decode, explain_paged


def filled(device: str) -> KVCache:
    cache = KVCache(2, 2, 8, 16, device=device)
    k = torch.zeros(2, 2, 5, 16, device=device)
    cache.append(k, k, backend="torch")
    return cache


Q = torch.zeros(2, 4, 1, 16)


def test_the_choice_is_explained(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = Q.to(device), filled(device)
    assert explain_decode(q, cache, backend="torch").reasons == {
        "triton": 'backend "torch" was requested'
    }
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    assert explain_decode(q, cache).backend == "torch"
    monkeypatch.delenv("FASTATTN_BACKEND")
    wide = KVCache(1, 1, 4, 16, dtype=torch.float64, device=device)
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float64, device=device)
    assert "float64" in explain_decode(q, wide).reasons["triton"]
    with pytest.raises(ValueError, match=r'backend "triton" cannot serve this call: q is float64'):
        decode_attention(q, wide, backend="triton")


def test_the_choice_for_packed_queries_is_explained(device: str) -> None:
    offsets = torch.tensor([0, 2, 3], device=device)
    call = {"q": torch.zeros(3, 4, 16, device=device), "cu_seqlens_q": offsets}
    pages = torch.zeros(6, 2, 4, 16, device=device)
    table, lengths = torch.tensor([[0, 1], [3, 4]], device=device), offsets[1:] + 3
    call["cache"] = (pages, pages, table, lengths)
    forced = explain_paged(**call, backend="triton")
    assert (forced.backend, forced.forced) == ("triton", True)
    reasons = explain_paged(**call, backend="torch").reasons
    assert reasons == {"triton": 'backend "torch" was requested'}
    with pytest.raises(ValueError, match="cannot serve this call"):
        explain_paged(**call, backend="hopper")
