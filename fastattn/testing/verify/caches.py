"""Cases of decoding, appending to caches and merging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...cache.dense import KVCache
from ...cache.latent import LatentCache
from ...cache.paged import PagedKVCache
from ...functional.decode import decode_attention
from ...functional.merge import merge as merge_parts
from ...functional.paged import attention_paged
from ...quantization import quantize_rows
from ...rotary import rotary_tables
from ..calls import merged
from ..compare import assert_all_near
from ..decoding import KINDS, Filled, assert_decodes, assert_paged, fill
from ..inputs import draws, to_device
from ..option_examples import option_examples
from .case import Case, Setting, same_bits

# Caches that differ for a kernel.
_QUICK = ("contiguous", "pages-of-3", "pages-of-16", "int8", "fp8", "pages-int8", "ring-keep-first")
_INTERPRETED = ("contiguous", "pages-of-3", "int8", "ring-keep-first")
# Of `option_examples`.
_EXAMPLES = ("window", "softcap", "alibi", "relative-bias", "sinks")
_STEPS = ((5, (5, 2, 0)), (1, None), (6, (6, 3, 6)))
_SLOTS = 20
_QUANTIZED = (None, "int8", "fp8")


def decode() -> Iterator[Case]:
    """o and lse of new tokens, from every cache."""
    for kind in KINDS:
        case = partial(_decode, kind=kind)
        yield Case(kind, case, quick=kind in _QUICK, interpreted=kind in _INTERPRETED)
    for T_q in (2, 15):
        yield Case(f"{T_q} new tokens", partial(_decode, kind="pages-of-16", T_q=T_q))
    for splits in (1, 3, 40):
        yield Case(f"num_splits={splits}", partial(_decode, num_splits=splits))
    yield Case("batch_invariant", partial(_decode, batch_invariant=True))
    yield Case("long rows", partial(_decode, lengths=(5000, 1, 2049)))
    for name in _EXAMPLES:
        yield Case(name, partial(_decode, example=name), quick=False)
    for quantize in _QUANTIZED:
        case = partial(_latent, quantize=quantize)
        yield Case(f"latent, {quantize or 'plain'}", case, interpreted=quantize is None)
    yield Case("20 repeats", _repeats)
    yield Case("packed queries", _packed, interpreted=True)
    # Pages are filled one by one, which must not look like a hang.
    long_rows = partial(_packed, kind="pages-of-16", lengths=(5000, 100, 2049))
    yield Case("packed queries, long rows", long_rows)


def append() -> Iterator[Case]:
    """Stored bits, rotated or not, equal to torch's."""
    for name, make in (("rows", _rows), ("ring", _ring), ("pages", _pages)):
        for quantize in _QUANTIZED:
            case = partial(_append, make=make, quantize=quantize)
            interpreted = quantize is None and make is not _ring
            yield Case(f"{name}, {quantize or 'plain'}", case, interpreted=interpreted)


def merge() -> Iterator[Case]:
    """Two parts of the keys, one masked for some queries."""
    yield Case("two parts", _merge, interpreted=True)


