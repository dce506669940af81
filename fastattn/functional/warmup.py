"""Compile kernels before they are needed."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch
from ..cache.dense import KVCache
from ..cache.paged import PagedKVCache
from ..cache_view import CacheView
from ..rotary import rotary_tables
from ..tuned import choices
from . import call_options
from .decode import decode_attention
from .fused_attention import attention, attention_varlen
from .merge import shared_pages
from .paged import attention_paged

# Lengths, heads and batch size do not matter, as kernels do not specialise on them. But few queries
# with many keys have separate kernels.
_B, _H, _T = 2, 2, 16
# Rows with this many keys are split on any device.
_MANY_PAGES = 4096


def _per_row(device: torch.device) -> Tensor:
    return torch.full((_B,), _T, dtype=torch.int32, device=device)


# Arguments of `attention` by flag; their values do not matter.
_FLAGS: dict[str, Any] = {
    "full": lambda device, T_q, T_k: {},
    "causal": lambda device, T_q, T_k: {"causal": True},
    "window": lambda device, T_q, T_k: {"window": 8},
    "key_lengths": lambda device, T_q, T_k: {"key_lengths": _per_row(device)},
    "query_offset": lambda device, T_q, T_k: {"query_offset": 0 * _per_row(device)},
    "key_padding_mask": lambda device, T_q, T_k: {
        "key_padding_mask": torch.ones(_B, T_k, dtype=torch.bool, device=device)
    },
    "documents": lambda device, T_q, T_k: {
        "documents": tuple(torch.zeros(_B, T, dtype=torch.int32, device=device) for T in (T_q, T_k))
    },
    "batch_invariant": lambda device, T_q, T_k: {"batch_invariant": True},
    "softcap": lambda device, T_q, T_k: {"softcap": 30.0},
    "alibi_slopes": lambda device, T_q, T_k: {"alibi_slopes": torch.ones(_H, device=device)},
    "sinks": lambda device, T_q, T_k: {"sinks": torch.zeros(_H, device=device)},
    "dropout": lambda device, T_q, T_k: {
        "dropout": 0.1,
        "dropout_seed": torch.zeros(2, dtype=torch.int64, device=device),
    },
    "deterministic=False": lambda device, T_q, T_k: {"deterministic": False},
    "return_lse": lambda device, T_q, T_k: {"return_lse": True},
    "varlen": lambda device, T_q, T_k: {},
}
# Flags of generation caches, which combine with flags that change scores.
_CACHES = ("decode", "paged", "packed", "shared", "int8", "fp8", "rotary")
_NO_OPTIONS = ("backend", "return_lse")
# Flags that each flag requires.
_BESIDE = {"packed": "paged", "shared": "packed"}


def warmup(
    head_dims: int | Iterable[int],
    dtypes: torch.dtype | Iterable[torch.dtype] = torch.bfloat16,
    *,
    calls: str | Iterable[str] = "causal",
    backward: bool = True,
    device: torch.device | str = "cuda",
) -> None:
    """Compile the kernels of `attention` for the current GPU, so that later calls compile nothing.

    A first call takes seconds if its kernels are not in Triton's disk cache. Kernels depend on head
    dim, dtype and arguments, not on lengths, batch size, number of heads and memory order. This
    makes each call once, on small tensors.

        fastattn.warmup((64, 128), calls=("causal", "causal+key_lengths"))

    Args:
        head_dims: of q, k and v.
        dtypes: fp16, bf16 or fp32.
        calls: names of the calls' arguments, joined by "+": causal, window (an int), key_lengths,
            query_offset (a tensor), key_padding_mask, documents, softcap, alibi_slopes, sinks,
            batch_invariant, dropout, deterministic=False, return_lse (with gradients of lse);
            "full" for none; with "varlen" for `attention_varlen`. With "decode" for generation:
            `decode_attention` and a cache's append, prompts and steps, split and unsplit. The cache
            is a `KVCache`, with "paged" a `PagedKVCache` (any page size), with "int8" or "fp8"
            quantised; with "rotary" keys are rotated when appended (all of head_dim, in halves).
            With "decode" and "paged", "packed" adds `attention_paged`, and "shared" its calls over
            `shared_pages`.
        backward: also the backward kernels.
        device: of the tensors.

    Raises:
        ValueError: an unknown name, an unavailable GPU, or a call that the kernels do not serve;
            the message gives the reason.
        TypeError: head_dims or dtypes of the wrong type.
    """
    dims = [head_dims] if isinstance(head_dims, int) else list(head_dims)
    kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    for D in dims:
        checks.check_count("head_dims", D, 1)
    for dtype in kinds:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes must be torch dtypes, got {dtype!r}")
    names = [_flags(call) for call in ([calls] if isinstance(calls, str) else calls)]
    on = torch.device(device)
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be one that is here, got {on}: torch finds no GPU")
    for flags in names:
        for D in dims:
            for dtype in kinds:
                if "decode" in flags:
                    _generate(flags, D, dtype, on)
                else:
                    _call(flags, D, dtype, on, backward, "triton")
                    _call_on_hopper(flags, D, dtype, on, backward)


def _flags(call: str) -> list[str]:
    flags = call.split("+")
    for flag in flags:
        if flag not in _FLAGS and flag not in _CACHES:
            names = ", ".join((*_FLAGS, *_CACHES))
            raise ValueError(f"calls must name some of {names}, got {flag!r}")
        if flag in _CACHES and "decode" not in flags:
            raise ValueError(f'calls must have "decode" with {flag!r}, got {call!r}')
        if (other := _BESIDE.get(flag, flag)) not in flags:
            raise ValueError(f'calls must have "{other}" with "{flag}", got {call!r}')
    return flags


def _call_on_hopper(
    flags: list[str], D: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> None:
    """`_call` by the Hopper kernels, which serve longer calls, if they support it and ran right."""
    if not dispatch.on_hopper(device):
        return
    try:
        _call(flags, D, dtype, device, backward, "hopper")
    except ValueError as error:
        if not str(error).startswith('backend "hopper" cannot serve'):
            raise


def _call(
    flags: list[str], D: int, dtype: torch.dtype, device: torch.device, backward: bool, backend: str
) -> None:
    def zeros(*shape: int, grad: bool = False) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)

    def arguments(T_q: int, T_k: int) -> dict[str, Any]:
        result: dict[str, Any] = {"backend": backend}
        for flag in flags:
            result |= _FLAGS[flag](device, T_q, T_k)
        return result

    packed = "varlen" in flags

    def rows(heads: int) -> Tensor:
        shape = (_B * _T, heads, D) if packed else (_B, heads, _T, D)
        return zeros(*shape, grad=backward)

    with torch.set_grad_enabled(backward), torch.autocast(device.type, enabled=False):
        # With shared K/V heads, gradients may be summed in parts, by a separate kernel.
        q, k, v = leaves = [rows(_H), rows(1), rows(1)]
        starts = torch.arange(0, _B * _T + 1, _T, dtype=torch.int32, device=device)
        if backend == "hopper":
            options = {x: y for x, y in arguments(_T, _T).items() if x not in _NO_OPTIONS}
            if packed:
                checked = call_options.packed_options(q, k, v, starts, starts, **options)
            else:
                checked = call_options.dense_options(q, k, v, **options)
            if choices.why_unproven(backend, q, k, v, checked, backward) is not None:
                return
        if packed:
            result: Any = attention_varlen(q, k, v, starts, **arguments(_T, _T))
        else:
            result = attention(q, k, v, **arguments(_T, _T))
            for T_q, T_k in dispatch.split_calls():
                keys = zeros(_B, 1, T_k, D)
                attention(zeros(_B, _H, T_q, D), keys, keys, **arguments(T_q, T_k))
        outputs = result if isinstance(result, tuple) else (result,)
        if backward:
            torch.autograd.grad(outputs, leaves, [torch.zeros_like(x) for x in outputs])


@torch.no_grad()
def _generate(flags: list[str], D: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make the calls of generation, with pages of whole blocks of keys and with smaller ones."""
    options: dict[str, Any] = {"backend": "triton"}
    for flag in flags:
        options |= {} if flag in _CACHES else _FLAGS[flag](device, _T, _T)
    for page_size in (16, 256) if "paged" in flags else (None,):
        for T in (2 * _T, 1):
            q, k = (torch.zeros(_B, _H, T, D, dtype=dtype, device=device) for _ in range(2))
            for lengths in (None, [1] * _B):
                view, lengths_of_q = _appended(flags, page_size, q, k, lengths)
                for splits in (None,) if "batch_invariant" in flags else (1, 2):
                    decode_attention(
                        q, view, new_lengths=lengths_of_q, num_splits=splits, **options
                    )
        if "packed" in flags:
            _steps(view, options, "shared" in flags)


