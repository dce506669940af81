"""The mask function that transformers calls, and the rules of transformers' mask functions.

The attention function knows padding, windows and positions only from `attention_mask`'s result. So
it returns a mask also where transformers' functions return an ambiguous None.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...block_mask import BlockMask
from ...ops import spread
from .lazy_mask import LazyMask, Rule
from .models import takes_rules
from .packing import REMAP, is_unread


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of all layers of one kind.

    Returns bool [B, 1, T_q, T_k], True = attend: a `LazyMask` if the rule of mask_function is known
    or it translates to a mask_mod, and the call is not traced; else a plain tensor. Families that
    need the mask of "eager" get it: dtype [B, 1, T_q, T_k], 0 = attend, the lowest number
    elsewhere. Only traced calls return None (the mask is `is_causal` alone), as a layer's
    `is_causal` may differ from its mask, and Informer's, whose layers halve the length.

    Args:
        batch_size, q_length, kv_length: B, T_q, T_k.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: whether a key is visible, for positions (batch, head, query, key).
        attention_mask: bool [B, n], True = an existing token, from position 0; or integers, 0 =
            padding, others the number of a token's sequence, within which it sees; or None.
        local_size: of a sliding window, included in mask_function.
        allow_is_causal_skip, allow_is_bidirectional_skip: None may be returned.
        use_vmap: mask_function takes only single numbers.
        device: of the result.
        dtype: of a float mask.
        config: of the model, for its family; None = one that takes any mask.

    Raises:
        ValueError: the family does not call a registered attention function.
    """
    # Imports of this module's names: of transformers itself torch 2.11 can trace none.
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        prepare_padding_mask,
        sdpa_mask,
    )  # fmt: skip

    mask_function = mask_function or causal_mask_function
    separated = getattr(attention_mask, "separated", False)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        numbers = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        chunked = local_size is not None and local_size == getattr(
            config, "attention_chunk_size", None
        )
        mask_function = _within(mask_function, numbers, chunked)
        attention_mask = attention_mask != 0
    if isinstance(q_offset, Tensor):
        # It is a static cache's counter, which rises before entries are made.
        q_offset = q_offset.clone()
    extents = (batch_size, q_length, kv_length, q_offset, kv_offset)
    shared: dict[str, Any] = {"use_vmap": use_vmap, "device": device}

    def entries() -> Tensor:
        made: Tensor = sdpa_mask(
            *extents, mask_function, attention_mask, allow_is_causal_skip=False, **shared
        )
        return made

    if config is not None and not takes_rules(type(config)):
        skip = allow_is_bidirectional_skip and getattr(config, "distil", False)  # Informer's
        added: Tensor | None
        added = eager_mask(*extents, mask_function, attention_mask, dtype, skip, **shared)
        return added
    aligned = not isinstance(q_offset, Tensor) and q_offset == kv_offset and q_length == kv_length
    # One query has few entries, and generation with a static cache passes them to a compiled step.
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    one_step = q_length == 1 and (isinstance(q_offset, Tensor) or not skips)
    if one_step or use_vmap:
        return entries()
    if is_unread(attention_mask):
        # A config may change which way a family looks: its layers need not have heard of that.
        turned = getattr(config, "use_bidirectional_attention", None)
        turned = turned or getattr(config, "is_causal", None) is False
        causal = mask_function is causal_mask_function and allow_is_causal_skip and aligned
        whole = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
        if (causal or whole) and attention_mask is None and not turned:
            return None
        made = entries()
        if not separated:  # by positions, which the layers may have
            made.visible = attention_mask  # type: ignore[attr-defined]
        return made
    rule = rule_of(mask_function) or _translated(mask_function, kv_offset)
    if rule is None or (_numbered(rule) and not (aligned and q_offset == 0)):
        return entries()
    rule = _with_chunk_numbers(rule, kv_length, device)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if isinstance(rule.documents, Tensor):
        rule = rule._replace(documents=rule.documents[:, :kv_length])
    rule = rule._replace(query_offset=q_offset - kv_offset, padding=padding)
    mask = LazyMask(rule, entries, (batch_size, 1, q_length, kv_length), device)
    if attention_mask is not None:
        mask.columns = attention_mask.shape[1] - kv_offset
    return mask


def check_entries(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Check dtype and shape of a mask of entries."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "attention_mask of 4 dims must be bool (True = attend) or float (added to scores), got "
            f"{mask.dtype}: if 1 means attend, give mask.bool()"
        )
    if spread.attend is not None:
        return  # of all ranks' keys
    sizes = key.shape[0], query.shape[1], query.shape[2], key.shape[2]
    fits = (n in (1, size) for n, size in zip(mask.shape[::-1], sizes[::-1], strict=False))
    if mask.dim() > 4 or not all(fits):
        raise ValueError(
            f"attention_mask must broadcast to [B, H_q, T_q, T_k] = {list(sizes)}, got "
            f"{list(mask.shape)}"
        )


def _within(
    mask_function: Callable[..., Any], numbers: Tensor, chunked: bool
) -> Callable[..., Any]:
    """A mask function within the sequences that [B, n] numbers."""
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    if chunked:
        # Chunks count from a sequence's start, and the first one's from behind the padding.
        order = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
        begins = numbers != numbers.roll(1, dims=1)
        start = torch.where(begins, order, 0).cummax(dim=1).values
        first = (numbers != 0).int().argmax(dim=1, keepdim=True)
        mask_function = _remap(mask_function, order - start + first)
    return and_masks(mask_function, packed_sequence_mask_function(numbers))


