"""Sequences packed into rows: by positions that start anew, and by numbers in a mask [B, T].

transformers' flash path finds sequences by positions. Its mask functions do so only without a
cache and a mask, and treat numbers as True.
"""

from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...tracing import is_mapped
from .continuous import NAME, TESTED
from .lazy_mask import LazyMask, Rule

# transformers' function, new in 5.23, by which chunks count from a sequence's start.
REMAP = "remap_positions_for_packed_sequence"


def read_sequences() -> None:
    """Make transformers' functions for masks read packed sequences, for "fastattn" alone.

    `attention_mask` then gets a mask [B, n] of numbers where there are several sequences.

    Raises:
        ImportError: transformers lacks the replaced function.
    """
    from transformers import masking_utils

    before = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if before is None:
        raise ImportError(
            "transformers.masking_utils has no _preprocess_mask_arguments: fastattn knows masks of "
            f"transformers {TESTED}"
        )
    if not getattr(before, "reads_sequences", False):
        in_rows = not hasattr(masking_utils, REMAP)
        masking_utils._preprocess_mask_arguments = _reading(before, in_rows)


def is_unread(x: Tensor | None) -> bool:
    """Whether values of x cannot be read: in traced calls, captured CUDA graphs and under vmap."""
    from transformers.utils.import_utils import is_tracing

    return is_tracing(x) or (x is not None and is_mapped(x))


def _reading(before: Any, in_rows: bool) -> Any:
    """transformers' function, with packed sequences read.

    in_rows: it counts chunks from a row's start.
    """
    names = tuple(signature(before).parameters)

    # Some families call it by keywords.
    @wraps(before)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        made = before(*args, **kwargs)
        done, mask, found, *extents = made
        given = dict(zip(names, args, strict=False)) | kwargs
        if done or given["config"]._attn_implementation != NAME:
            return made
        q_length, _, offset, _ = extents
        if given["attention_mask"] is not None:
            of_keys = given.get("encoder_hidden_states") is not None
            numbers = sequence_numbers(given["attention_mask"], q_length, offset, of_keys=of_keys)
            mask = numbers.to(mask.device)
            _refuse_factors(given["config"], mask)
        position_ids = given["position_ids"]
        if isinstance(position_ids, Tensor) and position_ids.dim() == 2:
            positions = position_ids.expand(given["inputs_embeds"].shape[0], -1)
            if found is None or in_rows or is_unread(positions):
                mask, found = _split(mask, positions, *extents), None
        return done, mask, found, *extents

    preprocess.reads_sequences = True  # type: ignore[attr-defined]
    return preprocess


# Layers that carry tokens into the next sequence, and read a mask's numbers as factors.
_CARRYING = {
    *("linear_attention", "conv", "hybrid", "hybrid_sliding"),
    *("compressed_sparse_attention", "heavily_compressed_attention"),
}
# Configs of models that multiply embeddings by the mask.
_MULTIPLYING = {"EsmConfig", "SaProtConfig"}


def _refuse_factors(config: Any, mask: Tensor) -> None:
    """Refuse numbers of sequences in a model that reads them as factors."""
    if mask.dtype == torch.bool or is_unread(mask):
        return
    kinds = sorted(_CARRYING.intersection(getattr(config, "layer_types", None) or ()))
    why = f"layers of {', '.join(kinds)} do not keep them apart" if kinds else ""
    if type(config).__name__ in _MULTIPLYING:
        why = "embeddings are multiplied by them"
    if why:
        raise ValueError(
            f"attention_mask numbers sequences up to {int(mask.max())}, and {why}: give each "
            "sequence a row of its own"
        )


def sequence_numbers(
    mask: Tensor, q_length: int, q_offset: int | Tensor, *, of_keys: bool = False
) -> Tensor:
    """A mask [B, n] of numbers: as bool if they are 0 and 1, else as integers, 0 = padding.

    Integers also where values cannot be read. For a single query, bool: the keys of its own number.

    of_keys: the queries have their own sequence; numbers above 1 raise.

    Raises:
        ValueError: a number is negative, or neither 0 nor 1 in a mask of floats or of keys alone.
    """
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must have 2 or 4 dims, got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    real, numbered = mask != 0, not (of_keys or mask.is_floating_point())
    if q_length == 1 and numbered:
        own = _columns(mask, q_offset, 1)
        return real & ((mask == own) | (own == 0))
    if is_unread(mask):
        return mask if numbered else real
    wrong = (mask < 0) if numbered else (real & (mask != 1))
    above, refused = torch.stack([(mask > 1).any(), wrong.any()]).tolist()
    if refused:
        what = "0, 1 or the numbers of sequences" if numbered else "0 and 1"
        raise ValueError(
            f"attention_mask [B, T] of {mask.dtype} must hold {what}, got {mask[wrong][0].item()}"
        )
    return mask.long() if above and numbered else real


