"""Packed queries over a cache in plain torch: row by row, as `decode` does one."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..cache_view import CacheView
from ..options import Options, along
from . import decode


def attend(
    q: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    out: Tensor | None,
    options: Options,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """o [total, H_q, D_v], which is out if that is given, and lse, empty unless asked for.

    Waits for the device.
    """
    total, H_q, _ = q.shape
    o = q.new_empty(total, H_q, view.v.shape[3]) if out is None else out
    lse = q.new_empty(H_q, total, dtype=torch.float32)
    offsets = cu_seqlens.tolist()
    rows = view.batch_index
    if rows is None:
        rows = torch.arange(view.batch_size, device=q.device)
    lengths = view.of_batch(view.lengths).clamp(min=0).tolist()
    for b, (first, last) in enumerate(pairwise(offsets)):
        if first == last:
            continue
        tokens = slice(first, last)
        own = view._replace(batch_index=rows[b : b + 1], length_bound=lengths[b])
        found = decode.attend(
            q[tokens].transpose(0, 1)[None], own, None,
            _of_row(options, b, first, last, lengths[b]), return_lse, None, first_row=b,
        )  # fmt: skip
        if isinstance(found, tuple):
            found, lse[:, tokens] = found[0], found[1][0]
        o[tokens] = found[0].transpose(0, 1)
    return o, lse


_BY_ROW = along("B")


def _of_row(options: Options, b: int, first: int, last: int, length: int) -> Options:
    """The options of `decode_attention` of one row, the tree mask as one of every position."""
    tree, starts = options.tree_mask, options.tree_starts
    own: dict[str, Any] = {"tree_mask": None, "tree_starts": None}
    for name, behind in _BY_ROW.items():
        x = getattr(options, name)
        if x is not None and x.dim() > behind and name not in own:
            own[name] = x[b : b + 1]
    if tree is not None:
        n = last - first
        begin = first if starts is None else int(starts[b])
        shown = tree[begin:last, :n] if starts is None else tree[begin:][: n * n].view(n, n)
        mask = torch.ones(n, max(length, n), dtype=torch.bool, device=tree.device)
        new = mask[:, mask.shape[1] - n :].fill_(False)
        new[:, : shown.shape[1]] = shown
        own["attn_mask"] = mask[None, None, :, mask.shape[1] - length :]
    return options._replace(**own)
