"""The attention function that Hugging Face transformers calls, and its registration.

    fastattn.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fastattn")
    model.set_attn_implementation("fastattn")     # or an existing model

An implementation registers two functions with transformers, for attention and for masks (`masks`).
Not every family calls registered functions: see `models`.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import dispatch
from ...cache.views import view_of_tensors
from ...functional import inputs
from ...functional.decode import decode_attention
from ...functional.fused_attention import attention, attention_varlen
from ...functional.selected import selected_attention
from ...functional.statistics import attention_weights
from ...missing import installing
from ...ops.call import interpreting
from ...options import OPTIONS
from ...position_tables import document_ids
from ...tracing import in_forward_mode
from ..patch import count_registered
from ..sdpa import LOWEST_BIAS, bounded_bias
from .continuous import NAME as NAME
from .continuous import NEWEST, OLDEST, TESTED, attend_paged
from .lazy_mask import LazyMask, Rule
from .masks import attention_mask, check_entries, chunk_ids
from .packing import by_positions, is_cross, read_sequences, sequence_numbers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Attend = Callable[..., Any]
# transformers' module of output capturing, if imported.
_collectors: list[Any] = []


def register() -> None:
    """Register `attn_implementation="fastattn"` with transformers.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.
    Warns:
        UserWarning: once, for a version of transformers that is newer than the tested ones.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "fastattn.compat.transformers needs the package transformers, which is not installed: "
            + installing("hf"),
            name="transformers",
        ) from None
    _check_version(transformers.__version__)
    from transformers.utils import output_capturing

    _collectors[:] = [getattr(output_capturing, "_active_collector", None)]
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, attention_mask)
    read_sequences()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | BlockMask | None",
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer's attention: the function that transformers calls for each layer.

    Args:
        module: the layer; its `is_causal` (default True, of cross-attention False) is the default.
        query: [B, H_q, T_q, D].
        key: [B, H_k, T_k, D]; H_k divides H_q.
        value: [B, H_k, T_k, D_v].
        attention_mask: bool (True = attend) or float (added), broadcasting to [B, H_q, T_q, T_k];
            bool or integer [B, T_k] (0 = padding, others number the sequences), the queries being
            the last tokens; a `BlockMask` of FlexAttention; or None.
        dropout: of the weights.
        scaling: factor on the products; default D ** -0.5.
        is_causal: queries see no later keys; used without a mask or with a 2-dim one.
        sliding_window: keys that a query sees on either side, itself included; used without a mask
            or with a 2-dim one. Other masks include the window.
        softcap, s_aux, position_bias: `softcap`, `sinks` and `attn_bias` of `fastattn.attention`.
        sinks: float [B, H_q, T_q, 1], the score of one more key for each query, whose value is 0.
        indices: integers [B, T_q, n], keys that a query may see, within the mask.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], offsets of sequences packed into a batch of
            one. They combine with any mask; with a 2-dim one only if it hides nothing. They replace
            the sequences in a mask's rule, as in "flash_attention_2".
        cache: of continuous batching. It is updated (transformers 5.24 updates it before, and
            passes only its read_index); its offsets and sliding_window replace the mask.
        block_indices: integers [B, H_s, T_q, n], blocks of keys that a query may see, likewise, in
            H_s lists of heads. The block size is the layer's indexer's or its config's
            index_block_size.
        output_attentions: also return the weights, without gradients or dropout. With tested
            versions, layers of a model called with output_attentions do so too.
        position_ids: integers [B or 1, T_q]. Unless the mask has 4 dims of its own, or there are
            offsets: where visible tokens' positions start anew, a sequence begins, and no query
            sees another one. Masks of `attention_mask` are read by their rule.
        kwargs: arguments of other implementations.

    Returns:
        ([B, T_q, H_q, D_v] contiguous, weights [B, H_q, T_q, T_k] or None).

    Raises:
        NotImplementedError: a cache with a mask that offsets and a window do not express.
        TypeError: attention_mask of 4 dims is neither bool nor float, or it is no mask.
        ValueError: no mask for a causal layer with 1 < T_q != T_k, as the queries' positions are
            unknown; cu_seq_lens_q with padding; or position_ids that start anew behind a cache.
    """
    count_registered()
    output_attentions = output_attentions or _are_weights_collected()
    causal = getattr(module, "is_causal", not is_cross(module)) if is_causal is None else is_causal
    options: dict[str, Any] = {"dropout": dropout, "softcap": softcap, "sinks": s_aux}
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    options["scale"] = scaling
    chosen = indices, block_indices
    extras = any(x is not None for x in (sinks, position_bias, *chosen))
    if cache is not None or "read_index" in kwargs:
        _refuse_beside_cache(causal, extras, output_attentions, dropout)
        kwargs["cu_seq_lens_k"] = cu_seq_lens_k
        del options["dropout"]
        arguments = (attention_mask, sliding_window, cu_seq_lens_q, cache, options, kwargs)
        return attend_paged(module, query, key, value, *arguments), None
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    if position_bias is not None:
        options["attn_bias"] = bounded_bias(position_bias)
    mask, rule = attention_mask, None
    beside = output_attentions or any(x is not None for x in (cu_seq_lens_q, *chosen))
    if isinstance(mask, LazyMask):
        rule = mask.rule_for((key.shape[0], 1, query.shape[2], key.shape[2]))
        if rule is not None and rule.mask_mod is not None and (beside or _by_torch(query)):
            rule = None
        mask = mask.entries() if rule is None else None
    elif mask is not None and not isinstance(mask, Tensor):
        options.update(_block_mask_options(mask, query, key, beside or query.shape[2] == 1))
        mask = None
    elif mask is None or mask.dim() == 2:
        rule = _rule_without_mask(mask, bool(causal), sliding_window, query, key)
        mask = None
    if rule is not None:
        if cu_seq_lens_q is None:
            rule = by_positions(rule, attention_mask, module, position_ids, query, key)
        options.update(rule.options(key.shape[0]))
    elif (
        isinstance(mask, Tensor)
        and hasattr(mask, "visible")
        and cu_seq_lens_q is None
        and query.shape[2] == key.shape[2]
    ):
        unsplit = Rule(bool(causal), padding=mask.visible)
        split = by_positions(unsplit, mask, module, position_ids, query, key)
        options["documents"] = split.documents
    if cu_seq_lens_q is not None:
        packed = (cu_seq_lens_q, cu_seq_lens_k)
        _check_packed(module, query, key, attention_mask, rule)
        if rule is not None and _is_plain(rule) and not extras and not output_attentions:
            return _packed(query, key, value, packed, options), None
        options["documents"] = _packed_ids(packed, query, key, rule)
    if mask is not None:
        check_entries(mask, query, key)
        _add_mask(options, mask)
    options = {name: x for name, x in options.items() if x is not None}
    attend: Attend = attention
    if any(x is not None for x in chosen):
        lists, size = _lists(module, *chosen)
        if _go_by_lists(lists, size, key, options) and not output_attentions:
            del options["dropout"]
            attend = partial(selected_attention, indices=lists, block=(1, size))
            return _attend(query, key, value, sinks, options, attend)[0], None
        _add_mask(options, _shown(lists, size, query, key))
    q, k, v, given = inputs.autocast(query, key, value, options)
    if sinks is None and not output_attentions and _is_one_step(q, k, v, given):
        return _one_step(q, k, v, given), None
    o, share = _attend(q, k, v, sinks, given, attend)
    if not output_attentions:
        return o, None
    options.pop("dropout", None)
    with torch.no_grad():
        weights = attention_weights(query, key, **options)
    return o, (weights if share is None else weights * share).to(query.dtype)


def _by_torch(query: Tensor) -> bool:
    """Whether torch serves a layer: it computes a mask's entries once, for all layers."""
    return query.is_cpu and os.environ.get(dispatch.ENVIRONMENT) not in ("triton", "hopper")