def _split(
    mask: Tensor | None, position_ids: Tensor, T_q: int, T_k: int, offset: int | Tensor, first: int
) -> Tensor | None:
    """The mask, with numbers where positions of the queries start anew.

    offset, first: positions of the first query and of the first key.
    """
    if T_q == 1 or position_ids.shape[1] != T_q:
        return mask
    runs = restarts(position_ids, None if mask is None else _columns(mask, offset, T_q) != 0)
    if runs is None:
        return mask
    if not is_unread(runs) and int(offset) != 0:
        raise ValueError(_BEHIND_CACHE)
    n = first + T_k if mask is None else mask.shape[1]
    _check_columns(n, first + T_k)
    numbers = 1 + _of_keys(runs, n, offset)
    if mask is not None:
        numbers = torch.where(mask != 0, numbers + mask * (T_q + 1), 0)
    numbers.separated = True  # type: ignore[attr-defined]
    return numbers


_BEHIND_CACHE = (
    "position_ids start anew in a call with cached tokens, whose positions are unknown: give "
    "packed sequences in one call, with an empty cache or none"
)


def _check_columns(n: int, tokens: int) -> None:
    """Raise on a mask of n columns for fewer tokens, in which sequences begin."""
    if n > tokens:
        raise ValueError(
            f"attention_mask [B, T] has {n} columns for {tokens} tokens, and position_ids start "
            "anew: give a column for each token (with PEFT 0.21 the generate of transformers 5.24 "
            "loses the tokens of prefix tuning)"
        )


def _of_keys(runs: Tensor, count: int, offset: int | Tensor) -> Tensor:
    """Numbers [B, count] of keys, from those [B, T_q] of the queries: cached ones have the first.

    offset: place of the first query among the keys.
    """
    place = torch.arange(count, device=runs.device) - offset
    return runs[:, place.clamp(0, runs.shape[1] - 1)]


def _columns(mask: Tensor, offset: int | Tensor, count: int) -> Tensor:
    """Columns [B, count] of a mask from offset on, at most its last ones."""
    last = mask.shape[1] - count
    if isinstance(offset, Tensor):
        place = torch.arange(count, device=mask.device) + offset.to(mask.device).clamp(max=last)
        return mask[:, place]
    return mask.narrow(1, min(offset, last), count)


def restarts(position_ids: Tensor, visible: Tensor | None) -> Tensor | None:
    """Number each run of rising positions: int64 [B, T]; None if each row is one run.

    A run begins where a position falls, unless it follows that of padding, as `generate` counts on
    behind padding; or where it is the row's least again, unless all are equal. None is not returned
    where values cannot be read.

    visible: bool [B, T], False = padding, whose positions do not count; None: all are visible.
    """
    order = torch.arange(position_ids.shape[1], device=position_ids.device)[None]
    if visible is None:
        visible = torch.ones_like(position_ids, dtype=torch.bool)
    # Padding repeats the token before it, or the first one after it.
    first = visible.int().argmax(dim=1, keepdim=True)
    position = position_ids.gather(1, torch.where(visible, order, first).cummax(dim=1).values)
    follows = position_ids == position_ids.roll(1, dims=1) + 1
    falls = (position < position.roll(1, dims=1)) & ~follows
    least = position.amin(dim=1, keepdim=True)
    again = (position == least) & (position.amax(dim=1, keepdim=True) > least)
    begins = visible & (order > first) & (falls | again)
    if not is_unread(begins) and not bool(begins.any()):
        return None
    return begins.cumsum(dim=1)


def is_cross(module: nn.Module) -> bool:
    """Whether a layer's keys are of other tokens than its queries, by attribute or class name."""
    named = "cross" in type(module).__name__.lower()
    return named or bool(getattr(module, "is_cross_attention", False))


def by_positions(
    rule: Rule,
    mask: Any,
    module: nn.Module,
    position_ids: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Rule:
    """The rule of a layer, with a number for each sequence that `position_ids` [B or 1, T_q] show.

    For masks that were made without positions, such as those that are not causal.

    mask: that of the rule, which keeps the result for layers that share it.

    Raises:
        ValueError: positions start anew in a call with cached tokens, or the mask was made from one
            with more columns than tokens.
    """
    T_q, T_k = query.shape[2], key.shape[2]
    if position_ids is None or position_ids.dim() != 2 or T_q == 1:
        return rule
    if rule.documents is not None or rule.mask_mod is not None:
        return rule
    # Positions of other tokens' queries say nothing of the keys.
    apart = is_cross(module) or T_q < T_k
    if position_ids.shape[1] != T_q or T_q > T_k or (not rule.causal and apart):
        return rule
    known = mask.separated if isinstance(mask, LazyMask) else None
    if known is not None and known[0] is position_ids:
        return known[1]
    positions, padding = position_ids.expand(key.shape[0], -1), rule.padding
    runs = restarts(
        positions, None if padding is None else _columns(padding, rule.query_offset, T_q)
    )
    found = rule
    if runs is not None:
        if not is_unread(runs):
            if isinstance(mask, LazyMask):
                _check_columns(mask.columns, T_k)
            if int(rule.query_offset) != 0:
                raise ValueError(_BEHIND_CACHE)
        found = rule._replace(documents=(runs, _of_keys(runs, T_k, rule.query_offset)))
    if isinstance(mask, LazyMask):
        mask.separated = position_ids, found
    return found
