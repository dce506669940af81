"""The options of an attention over some of the queries, keys or heads of a sequence.

Options come as keyword arguments of `fastattn.attention`. Where tensors have a dim of the keys, it
counts the whole sequence; a dim of the queries counts the tokens that this rank holds.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import along

Options = dict[str, Any]
Run = tuple[int, int]
_HEADS = along("H_q")
_QUERIES = along("T_q")
_KEYS = along("T_k")
# Of the table of options, documents are a pair.
_DOCUMENTS = "documents"


class Pair(NamedTuple):
    """A run of queries and a run of keys: where they lie in memory, and where in the sequence."""

    rows: slice
    keys: slice
    query: Run
    key: Run


def pairs(q_runs: Sequence[Run], k_runs: Sequence[Run], options: Options) -> Iterator[Pair]:
    """Runs of queries with each run of keys that positions do not hide from all of them."""
    row = 0
    for query in q_runs:
        rows = slice(row, row + query[1] - query[0])
        column = 0
        for key in k_runs:
            keys = slice(column, column + key[1] - key[0])
            if may_see(query, key, options):
                yield Pair(rows, keys, query, key)
            column = keys.stop
        row = rows.stop


def may_see(query: Run, key: Run, options: Options) -> bool:
    """False only if causal and window hide the run of keys from every query of the run."""
    ahead = key[0] - (query[1] - 1)  # of the last query, the nearest key
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


def of_pair(options: Options, pair: Pair) -> Options:
    """The options of `fastattn.attention` for the pair's queries and keys alone."""
    start, stop = pair.key
    found = dict(options, query_offset=pair.query[0] - start)
    for name, behind in _QUERIES.items():
        if (x := found.get(name)) is not None and x.shape[-1 - behind] > 1:
            found[name] = x.narrow(-1 - behind, pair.rows.start, pair.rows.stop - pair.rows.start)
    for name, behind in _KEYS.items():
        if (x := found.get(name)) is not None and x.shape[-1 - behind] > 1:
            found[name] = x.narrow(-1 - behind, start, stop - start)
    if (ids := found.get(_DOCUMENTS)) is not None:
        found[_DOCUMENTS] = (ids[:, slice(*pair.query)], ids[:, start:stop])
    if start:
        for name in ("key_lengths", "prefix_lengths", "keep_first"):
            if (x := found.get(name)) is not None:
                found[name] = (
                    (x - start).clamp(min=0) if isinstance(x, Tensor) else max(x - start, 0)
                )
    return found


def of_heads(options: Options, H_q: int, H_k: int, first: int, count: int) -> Options:
    """The options for `count` query heads from `first` on."""
    if count == H_q:
        return options
    found = dict(options)
    keys = options.get("relative_keys")
    if keys is not None and len(keys) > 1:
        every = keys.repeat_interleave(H_q // len(keys), dim=0)
        found["relative_keys"] = every[first : first + count]
    for name, behind in _HEADS.items():
        x = options.get(name)
        if x is not None and x.dim() > behind and x.shape[-1 - behind] == H_q:
            found[name] = x.narrow(-1 - behind, first, count)
    return found


def with_leaves(options: Options, names: Sequence[str]) -> tuple[Options, list[Tensor]]:
    """The options with new leaves in place of some of their tensors, and the leaves."""
    leaves = {name: options[name].detach().requires_grad_() for name in names}
    return options | leaves, list(leaves.values())


def blank(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o and lse of queries that see no key."""
    o = torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype, device=q.device)
    return o, torch.full(q.shape[:3], float("-inf"), device=q.device)