def _refuse_beside_cache(causal: bool, *values: Any) -> None:
    """Refuse options that attention over pages would ignore."""
    names = ("scores of the caller's own", "output_attentions", "dropout")
    wrong = [] if causal else ["is_causal=False"]
    wrong += [name for name, x in zip(names, values, strict=True) if x]
    if wrong:
        raise NotImplementedError(
            f"cache with {', '.join(wrong)}: not supported over the pages of continuous batching"
        )


def _are_weights_collected() -> bool:
    """Whether the model being called collects its layers' weights."""
    collector = _collectors[0] if _collectors else None
    # It cannot be traced.
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    options: dict[str, Any],
    attend: Attend,
) -> tuple[Tensor, Tensor | None]:
    """[B, T_q, H_q, D_v], scaled by the keys' share of the weights if queries have sinks."""
    if sinks is None:
        return attend(query, key, value, **options).transpose(1, 2).contiguous(), None
    o, lse = attend(query, key, value, return_lse=True, **options)
    # A sink multiplies the denominator by 1 + exp(sinks - lse).
    share = torch.sigmoid(lse[..., None].clamp(min=LOWEST_BIAS) - sinks)
    return (o * share).to(o.dtype).transpose(1, 2).contiguous(), share


def _rule_without_mask(
    padding: Tensor | None, causal: bool, sliding_window: int | None, query: Tensor, key: Tensor
) -> Rule:
    """The rule of a layer whose mask is None or padding."""
    T_q, T_k = query.shape[2], key.shape[2]
    if causal and padding is None and 1 < T_q != T_k:
        raise ValueError(
            f"attention_mask is None for {T_q} queries and {T_k} keys of a causal layer: "
            "positions of the queries are unknown without a mask of "
            "fastattn.compat.transformers.attention_mask"
        )
    side = None if sliding_window is None else sliding_window - 1
    rule = Rule(causal, side, side, query_offset=T_k - T_q)
    if padding is None:
        return rule
    numbers = sequence_numbers(padding, T_q, T_k - 1, of_keys=not causal and T_q != T_k)
    if numbers.dtype == torch.bool:
        return rule._replace(padding=numbers)
    return rule._replace(padding=numbers != 0, documents=(numbers[:, T_k - T_q :], numbers))