def _steps(view: CacheView, options: dict[str, Any], sharing: bool) -> None:
    """Make calls with packed queries in both kinds of tiles, in short and long rows, of a cache and
    of a server's tensors; sharing: also with all rows as one group.
    """
    B, D, device = view.batch_size, view.head_dim, view.k.device
    q = torch.zeros(4 * _T, _H, D, dtype=view.dtype, device=device)
    offsets = torch.zeros(B + 1, dtype=torch.int32, device=device)
    rows = torch.tensor([0, B], device=device)
    of_server = view._replace(lengths=view.lengths[:B], batch_index=None)
    for cache, pages in product((view, of_server), (1, _MANY_PAGES)):
        table = torch.zeros(cache.lengths.shape[0], pages, dtype=torch.int32, device=device)
        step = cache._replace(block_table=table)
        attention_paged(q, step, offsets, **options)
        if sharing:
            shared = shared_pages(step, offsets, rows, rows[:1])
            attention_paged(q, step, offsets, shared=shared, **options)


def _appended(
    flags: list[str], page_size: int | None, q: Tensor, k: Tensor, lengths: list[int] | None
) -> tuple[Any, Tensor | None]:
    """A cache with k appended, and lengths as a tensor."""
    D, device = k.shape[3], k.device
    quantize: Any = next((flag for flag in ("int8", "fp8") if flag in flags), None)
    options: dict[str, Any] = {"backend": "triton"}
    if "rotary" in flags:
        options |= {"q": q, "rotary": rotary_tables(k.shape[2], D, device=device)}
    on_device = None if lengths is None else torch.tensor(lengths, device=device).int()
    if page_size is None:
        cache = KVCache(_B, _H, 4 * _T, D, quantize=quantize, device=device, dtype=k.dtype)
        cache.append(k, k, on_device, **options)
        return cache, on_device
    pages = PagedKVCache(4 * _B, page_size, _H, D, quantize=quantize, device=device, dtype=k.dtype)
    rows = [pages.allocate() for _ in range(_B)]
    pages.append(rows, k, k, lengths, **options)
    return pages.view(rows), on_device
