"""Forward-mode AD of attention: the formula, in chunks of queries.

torch's fused kernels have no forward-mode derivative; the formula's operations do, at every level
of torch.func's transforms. Chunks bound memory, unless a graph is recorded, which holds all scores.
"""

import torch
from torch import Tensor

from .. import tracing
from ..options import LEARNED, Options
from . import formula
from .query_chunks import chunks

# Scores in memory at once: 256 MiB in fp32, 512 with tangents.
_SCORES = 2**26


def carried(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Name of the first of mod_tensors, q, k, v and the learned options with a tangent, or None."""
    if not tracing.in_forward_mode():
        return None
    named = [
        *(("mod_tensors", x) for x in options.mod_tensors),
        *zip(("q", "k", "v", *LEARNED), (q, k, v, *options.differentiable), strict=True),
    ]
    return next((name for name, x in named if x is not None and tracing.has_tangent(x)), None)


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = False, first_row: int = 0
) -> Tensor | tuple[Tensor, Tensor]:
    """`formula.attention` with tangents of o and lse."""
    if options.cu_seqlens_q is not None:
        return formula.each_sequence(attention, q, k, v, options, return_lse)
    B, H_q, T_q, _ = q.shape
    outputs, lses = [], []
    for rows, own in chunks(options, T_q, B * H_q * k.shape[2], _SCORES):
        o, lse = formula.attention(
            q[:, :, rows], k, v, own,
            return_lse=True, first_row=first_row, first_query=rows.start,
        )  # fmt: skip
        outputs.append(o)
        lses.append(lse if options.fp32_results else lse.float())
    o = torch.cat(outputs, 2)
    return (o, torch.cat(lses, 2)) if return_lse else o
