"""Packed queries over a cache in plain torch: `decode` on rows with equally many new tokens."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from ..cache_view import CacheView
from ..options import Options, along
from . import decode

# Numbers of keys and values gathered at a time; a single row may exceed it.
_GATHERED = 2**23


def attend(
    q: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    out: Tensor | None,
    options: Options,
    *,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """o [total, H_q, D_v] (in out, if given), or o and lse.

    Waits for the device.
    """
    total, H_q, D = q.shape
    D_v = view.v.shape[3]
    o = q.new_zeros(total, H_q, D_v) if out is None else out.zero_()
    wide = options.fp32_results and q.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    lse = q.new_full((H_q, total), float("-inf"), dtype=dtype)
    offsets = cu_seqlens.tolist()
    rows = view.batch_index
    if rows is None:
        rows = torch.arange(view.batch_size, device=q.device)
    lengths = view.of_batch(view.lengths).clamp(min=0).tolist()
    width = view.k.shape[1] * (D + D_v)
    for batch in _together(offsets, lengths, width, options):
        first, n, R = offsets[batch[0]], offsets[batch[0] + 1] - offsets[batch[0]], len(batch)
        tokens: slice | Tensor = slice(first, first + n * R)
        index = torch.tensor(batch, device=q.device)
        if batch != list(range(batch[0], batch[0] + R)):
            tokens = cu_seqlens[index].long()[:, None] + torch.arange(n, device=q.device)
            tokens = tokens.flatten()
        of_batch = {lengths[b] for b in batch}
        own = view._replace(batch_index=rows[index], length_bound=max(of_batch))
        uniform = own.length_bound if len(of_batch) == 1 else None
        results = decode.attend(
            q[tokens].view(R, n, H_q, D).transpose(1, 2), own, None,
            _of_rows(options, index, tokens, n, own), uniform,
            return_lse=return_lse, first_row=batch[0],
        )  # fmt: skip
        if isinstance(results, tuple):
            results, lse[:, tokens] = results[0], results[1].transpose(0, 1).reshape(H_q, R * n)
        o[tokens] = results.transpose(1, 2).reshape(R * n, H_q, D_v)
    return (o, lse) if return_lse else o


def decode_rows(
    q: Tensor, view: CacheView, options: Options, *, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode.attend` over pages, of T_q tokens in every row; a group of rows copies its pages."""
    B, H_q, T_q, _ = q.shape
    offsets = torch.arange(0, (B + 1) * T_q, T_q, device=q.device)
    packed = q.transpose(1, 2).reshape(B * T_q, H_q, -1)
    results = attend(packed, view, offsets, None, options, return_lse=return_lse)
    o, lse = results if isinstance(results, tuple) else (results, None)
    o = o.view(B, T_q, H_q, -1).transpose(1, 2)
    return o if lse is None else (o, lse.view(H_q, B, T_q).transpose(0, 1))


def _together(
    offsets: list[int], lengths: list[int], width: int, options: Options
) -> Iterator[list[int]]:
    """Groups of batch rows with equally many new tokens and lengths within a factor of two, so that
    less than half of the gathered tokens are padding.

    width: numbers per token. With users' functions, which get row numbers, groups have one row.
    """
    alone = options.launched_anew
    counts = [last - first for first, last in pairwise(offsets)]
    order = sorted(range(len(counts)), key=lambda b: (counts[b], lengths[b]))
    for n, same in groupby(order, key=counts.__getitem__):
        if not n:
            continue
        batch: list[int] = []
        for b in same:
            wide = (len(batch) + 1) * lengths[b] * width > _GATHERED
            if batch and (alone or wide or lengths[b] > 2 * lengths[batch[0]] + 16):
                yield sorted(batch)
                batch = []
            batch.append(b)
        yield sorted(batch)


_BY_ROW = along("B")


def _of_rows(
    options: Options, batch: Tensor, tokens: slice | Tensor, n: int, view: CacheView
) -> Options:
    """Options of `decode_attention` for some rows, with the tree mask as an attn_mask."""
    tree, starts = options.tree_mask, options.tree_starts
    own: dict[str, Any] = {"tree_mask": None, "tree_starts": None}
    for name, behind in _BY_ROW.items():
        x = getattr(options, name)
        if x is not None and x.dim() > behind and name not in own:
            own[name] = x[batch] if x.shape[0] > 1 else x
    if tree is not None:
        if starts is None:
            shown = tree[tokens].view(len(batch), n, -1)
        else:
            flat = starts[batch].long()[:, None] + torch.arange(n * n, device=tree.device)
            shown = tree[flat.clamp(0, tree.shape[0] - 1)].view(-1, n, n)
        positions = torch.arange(view.length_bound, device=tree.device)
        new = positions - (view.of_batch(view.lengths)[:, None] - n)  # [R, positions]
        inside = new.clamp(0, shown.shape[2] - 1)[:, None].expand(-1, n, -1).long()
        old = (new < 0)[:, None]
        own["attn_mask"] = (old | shown.gather(2, inside))[:, None]
    return options._replace(**own)
