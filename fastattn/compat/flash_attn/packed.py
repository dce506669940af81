"""Packed queries over a paged cache, and packed keys cut to the lengths in use."""

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...functional.paged import attention_paged
from ...position_tables import document_ids
from .kvcache import Cache, view_of

# Untyped, as the overloads take only a literal return_lse.
_attend: Any = attention_paged


def offsets_of(lengths: Tensor) -> Tensor:
    """Starts of packed sequences of these lengths [N], and their total, int32 [N + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def used_keys(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, used: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the first used[n] keys and values of each sequence n, with new offsets.

    Positions then count from the last used key, as in flash-attn. Waits for the device.
    """
    checks.check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], k)
    checks.check_input("seqused_k", used, "integer", "N", k, {"N": cu_seqlens_k.shape[0] - 1})
    lengths = torch.minimum(used.clamp(min=0), cu_seqlens_k.diff())
    ends = offsets_of(lengths)
    total = int(ends[-1])
    row = document_ids(ends, total)[0].long()
    index = torch.arange(total, device=k.device) - ends[row] + cu_seqlens_k[row]
    return k.index_select(0, index), v.index_select(0, index), ends


def attend_packed(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    *,
    lengths: Tensor,
    block_table: Tensor,
    **options: Any,
) -> Any:
    """Attend from packed queries to pages: o [total_q, H_q, D_v], or (o, lse [H_q, total_q])."""
    if options.pop("dropout", None):
        raise RuntimeError("dropout_p must be 0.0 with a block_table")
    N = cu_seqlens_q.shape[0] - 1
    with torch.no_grad():
        cache = Cache(k_pages, v_pages, lengths, None, None, block_table)
        return _attend(q, view_of(cache, N, 0), cu_seqlens_q, **options)