def _block_mask_options(
    mask: object, query: Tensor, key: Tensor, at_all_pairs: bool
) -> dict[str, Any]:
    """Options that stand for a BlockMask of FlexAttention; other objects are refused."""
    from torch.nn.attention.flex_attention import BlockMask  # late, as it takes a second

    from ..flex_attention import mask_options

    if not isinstance(mask, BlockMask):
        raise TypeError(
            "attention_mask must be a tensor, a BlockMask of torch's FlexAttention or None, got "
            f"{type(mask).__name__}"
        )
    return mask_options(mask, query, key, at_all_pairs=at_all_pairs)


def _add_mask(options: dict[str, Any], mask: Tensor) -> None:
    """Add a mask's entries to the options; floats are added to a bias."""
    if mask.dtype == torch.bool:
        before = options.get("attn_mask")
        options["attn_mask"] = mask if before is None else before & mask
    else:
        bias = options.get("attn_bias")
        options["attn_bias"] = bounded_bias(mask if bias is None else bias + mask)


def _is_one_step(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether this is a decoding step that the decode kernels serve."""
    derived = torch.is_grad_enabled() or torch.compiler.is_compiling() or in_forward_mode()
    if query.shape[2] != 1 or derived or (query.is_cpu and not interpreting()):
        return False
    T_k = key.shape[2]
    offset = options.get("query_offset", T_k - 1)
    # A decoding query is at the last key.
    if isinstance(offset, Tensor) or offset != T_k - 1 or T_k == 0:
        return False
    whole_rows = all(x.shape[3] * x.element_size() % 16 == 0 for x in (key, value))
    dense = key.is_contiguous() and value.is_contiguous() and key.data_ptr() % 16 == 0
    return dense and whole_rows and not options["dropout"] and "documents" not in options


def _one_step(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """[B, 1, H_q, D_v] by the decode kernels, which split keys where there are few rows."""
    B, _, T_k, _ = key.shape
    left = ("dropout", "query_offset", "key_padding_mask")
    wanted = {"causal": False} | {name: x for name, x in options.items() if name not in left}
    if (padding := options.get("key_padding_mask")) is not None:
        _add_mask(wanted, padding[:, None, None])
    for name in ("attn_mask", "attn_bias"):
        if name in wanted:
            wanted[name] = wanted[name].expand(*wanted[name].shape[:-1], T_k)
    lengths = key.new_full((B,), T_k, dtype=torch.int32)
    return decode_attention(query, view_of_tensors(key, value, lengths), **wanted).transpose(1, 2)


def _check_packed(
    module: nn.Module, query: Tensor, key: Tensor, mask: object, rule: Rule | None
) -> None:
    """Check that the mask agrees with the offsets of packed sequences."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of 1, got {query.shape[0]}")
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if rule is None and chunk is not None and key.shape[2] > chunk:
        # Chunks count from a sequence's start, the mask's entries from the row's.
        raise NotImplementedError(
            f"cu_seq_lens_q with the entries of a mask, as torch.compile makes them, in a model "
            f"with attention_chunk_size {chunk}: leave the offsets out, and position_ids that "
            "start anew separate the sequences"
        )
    if torch.compiler.is_compiling() or rule is None or rule.padding is None:
        return
    hidden = mask.has_padding() if isinstance(mask, LazyMask) else not bool(rule.padding.all())
    if hidden:
        raise ValueError(
            "attention_mask hides tokens, and cu_seq_lens_q has offsets of packed sequences: give "
            "the offsets of a row without padding, or the mask alone"
        )


