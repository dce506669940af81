"""Gradients of attention to a part of the keys in torch; see `fastattn.functional.block`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import LAID_AS, Options
from . import formula, masks
from .query_chunks import parts

# Scores in memory at once: 256 MiB in fp32.
_SCORES = 2**26

# do, dlse, q, k, v, o and lse.
Results = Sequence[Any]
# Gradients of q, k, v and of fields of Options; delta.
Gradients = tuple[list[Tensor], Tensor]


def gradients(
    results: Results, options: Options, learned: Sequence[str], *, first_row: int = 0
) -> Gradients:
    """Gradients in fp32 or wider, with all scores in memory.

    Args:
        results: as in `fastattn.attention_block_backward`.
        options: checked, of this part.
        learned: names of given fields that need gradients.
        first_row: b of the first batch row; not 0 for a packed sequence.
    """
    if options.cu_seqlens_q is not None:
        return _each_sequence(results, options, learned)
    do, dlse, q, k, v, o, lse = results
    (B, H_q, T_q, D_v), (_, H_k, T_k, _) = do.shape, k.shape
    groups = (B, H_k, H_q // H_k, T_q)
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        leaves: dict[str, Any] = {name: _leaf(getattr(options, name)) for name in learned}
        wide_q, wide_k = _leaf(q), _leaf(k)
        x = formula.scores(wide_q, wide_k, options._replace(**leaves), first_row=first_row)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        weights = _weights(x, lse)
        do = do.to(x.dtype)
        delta = (do * o).sum(-1)
        delta = delta if dlse is None else delta - dlse
        grouped = do.reshape(*groups, D_v)
        used = formula.dropped(weights, options, first_row=first_row).reshape(*groups, T_k)
        dv = torch.einsum("bhgqk,bhgqd->bhkd", used, grouped)
        inputs = (wide_q, wide_k, *leaves.values())
        ds = _score_gradient(weights, do, v, delta, options, first_row)
        dq, dk, *rest = torch.autograd.grad(x, inputs, ds, allow_unused=True)
        by_name = dict(zip(learned, rest, strict=True))
        by_name |= formula.denominator_gradients(leaves, lse.to(x.dtype), delta)
    return [dq, dk, dv, *(by_name[name] for name in learned)], delta.float()


def _leaf(x: Tensor) -> Tensor:
    return formula.wide(x.detach(), None).requires_grad_()


def _each_sequence(results: Results, options: Options, learned: Sequence[str]) -> Gradients:
    do, dlse, q, k, v, o, lse = results
    fields = [getattr(options, name) for name in learned]
    totals = [torch.zeros_like(formula.wide(x, None)) for x in (q, k, v, *fields)]
    delta = torch.zeros_like(lse)
    for n, _, rows, keys, of_sequence in formula.sequences(options, q.shape[0], k.shape[0]):
        do_n, q_n, o_n, k_n, v_n = (
            formula.as_rows(x[part])
            for x, part in ((do, rows), (q, rows), (o, rows), (k, keys), (v, keys))
        )
        dlse_n = None if dlse is None else dlse[None, :, rows]
        own = (do_n, dlse_n, q_n, k_n, v_n, o_n, lse[None, :, rows])
        grads, delta_n = gradients(own, of_sequence, learned, first_row=n)
        delta[:, rows] = delta_n[0]
        for name, total, grad in zip(("q", "k", "v", *learned), totals, grads, strict=True):
            if grad.dim() == 4:
                part = rows if LAID_AS.get(name, name) == "q" else keys
                total[part] = grad[0].transpose(0, 1)
            else:
                total += grad
    return totals, delta


def mod_gradients(
    results: tuple[Tensor, ...], v: Tensor, options: Options, *, first_row: int = 0
) -> list[Tensor]:
    """Gradients of float mod_tensors, in fp32 or wider, summed in the order of the queries.

    Computed in chunks of queries.

    Args:
        results: do, q, lse and delta, [B, H_q, T_q, ...], and k; packed ones have a batch of one.
        v, options: of the call.
        first_row: b of the first batch row; not 0 for a packed sequence.
    """
    do, q, lse, delta, k = results
    wide = [_leaf(x) if x.is_floating_point() else x for x in options.mod_tensors]
    leaves = [x for x in wide if x.requires_grad]
    sums = [torch.zeros_like(x) for x in leaves]
    options = options._replace(mod_tensors=tuple(wide))
    for n, first, rows, keys, own in parts(q, k, options, _SCORES, first_row):
        k_own, v_own = k[:, :, keys], v[:, :, keys]
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            x = formula.scores(q[:, :, rows].detach(), k_own.detach(), own, first_row=n)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            weights, of_rows = _weights(x, lse[:, :, rows]), (do[:, :, rows], v_own)
            ds = _score_gradient(weights, *of_rows, delta[:, :, rows], own, n, first)
            grads = torch.autograd.grad(x, leaves, ds, allow_unused=True)
        for summed, grad in zip(sums, grads, strict=True):
            if grad is not None:
                summed += grad
    return sums


def _weights(x: Tensor, lse: Tensor) -> Tensor:
    return torch.where(x > float("-inf"), torch.exp(x - lse.unsqueeze(-1)), 0.0)


def _score_gradient(
    weights: Tensor, do: Tensor, v: Tensor, delta: Tensor, options: Options, first_row: int,
    first_query: int = 0,
) -> Tensor:  # fmt: skip
    """Gradient of scores [B, H_q, T_q, T_k] with these weights, 0 where masked."""
    (B, H_q, T_q, D_v), (_, H_k, T_k, _) = do.shape, v.shape
    v = formula.wide(v, masks.existing_keys(options, T_k, v.device))
    grouped = do.to(v.dtype).reshape(B, H_k, H_q // H_k, T_q, D_v)
    dw = torch.einsum("bhgqd,bhkd->bhgqk", grouped, v).reshape(weights.shape)
    dw = formula.dropped(dw, options, first_row=first_row, first_query=first_query)
    return weights * (dw - delta.unsqueeze(-1))