def _tokens(
    setting: Setting, lengths: tuple[int, ...], T_q: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q of the newest T_q tokens, k and v of all, and the rows' lengths."""
    sizes = {"B": len(lengths), "T_q": T_q, "T_k": max(lengths), "requires_grad": False}
    counts = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
    return *setting.qkv(**sizes), counts


def _decode(
    setting: Setting,
    *,
    kind: str = "contiguous",
    lengths: tuple[int, ...] = (33, 47, 4),
    T_q: int = 1,
    example: str = "",
    **how: Any,
) -> float:
    q, k, v, counts = _tokens(setting, lengths, min(T_q, *lengths))
    how["backend"] = setting.subject.backend
    filled = fill(kind, k, v, counts)
    T = max(lengths)
    examples = option_examples(4, 2, T, T, q.shape[3], reach=6) if example else {}
    options = to_device(examples.get(example, {}), setting.device)
    return assert_decodes(q, filled, how=how, **options)


def _latent(setting: Setting, *, quantize: Any) -> float:
    """Keys whose first columns are the values."""
    C, R, lengths = setting.subject.head_dim, 64, (33, 47, 4)
    sizes = {"B": len(lengths), "H_k": 1, "T_q": 1, "T_k": max(lengths), "D": C + R}
    q, keys, _ = setting.qkv(**sizes, requires_grad=False)
    counts = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
    cache = LatentCache(len(lengths), max(lengths) + 3, C, R, quantize=quantize, **_like(setting))
    cache.append(keys, counts, backend="torch")
    if quantize is not None:
        codes, scale = quantize_rows(keys, quantize)
        keys = codes.float() * scale[..., None]
    filled = Filled(cache.view(), keys, keys[..., :C], counts, {})
    how = {"backend": setting.subject.backend}
    return assert_decodes(q, filled, how=how, scale=C**-0.5)


def _packed(
    setting: Setting, *, kind: str = "pages-of-3", lengths: tuple[int, ...] = (47, 33, 4)
) -> float:
    """A prompt chunk, a decoding row and a row without new tokens, over pages."""
    q, k, v, counts = _tokens(setting, lengths, 23)
    filled = fill(kind, k, v, counts)
    tokens = q.transpose(1, 2)
    packed = torch.cat((tokens[0], tokens[1, :1]))
    offsets = torch.tensor([0, 23, 24, 24], dtype=torch.int32, device=setting.device)
    actual = attention_paged(
        packed, filled.view, offsets, return_lse=True, backend=setting.subject.backend
    )
    return assert_paged(actual, packed, filled, offsets)


def _repeats(setting: Setting) -> float:
    q, k, v, counts = _tokens(setting, (1000, 47, 4), 1)
    view = fill("contiguous", k, v, counts).view
    return same_bits(lambda: (decode_attention(q, view, backend=setting.subject.backend),))


def _rows(setting: Setting, **how: Any) -> KVCache:
    return KVCache(3, 2, _SLOTS, setting.subject.head_dim, **how)


def _ring(setting: Setting, **how: Any) -> KVCache:
    D = setting.subject.head_dim
    return KVCache(3, 2, 9, D, **KINDS["ring-keep-first"], **how)


def _pages(setting: Setting, **how: Any) -> PagedKVCache:
    cache = PagedKVCache(24, 3, 2, setting.subject.head_dim, **how)
    # Pages of a row are not in order.
    rows = [cache.allocate() for _ in range(4)]
    cache.append(rows, *torch.zeros(2, 4, 2, 4, setting.subject.head_dim, **_like(setting)))
    cache.free(rows[1])
    cache.free(rows[3])
    cache.allocate()
    return cache


def _like(setting: Setting) -> dict[str, Any]:
    return {"dtype": setting.dtype, "device": setting.device}


def _append(
    setting: Setting, *, make: Callable[..., KVCache | PagedKVCache], quantize: str | None
) -> float:
    actual, expected = (
        _appended(setting, make(setting, quantize=quantize, **_like(setting)), backend)
        for backend in (setting.subject.backend, "torch")
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} numbers differ"
    return 0.0


def _appended(setting: Setting, cache: KVCache | PagedKVCache, backend: str) -> list[Tensor]:
    """Append some steps, and return all results: rotated queries, keys, values, positions."""
    D, seen = setting.subject.head_dim, []
    numbers = draws(1, setting.device, setting.dtype)
    rotary = rotary_tables(_SLOTS, D // 2, device=setting.device)
    for T, counts in _STEPS:
        q, k, v = (numbers(3, T, heads, D).transpose(1, 2) for heads in (4, 2, 2))
        how: dict[str, Any] = {"q": q, "rotary": rotary, "backend": backend}
        if isinstance(cache, PagedKVCache):
            turned = cache.append(cache.rows, k, v, counts, **how)
        else:
            new = None if counts is None else torch.tensor(counts, device=setting.device)
            turned = cache.append(k, v, new, **how)
        assert turned is not None
        seen += [turned[b, :, :n] for b, n in enumerate(counts or [T] * 3)]
    view = cache.view(cache.rows) if isinstance(cache, PagedKVCache) else cache.view()
    return [*seen, *view.gather(), cache.lengths]


def _merge(setting: Setting) -> float:
    q, k, v = (x.detach().double() for x in setting.qkv(T_q=5 if setting.small else 300))
    cut = k.shape[2] // 3
    # Batch row 1 sees no key of the first part.
    lengths = torch.tensor([cut, 0], device=setting.device)
    first = reference.attention(
        q, k[:, :, :cut], v[:, :, :cut], key_lengths=lengths, return_lse=True
    )
    second = reference.attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
    outputs = [o.to(setting.dtype) for o, _ in (first, second)]
    lses = [lse.float() for _, lse in (first, second)]
    parts = outputs[0], lses[0], outputs[1], lses[1]
    actual = merge_parts(*parts, backend=setting.subject.backend)
    exact = merged(*(x.double() for x in parts))
    return assert_all_near(("o", "lse"), actual, exact, lambda: merged(*parts))