def _is_plain(rule: Rule) -> bool:
    """Whether a rule is offsets and a band, after `_check_packed`."""
    return rule.chunk is None and not (rule.padding is not None and torch.compiler.is_compiling())


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor | None],
    options: dict[str, Any],
) -> Tensor:
    """Attention within packed sequences in a batch of one."""
    of_rows = ("query_offset", "key_padding_mask", "documents")
    passed = {name: x for name, x in options.items() if x is not None and name not in of_rows}
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_varlen(q, k, v, *offsets, **passed)[None].contiguous()


def _packed_ids(
    offsets: tuple[Tensor, Tensor | None], query: Tensor, key: Tensor, rule: Rule | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Number of each token's sequence, or of its chunk, in a batch of one."""
    T_q, T_k = query.shape[2], key.shape[2]
    if T_q != T_k:
        raise ValueError(
            f"cu_seq_lens_q with a mask that is no plain rule needs as many queries as keys, got "
            f"{T_q} and {T_k}"
        )
    if rule is not None and rule.chunk is not None:
        return chunk_ids(offsets[0], T_k, rule.chunk)
    of_queries = document_ids(offsets[0], T_q)
    return of_queries if offsets[1] is None else (of_queries, document_ids(offsets[1], T_k))


def _lists(
    module: nn.Module, indices: Tensor | None, block_indices: Tensor | None
) -> tuple[Tensor, int]:
    """Lists [B, H_s, T_q, n] of an indexer's keys or blocks, and the block size."""
    if block_indices is None:
        assert indices is not None
        return indices[:, None], 1
    if indices is not None:
        raise ValueError("indices and block_indices both select keys: pass one of them")
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        size = getattr(getattr(module, "config", None), "index_block_size", None)
    if size is None:
        raise ValueError(
            "block_indices needs the size of a block: neither the layer has an indexer with a "
            "block_size, nor its config an index_block_size"
        )
    return block_indices, int(size)


# Options that `selected_attention` takes, and dropout, which may be 0.
_BESIDE_LISTS = {x for x, row in OPTIONS.items() if "selected_attention" in row.calls} | {"dropout"}


def _go_by_lists(lists: Tensor, size: int, key: Tensor, options: dict[str, Any]) -> bool:
    """Whether to use `selected_attention`: for blocks, or few tokens outside decoding."""
    few = size > 1 or (lists.shape[2] > 1 and 4 * lists.shape[3] <= key.shape[2])
    return few and options.keys() <= _BESIDE_LISTS and not options["dropout"]


def _shown(lists: Tensor, size: int, query: Tensor, key: Tensor) -> Tensor:
    """Mask all but the keys of the listed blocks: bool [B, 1 or H_q, T_q, T_k]; -1 = none."""
    blocks = -(-key.shape[2] // size)
    # -1 goes to an extra first column.
    mask = key.new_zeros((*lists.shape[:3], 1 + blocks), dtype=torch.bool)
    mask = mask.scatter(-1, lists.long().clamp(min=-1) + 1, True)[..., 1:]
    mask = mask.repeat_interleave(size, -1)[..., : key.shape[2]]
    H_s = lists.shape[1]
    return mask if H_s == 1 else mask.repeat_interleave(query.shape[1] // H_s, 1)


@cache
def _check_version(version: str) -> None:
    """Refuse an old version of transformers; warn, once in a process, of an untested one."""
    installed, oldest, newest = ([*map(int, x.split(".")[:2])] for x in (version, OLDEST, NEWEST))
    if installed < oldest:
        raise ImportError(
            f'attn_implementation="fastattn" serves transformers {TESTED}, got {version}: there '
            'use "sdpa" with fastattn.patch_sdpa or swap',
            name="transformers",
        )
    if installed > newest:
        warnings.warn(
            f"transformers {version} is newer than {TESTED}, which fastattn was tested with: "
            "scores, masks or caches may be passed in another way there",
            UserWarning,
            stacklevel=3,
        )
