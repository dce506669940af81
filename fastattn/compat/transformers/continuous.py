"""Continuous batching in transformers: attention over its `PagedAttentionCache`.

    fastattn.compat.transformers.register()
    fastattn.compat.transformers.enable_continuous_batching()
    model.set_attn_implementation("fastattn")
    model.generate_batch(prompts)

A step packs prompt chunks and decoded tokens of many requests into a batch of one. The cache either
gathers all keys, for `attention_varlen`, or provides pages and a block table, where new tokens are
appended and attended in place.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.slots import append_paged
from ...cache.views import view_of_tensors
from ...functional.fused_attention import attention_varlen
from ...functional.paged import attention_paged
from .lazy_mask import LazyMask

NAME = "fastattn"
# Releases of transformers that the suite has run with.
OLDEST, NEWEST = "5.4", "5.24"
TESTED = f"{OLDEST} to {NEWEST}"

# Modules that ask whether an implementation takes no mask; the last one prepares block tables.
_REQUESTING = ("cache", "continuous_api", "initialization")


def enable_continuous_batching() -> None:
    """Make transformers' `generate_batch` accept attn_implementation="fastattn".

    transformers accepts "sdpa", "paged|eager" and names with "flash"; it refuses others or, if
    flash_attn can be imported, switches to it with a warning. After this call, its modules for
    continuous batching treat "fastattn" as an implementation that reads offsets and pages, without
    a mask and, on CUDA, with graphs and block tables. Nothing else changes. Idempotent.

    Raises:
        ImportError: transformers is not installed, or lacks a replaced function, as before 5.19.
    """
    from transformers.generation import continuous_batching

    modules: list[Any] = [getattr(continuous_batching, name, None) for name in _REQUESTING]
    replaced = [(module, "is_flash_attention_requested", _accepting) for module in modules]
    replaced.append((modules[-1], "lazy_import_flash_attention", _importing))
    for module, name, _ in replaced:
        if not hasattr(module, name):
            raise ImportError(
                f"{getattr(module, '__name__', continuous_batching.__name__)} has no {name}: "
                f"fastattn knows continuous batching of transformers 5.19 to {NEWEST}",
                name="transformers",
            )
    for module, name, wrap in replaced:
        before = getattr(module, name)
        if not getattr(before, "serves_fastattn", False):
            after = wrap(before)
            after.serves_fastattn = True
            setattr(module, name, after)


def _accepting(before: Any) -> Any:
    """transformers' `is_flash_attention_requested`, also True for "fastattn"."""

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **options: Any
    ) -> bool:
        name = requested_attention_implementation
        if config is not None and name is None:
            name = config._attn_implementation
        return name == NAME or bool(before(config, requested_attention_implementation, **options))

    return is_flash_attention_requested


def _importing(before: Any) -> Any:
    """transformers' `lazy_import_flash_attention`, which returns the function over pages."""

    def lazy_import_flash_attention(implementation: str | None, *args: Any, **options: Any) -> Any:
        if implementation == NAME:
            return (None, None, attention_paged, None, None), (None, None)
        return before(implementation, *args, **options)

    return lazy_import_flash_attention


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    window: int | None,
    cu_seq_lens_q: Tensor | None,
    cache: Any,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Update a layer of a `PagedAttentionCache`, and attend to it.

    Args:
        module: the layer, with its `layer_idx`.
        query, key, value: [1, heads, total, width], the new tokens of all requests.
        mask: the model's mask, which the cache's offsets replace.
        window: keys that a query sees, itself included; None: all.
        cu_seq_lens_q: int32 [N + 1].
        cache: of transformers; None if key, value and kwargs come from its update.
        options: further options of `fastattn.attention_paged`; None is dropped.
        kwargs: arguments of `cache.update`, with cu_seq_lens_k; modified.

    Returns:
        [1, total, H_q, D_v].

    Raises:
        NotImplementedError: a mask other than a band, or an additive one.
    """
    window = _window(module, mask, window)
    if cu_seq_lens_q is None or kwargs.get("cu_seq_lens_k") is None:
        raise ValueError("cache needs cu_seq_lens_q and cu_seq_lens_k")
    if cache is not None:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = {name: x for name, x in options.items() if x is not None}
    options |= {"causal": True, "window": window}
    offsets = (cu_seq_lens_q, kwargs["cu_seq_lens_k"])
    table = kwargs.get("block_table")
    if table is None:
        return attention_varlen(q, k, v, *offsets, **options)[None]
    # Pages are [P, S, H_k, D].
    k_pages, v_pages = (kwargs[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    lengths = offsets[1].diff()
    view = view_of_tensors(k_pages, v_pages, lengths, block_table=table.contiguous())
    slots = _slots(offsets[0], lengths, table, k_pages.shape[2], q.shape[0])
    append_paged(view, k, v, slots)
    return attention_paged(q, view, offsets[0], **options)[None]


def _window(module: nn.Module, mask: Any, window: int | None) -> int | None:
    """The window of a layer; raise for masks that offsets and a window do not express."""
    rule = mask.rule() if isinstance(mask, LazyMask) else None
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk is not None or (rule is not None and rule.chunk is not None):
        raise NotImplementedError("cache: attention in chunks over pages is not supported")
    kind = getattr(mask, "dtype", type(mask).__name__)
    if mask is not None and not isinstance(mask, LazyMask) and kind != torch.bool:
        raise NotImplementedError(
            f"cache with an attention_mask of {kind}: fastattn goes by offsets there; "
            'attn_implementation="sdpa" takes the mask'
        )
    if window is None and rule is not None and rule.left is not None:
        return int(rule.left) + 1
    return window


def _slots(starts: Tensor, lengths: Tensor, table: Tensor, size: int, total: int) -> Tensor:
    """Find the slot of each new token, int64 [total]; -1 past the last row."""
    token = torch.arange(total, device=starts.device)
    row = torch.searchsorted(starts[1:].contiguous(), token.to(starts.dtype), right=True)
    exists = row < lengths.shape[0]
    row = row.clamp(max=lengths.shape[0] - 1)
    position = (lengths[row] - starts[row + 1] + token).clamp(min=0)
    page = table[row, (position // size).clamp(max=table.shape[1] - 1)]
    return torch.where(exists & (page >= 0), page.long() * size + position % size, -1)
