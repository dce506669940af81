"""Options of attention over some of the queries, keys or heads of a sequence.

Options are keyword arguments of `fastattn.attention`. Key dims of tensors are the whole sequence;
query dims are this rank's tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import along
from ..score_checks import COUNTING, POSITIONS_BLOCK

Options = dict[str, Any]
Run = tuple[int, int]
Runs = tuple[Run, ...]
_HEADS = along("H_q")
_QUERIES = along("T_q")
_KEYS = along("T_k")
# documents are a pair of fields.
_DOCUMENTS = "documents"
# Most calls with single runs, preferred to one call with positions: two by two in a zigzag.
_MOST_CALLS = 4


class Pair(NamedTuple):
    """Runs of queries and keys: slices in memory, and positions in the sequence.

    by_positions: call with explicit positions; else one run of each, with an offset.
    """

    rows: slice
    keys: slice
    query: Runs
    key: Runs
    by_positions: bool = False


def pairs(q_runs: Sequence[Run], k_runs: Sequence[Run], options: Options) -> list[Pair]:
    """Calls for these queries and keys, without fully masked ones.

    A run of each is an ordinary call, served by any kernel. Many runs are one call with positions.
    """
    calls = []
    row = 0
    for query in q_runs:
        rows = slice(row, row + query[1] - query[0])
        column = 0
        for key in k_runs:
            keys = slice(column, column + key[1] - key[0])
            if may_see(query, key, options):
                calls.append(Pair(rows, keys, (query,), (key,)))
            column = keys.stop
        row = rows.stop
    together = len(calls) > _MOST_CALLS or any(name in options for name in COUNTING)
    if not calls or not together or not aligned(q_runs) or not aligned(k_runs):
        return calls
    return [Pair(slice(0, row), slice(0, column), tuple(q_runs), tuple(k_runs), True)]


def aligned(runs: Sequence[Run]) -> bool:
    """Whether concatenated runs are valid `positions` of `attention`."""
    lengths = (stop - start for start, stop in runs[:-1])
    return all(n % POSITIONS_BLOCK == 0 for n in lengths) and all(run[0] % 4 == 0 for run in runs)


def may_see(query: Run, key: Run, options: Options) -> bool:
    """False only if causal and window hide all keys of the run from all queries."""
    ahead = key[0] - (query[1] - 1)  # the last query's nearest key
    if options.get("causal") and options.get("prefix_lengths") is None and ahead > 0:
        return False
    window = options.get("window")
    if window is None or options.get("stride") is not None:
        return True
    left, right = (window - 1, 0) if isinstance(window, int) else window
    if key[0] < options.get("keep_first", 0):
        return True
    behind = query[0] - (key[1] - 1)
    return (left is None or behind <= left) and (right is None or ahead <= right)


def of_pair(options: Options, pair: Pair, device: torch.device) -> Options:
    """Options of `fastattn.attention` for the pair's queries and keys."""
    selected = dict(options)
    for name, behind in _QUERIES.items():
        if (x := selected.get(name)) is not None and x.shape[-1 - behind] > 1:
            selected[name] = x.narrow(
                -1 - behind, pair.rows.start, pair.rows.stop - pair.rows.start
            )
    for name, behind in _KEYS.items():
        if (x := selected.get(name)) is not None and x.shape[-1 - behind] > 1:
            selected[name] = _taken(x, -1 - behind, pair.key)
    if (ids := selected.get(_DOCUMENTS)) is not None:
        selected[_DOCUMENTS] = (_taken(ids, 1, pair.query), _taken(ids, 1, pair.key))
    start = pair.key[0][0]
    if pair.by_positions:
        selected["positions"] = (_positions(pair.query, device), _positions(pair.key, device))
        if (lengths := selected.get("key_lengths")) is not None and (start or len(pair.key) > 1):
            del selected["key_lengths"]
            exists = selected["positions"][1] < lengths[:, None]
            padding = selected.get("key_padding_mask")
            selected["key_padding_mask"] = exists if padding is None else exists & padding
        return selected
    selected["query_offset"] = pair.query[0][0] - start
    for name in ("key_lengths", "prefix_lengths", "keep_first"):
        if start and (x := selected.get(name)) is not None:
            x = x - start
            selected[name] = x.clamp(min=0) if isinstance(x, Tensor) else max(x, 0)
    return selected


def _taken(x: Tensor, dim: int, runs: Runs) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@lru_cache(maxsize=256)
def _positions(runs: Runs, device: torch.device) -> Tensor:
    """int32 [1, T]: positions of the runs' tokens in the sequence."""
    return torch.cat([torch.arange(*run, dtype=torch.int32, device="cpu") for run in runs])[
        None
    ].to(device)


def of_heads(options: Options, H_q: int, H_k: int, first: int, count: int) -> Options:
    """Options for `count` query heads from `first` on."""
    if count == H_q:
        return options
    selected = dict(options)
    before, total = options.get("heads") or (0, H_q)
    selected["heads"] = (before + first, total)
    keys = options.get("relative_keys")
    if keys is not None and len(keys) > 1:
        every = keys.repeat_interleave(H_q // len(keys), dim=0)
        selected["relative_keys"] = every[first : first + count]
    for name, behind in _HEADS.items():
        x = options.get(name)
        if x is not None and x.dim() > behind and x.shape[-1 - behind] == H_q:
            selected[name] = x.narrow(-1 - behind, first, count)
    return selected


def with_leaves(options: Options, names: Sequence[str]) -> tuple[Options, list[Tensor]]:
    """Options with new leaves for these tensors, and mod_tensors that learn, and the leaves."""
    leaves = {name: options[name].detach().requires_grad_() for name in names}
    mods = [x.detach().requires_grad_(x.requires_grad) for x in options.get("mod_tensors", ())]
    made = options | leaves | ({"mod_tensors": tuple(mods)} if mods else {})
    return made, [*leaves.values(), *(x for x in mods if x.requires_grad)]


def blank(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o and lse of queries without keys."""
    o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    return o, q.new_full(q.shape[:3], float("-inf"), dtype=wide)