def rule_of(mask_function: Callable[..., Any]) -> Rule | None:
    """Get the rule of one of transformers' mask functions; None for other functions.

    Functions are identified by their code, closures also by their variables.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        return Rule(causal=True)
    if mask_function is bidirectional_mask_function:
        return Rule()
    maker = _makers().get(getattr(mask_function, "__code__", None))
    if maker in (None, REMAP):
        return None
    held = _held(mask_function)
    if maker == "chunked_overlay":
        return Rule(chunk=held["chunk_size"], chunk_start=held["left_padding"])
    if maker == "and_masks":
        return _combined(held["mask_functions"])
    if maker == "packed_sequence_mask_function":
        return Rule(documents=held["packed_sequence_mask"])
    width = held["sliding_window"]
    if not isinstance(width, int) or width < 1:
        return None
    if maker == "sliding_window_overlay":
        return Rule(left=width - 1)
    return Rule(left=width, right=width)


def _translated(mask_function: Callable[..., Any], kv_offset: int) -> Rule | None:
    """The rule of a function that is not transformers' own; None if it has no translation."""

    def of_keys(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask_function(b, h, i + kv_offset, j + kv_offset)

    try:
        return Rule(mask_mod=BlockMask(of_keys))
    except ValueError:
        return None


def _combined(parts: Iterable[Callable[..., Any]]) -> Rule | None:
    """Intersect rules, or return None."""

    def is_remapped(part: Callable[..., Any]) -> bool:
        return _makers().get(getattr(part, "__code__", None)) == REMAP

    whole = Rule()
    for part in sorted(parts, key=is_remapped):
        if is_remapped(part):
            # Positions inside a document rise by one, so distances are equal. The documents are
            # computed from the same positions.
            held = _held(part)
            rule, documents = rule_of(held["mask_function"]), whole.documents
            if not isinstance(documents, Tensor) or rule is None or rule.documents is not None:
                return None
            if rule.chunk is not None:
                positions = held["position_ids"]
                if rule.chunk_start is not None:
                    positions = positions - rule.chunk_start.to(positions.device)[:, None]
                chunks = positions.div(rule.chunk, rounding_mode="floor")
                # Neighbours that are alike in both have one number.
                new = (documents.diff(dim=1) != 0) | (chunks.diff(dim=1) != 0)
                numbers = torch.nn.functional.pad(new.cumsum(1), (1, 0))
                whole = whole._replace(documents=numbers)
        else:
            rule = rule_of(part)
            if rule is None or (_numbered(whole) and _numbered(rule)):
                return None
        whole = Rule(
            causal=whole.causal or rule.causal,
            left=_least(whole.left, rule.left),
            right=_least(whole.right, rule.right),
            documents=rule.documents if whole.documents is None else whole.documents,
            chunk=rule.chunk if whole.chunk is None else whole.chunk,
            chunk_start=rule.chunk_start if whole.chunk is None else whole.chunk_start,
        )
    return whole


def _numbered(rule: Rule) -> bool:
    """Whether a rule numbers tokens; two such rules do not combine."""
    return rule.documents is not None or rule.chunk is not None


def _with_chunk_numbers(rule: Rule, length: int, device: torch.device | str) -> Rule:
    """A rule of chunks as a rule of documents, one per chunk."""
    if rule.chunk is None or rule.chunk_start is None or rule.documents is not None:
        return rule
    if length <= rule.chunk:
        return rule._replace(chunk=None, chunk_start=None)
    # Tokens before the start have chunks too, whose numbers may not be negative.
    in_front = (length // rule.chunk + 1) * rule.chunk
    position = torch.arange(in_front, in_front + length, device=device)
    position = position - rule.chunk_start.to(device)[:, None]
    return rule._replace(documents=position.div(rule.chunk, rounding_mode="floor"))


def _remap(mask_function: Any, position_ids: Any) -> Callable[..., Any]:
    """A mask function by the positions [B, n] of tokens: REMAP, for any release."""

    def inner_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask_function(b, h, position_ids[b, i], position_ids[b, j])

    return inner_mask


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _held(closure: Callable[..., Any]) -> dict[str, Any]:
    """Captured variables of a closure, by name."""
    cells = closure.__closure__ or ()
    names = closure.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def chunk_ids(offsets: Tensor, length: int, chunk: int) -> Tensor:
    """Number each chunk of each sequence, as `document_ids`: int32 [1, length].

    offsets: int32 or int64 [N + 1] of packed sequences. A chunk counts from its sequence's start.
    """
    position = torch.arange(length, dtype=offsets.dtype, device=offsets.device)
    ids = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    first = (position - offsets[ids]) % chunk == 0
    return first.cumsum(0, dtype=torch.int32)[None]


@cache
def _makers() -> dict[Any, str]:
    """transformers' factories of mask functions, by the code of their results."""
    from transformers import masking_utils as masking

    made = {
        "and_masks": masking.and_masks(),
        "sliding_window_overlay": masking.sliding_window_overlay(1),
        "sliding_window_bidirectional_overlay": masking.sliding_window_bidirectional_overlay(1),
        "chunked_overlay": masking.chunked_overlay(1, None),
        "packed_sequence_mask_function": masking.packed_sequence_mask_function(None),
        REMAP: getattr(masking, REMAP, _remap)(None, None),
    }
    return {_remap(None, None).__code__: REMAP} | {f.__code__: name for name, f in made.items()}
