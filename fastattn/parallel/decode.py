"""Attention of new tokens to a cache sharded over ranks."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import checks
from ..cache.views import view_of_cache
from ..functional import call_options, decode
from ..functional.merge import merge
from ..ops import spread
from ..options import Options
from ..torch_backend import formula
from ..torch_backend.masks import added_scores, visible
from .parts import wide
from .ranks import all_gather

# Position-dependent options, as a rank's cache holds only some positions.
_MASKS = ("window", "keep_first", "stride")
_BIASES = ("alibi_slopes", "relative_bias")
_FUNCTIONS = "functions count the positions of one cache"
REFUSED = {
    "mask_mod": _FUNCTIONS,
    "score_mod": _FUNCTIONS,
    "mod_tensors": _FUNCTIONS,
    "heads": "each rank has all heads",
    "batch_invariant": "each rank has a part of the keys",
}
_TAKEN = call_options.CACHE._replace(name="decode_attention over ranks")


def decode_attention(
    q: Tensor,
    cache: Any,
    *,
    group: ProcessGroup,
    page: int = 1,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fastattn.decode_attention` to a cache sharded over the ranks of a group.

    Rank r of R holds the tokens t with t // page % R == r, in order, and appends only those. Each
    rank attends to its own tokens, and all ranks merge all results in one fixed order: bitwise
    equal on every rank and in every run.

    Args:
        q: [B, H_q, T_q, D], the newest tokens, equal on every rank.
        cache: this rank's, as for `fastattn.decode_attention`; no ring.
        group: the ranks.
        page: number of consecutive tokens on a rank.
        return_lse, num_splits, backend: as there.
        options: as for `fastattn.decode_attention`, without mask_mod, score_mod, mod_tensors, heads
            and batch_invariant. The last dim of attn_mask and attn_bias are positions in this
            rank's cache. Options must be equal on every rank, which is not checked.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q].

    Raises:
        TypeError, ValueError: as `fastattn.decode_attention`, or an option that is not supported.
    """
    _TAKEN.refuse_others(options)
    options = {name: x for name, x in options.items() if x is not _TAKEN.default(name)}
    for name in options:
        if name in REFUSED:
            raise TypeError(f"{_TAKEN.name} does not support {name}: {REFUSED[name]}")
    page = checks.check_count("page", page, 1)
    arguments = {name: x for name, x in options.items() if name not in (*_MASKS, *_BIASES, "sinks")}
    arguments["causal"] = False
    positional = any(options.get(name) is not None for name in (*_MASKS, *_BIASES))
    if positional or (q.shape[2] > 1 and options.get("causal", True)):
        arguments |= _by_position(q, cache, group, page, options)
    arguments |= {"num_splits": num_splits, "backend": backend}
    with spread.attending(None):
        o, lse = decode.decode_attention(q, cache, return_lse=True, **arguments)
    parts = all_gather(torch.cat((wide(o), lse[..., None]), -1), group)
    o, lse = _merged([(part[..., :-1], part[..., -1]) for part in parts])
    o, lse = formula.with_column(o, lse, options.get("sinks"))
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge adjacent parts pairwise, in a tree that is equal on every rank."""
    while len(parts) > 1:
        pairs = [(parts[n], parts[n + 1]) for n in range(0, len(parts) - 1, 2)]
        rest = parts[2 * len(pairs) :]
        parts = [merge(*(x.contiguous() for x in (*one, *other))) for one, other in pairs] + rest
    return parts[0]


def _by_position(
    q: Tensor, cache: Any, group: ProcessGroup, page: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """attn_mask and attn_bias for this rank's keys, from position-dependent options."""
    view, _ = view_of_cache(cache)
    B, H_q, T_q, _ = q.shape
    slot = torch.arange(view.length_bound, device=q.device)
    keys = (slot // page * group.size() + group.rank()) * page + slot % page
    lengths = all_gather(view.of_batch(view.lengths), group).sum(0)
    left, right = checks.check_window(options.get("window"))
    own = {name: options[name] for name in _BIASES if name in options}
    places = Options(
        query_offsets=lengths - T_q,
        causal=options.get("causal", True),
        left=left,
        right=right,
        keep_first=options.get("keep_first", 0),
        stride=options.get("stride"),
        **own,
    )
    # This rank's positions.
    T = view.length_bound * group.size() + page * group.size()
    seen = visible(places, B, H_q, T_q, T, q.device)
    masks = {}
    if seen is not None:
        seen = seen.index_select(-1, keys)
        mask = options.get("attn_mask")
        masks["attn_mask"] = seen if mask is None else seen & mask[..., : len(keys)]
    biases = [options["attn_bias"][..., : len(keys)]] if "attn_bias" in options else []
    if places.biases:
        biases.append(added_scores(q, T, places).bias(places).index_select(-1, keys))
    if biases:
        masks["attn_bias"] = reduce(torch.add, map(wide, biases))
    return masks
