"""Statistics of attention weights as formulas on torch, for any dtype."""

import torch
from torch import Tensor

from .. import tracing
from ..options import Options
from . import formula
from .query_chunks import chunks

# Scores that are held at once: 256 MiB in fp32.
_SCORES = 2**26


def attention_statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, weight received, largest weights and their keys; in chunks of query rows."""
    B, H_q, T_q, _ = q.shape
    T_k = k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    received = torch.zeros(B, H_q, T_k, dtype=wide, device=q.device)
    entropies, largest, positions = [], [], []
    for rows, own in chunks(options, T_q, B * H_q * T_k, _SCORES):
        x, p, own_lse = _scored(q[:, :, rows], k, None if lse is None else lse[:, :, rows], own)
        entropy = _surprise(p, x, own_lse[..., None]).sum(-1)
        if options.sinks is not None:
            sink = options.sinks.to(wide)[:, None]
            entropy = entropy + _surprise((sink - own_lse).exp(), sink, own_lse)
        entropies.append(entropy)
        received += p.sum(-2)
        # Ordered by score, since small weights round to 0; a stable sort keeps the lowest position.
        order = x.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        seen = x.gather(-1, order) > float("-inf")
        missing = (0, top - order.shape[-1])
        found = torch.where(seen, p.gather(-1, order), 0.0)
        largest.append(torch.nn.functional.pad(found, missing))
        places = torch.where(seen, order, -1)
        positions.append(torch.nn.functional.pad(places, missing, value=-1))
    return torch.cat(entropies, 2), received, torch.cat(largest, 2), torch.cat(positions, 2)


def attention_weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    """All weights [B, H_q, T_q, T_k], in fp32 or wider."""
    return _scored(q, k, lse, options)[1]


def _scored(
    q: Tensor, k: Tensor, lse: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and lse in fp32 or wider."""
    if tracing.autocasting(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return _scored(q, k, lse, options)
    x = formula.scores(q, k, options)
    if lse is None:
        p, lse = formula.normalised(x, options.sinks)
    else:
        p = torch.exp(x - lse[..., None])
    # Keys that are not seen have none, in rows of NaN too.
    return x, torch.where(x == float("-inf"), 0.0, p), lse


def _surprise(p: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """-p ln p of weights p = exp(x - lse); 0 for p = 0."""
    return torch.where(p == 0, 0.0, p * (lse - x))
