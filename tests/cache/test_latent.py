"""Latents: keys whose first columns are the values, in one buffer, decoded against a formula."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import LatentCache, PagedLatentCache, attention_paged, decode_attention
from fastattn.cache.views import view_of_tensors
from fastattn.cache_view import as_bytes
from fastattn.functional.decode import explain_decode
from fastattn.kernels.decode import launch as launchers
from fastattn.kernels.launch import tiles
from fastattn.quantization import quantize_rows
from fastattn.testing import assert_within_budget
from fastattn.testing.inputs import draw

SCALE = 0.17  # of the heads before absorption, not of these widths


def expected(q: Tensor, kv: list[Tensor], width: int) -> list[Tensor]:
    """o and lse of each row's new tokens, [H, T, width] and [H, T]: unabsorbed sums over keys."""
    outputs, lses = [], []
    for rows, keys in zip(q, kv, strict=True):
        n, T = len(keys), rows.shape[1]
        s = SCALE * (rows[:, :, None] * keys).sum(-1)
        seen = torch.arange(n) <= torch.arange(T)[:, None] + n - T
        weights = torch.where(seen, s, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        o = (weights @ keys[:, :width]) / total.clamp(min=torch.finfo(total.dtype).tiny)
        outputs.append(o)
        lses.append(total[..., 0].log())
    return [torch.stack(outputs), torch.stack(lses)]


def filled(
    lengths: list[int], C: int, R: int, dtype: torch.dtype, page: int, device: str,
    quantize: Any = None, backend: str | None = None,
) -> Any:  # fmt: skip
    """A cache of rows of these lengths, NaN elsewhere, and the keys of each row as they read."""
    most = max(lengths)
    keys = draw(len(lengths), 1, most, C + R).to(device, dtype)
    how: dict[str, Any] = {"quantize": quantize, "device": device, "dtype": dtype}
    if page == 0:
        cache: Any = LatentCache(len(lengths), most + 3, C, R, **how)
    else:
        cache = PagedLatentCache(99, page, C, R, max_rows=5, **how)
    for x in map(as_bytes, cache.stored_tensors):
        x.fill_(torch.nan if x.is_floating_point() else 127)  # of e4m3 the code of NaN
    if page == 0:
        cache.append(keys, torch.tensor(lengths, device=device), backend=backend)
    else:
        rows = [cache.allocate() for _ in lengths]
        cache.append(rows, keys, lengths, backend=backend)
    return cache, [read_back(x[0, :n], C, quantize) for x, n in zip(keys, lengths, strict=True)]


def read_back(keys: Tensor, C: int, quantize: Any) -> Tensor:
    """Numbers that are read of stored keys [n, C + R]."""
    if quantize is None:
        return keys
    if quantize != "fp8_ds_mla":
        codes, scale = quantize_rows(keys, quantize)
        return codes.float() * scale[:, None]
    groups, scale = packed(keys, C)[:2]
    return torch.cat(((groups.float() * scale[..., None]).flatten(1), keys[:, C:].float()), 1)


def packed(keys: Tensor, C: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rotary columns of records of keys [n, C + R] in bf16."""
    groups = keys[:, :C].float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1) / 448
    return (groups / scale[..., None]).to(torch.float8_e4m3fn), scale, keys[:, C:]


# Heads, new tokens, latent and rotary columns, page size (0: contiguous), dtype, 8-bit format.
CASES = [
    (3, 2, 24, 8, 1, torch.float32, None),
    (9, 2, 32, 16, 4, torch.float32, None),
    (16, 1, 512, 64, 0, torch.bfloat16, None),
    (2, 1, 256, 32, 64, torch.float16, None),
    (3, 1, 18, 7, 0, torch.float32, "fp8"),
    (17, 1, 16, 0, 16, torch.float32, "int8"),
    (16, 1, 512, 64, 0, torch.bfloat16, "fp8"),
    (3, 2, 128, 10, 1, torch.bfloat16, "fp8_ds_mla"),
    (16, 1, 512, 64, 64, torch.bfloat16, "fp8_ds_mla"),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_is_the_sum_over_keys(case: Any, backend: str, device: str) -> None:
    H, T, C, R, page, dtype, quantize = case
    lengths = [21, 1, 2, 37] if C < 100 else [20, 3]
    cache, keys = filled(lengths, C, R, dtype, page, device, quantize, backend)
    q = draw(len(lengths), H, T, C + R, seed=1).to(device, dtype)
    tile = tiles.TileConfig(16, 16)
    with tiles.forced(decode=tile, decode_chunk=tile):
        actual = decode_attention(q, cache, scale=SCALE, return_lse=True, backend=backend)
        several = decode_attention(q, cache, scale=SCALE, num_splits=3, backend=backend)
    ref = expected(q.double().cpu(), [x.double().cpu() for x in keys], C)
    wide = torch.float32 if dtype == torch.float32 else dtype
    naive = expected(q.to(wide).cpu(), [x.to(wide).cpu() for x in keys], C)
    for name, x, exact, rough in zip(("o", "lse"), actual, ref, naive, strict=True):
        assert_within_budget(name, x.cpu(), exact, rough)
    assert_within_budget("split", several.cpu(), ref[0], naive[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("page", [0, 4])
def test_a_record_is_656_bytes(page: int, backend: str, device: str) -> None:
    """512 codes, four fp32 scales, 64 rotary columns in bf16, as FlashMLA and vLLM have them."""
    cache, _ = filled([5], 512, 64, torch.bfloat16, page, device, "fp8_ds_mla", backend)
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    records = memory.set_(cache.k.untyped_storage()).view(-1, 656)  # type: ignore[call-overload]
    assert cache.nbytes - cache.lengths.nbytes == records.nbytes + (page and 4 * 5 * 99)
    pages = cache.pages(0) if page else [0]
    slots = [pages[t // page] * page + t % page if page else t for t in range(5)]
    keys = draw(1, 1, 5, 576).bfloat16()[0, 0]
    codes, scale, rope = packed(keys, 512)
    parts = (codes.flatten(1), scale, rope)
    wanted = torch.cat([x.contiguous().view(torch.uint8) for x in parts], 1)
    assert torch.equal(records[slots].cpu(), wanted)


def in_both(q: Tensor, keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """o of `expected` in fp64 and fp32, for values of 32 columns."""
    dtypes = (torch.float64, torch.float32)
    exact, naive = (expected(q.cpu().to(x), [k.cpu().to(x) for k in keys], 32)[0] for x in dtypes)
    return exact, naive


def test_new_tokens_of_any_number_over_pages(device: str) -> None:
    cache, keys = filled([9, 20, 5], 32, 8, torch.float32, 4, device)
    q = draw(3, 2, 4, 40, seed=1).to(device)
    counts = [1, 4, 2]
    packed = torch.cat([x[:, 4 - n :].transpose(0, 1) for x, n in zip(q, counts, strict=True)])
    starts = torch.tensor([0, 1, 5, 7], dtype=torch.int32, device=device)
    actual = attention_paged(packed, cache, starts, scale=SCALE, backend="triton")
    exact, naive = (
        torch.cat([x[:, 4 - n :].transpose(0, 1) for x, n in zip(o, counts, strict=True)])
        for o in in_both(q, keys)
    )
    assert_within_budget("o", actual.cpu(), exact, naive)


def test_keys_are_loaded_once_where_they_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the values is read apart, with the same result; other columns are no values."""
    flags: list[bool] = []
    load = launchers.groups_of
    monkeypatch.setattr(launchers, "groups_of", lambda x: flags.append(x.shared) or load(x))
    kv, lengths = draw(2, 1, 20, 40), torch.tensor([20, 7])
    q = draw(2, 4, 1, 40, seed=1)
    results = []
    for v in (kv[..., :32], kv[..., :32].clone(), kv[..., 8:], kv[..., :32]):
        view = view_of_tensors(kv, v, lengths)
        results.append(decode_attention(q, view, scale=SCALE, backend="triton"))
    assert flags == [True, False, False]  # the last launch is that of the first
    torch.testing.assert_close(results[0], results[1])
    assert torch.equal(results[0], results[3]) and not torch.allclose(results[0], results[2])


def test_one_buffer_holds_both(device: str) -> None:
    """Half of the memory, also after `pickle`, and rows that move."""
    cache = pickle.loads(pickle.dumps(LatentCache(2, 8, 32, 8, device=device)))
    assert cache.v.data_ptr() == cache.k.data_ptr() and cache.k.nbytes == 2 * 8 * 40 * 4
    assert cache.nbytes == cache.k.nbytes + 8
    kv = draw(2, 1, 3, 40).to(device)
    cache.append(kv)
    cache.reorder(torch.tensor([1, 0], device=device))
    assert torch.equal(cache.k[:, :, :3], kv.flip(0))
    assert torch.equal(cache.v[:, :, :3], kv.flip(0)[..., :32])


def test_latents_of_576_have_a_kernel() -> None:
    cache = LatentCache(1, 8, 512, 64, dtype=torch.bfloat16)
    cache.append(draw(1, 1, 2, 576).bfloat16())
    q = draw(1, 16, 1, 576).bfloat16()
    assert explain_decode(q, cache, scale=SCALE, backend="triton").backend == "triton"
