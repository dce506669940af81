"""Gradients of a part of an attention: some of its keys, and the o and lse of all of them.

Ring attention keeps the keys of a sequence on several devices. Its forward merges what the parts
give. Backward every part works by itself, as the weights exp(score - lse) need the lse of the whole
and the gradients of scores, weight * (do.v - do.o), the o of the whole: Liu et al., "Ring Attention
with Blockwise Transformers for Near-Infinite Context", 2023, arXiv 2310.01889.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dispatch
from ..ops import attend
from ..ops.call import contiguous
from ..ops.gradients import as_batch, as_packed
from ..options import Options
from ..torch_backend import formula
from .inputs import kernel_rows

PartGradients = tuple[Tensor, Tensor, Tensor, Tensor]


def part_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
    *,
    backend: str | None = None,
) -> PartGradients:
    """What this part of the keys adds to the gradients.

    Args:
        do, o: [B, H_q, T_q, D_v], or packed [total_q, H_q, D_v]: of the whole.
        q, k, v: as `fastattn.attention`'s or `attention_varlen`'s, k and v of this part.
        lse: fp32 [B, H_q, T_q], or packed [H_q, total_q]: of the whole, natural log.
        options: checked, of this part, without inputs that have gradients of their own; with
            dropout they have its seed.
        backend: as for `fastattn.attention`.

    Returns:
        dq, dk and dv in the shapes and dtypes of q, k and v; delta = do.o, fp32 as lse.
    """
    choice = dispatch.choose(q, k, v, options, backend, hopper=True)
    if choice.backend == "torch":
        if not q.is_cpu:
            dispatch.warn_if_slow(choice, q.device)
        if options.cu_seqlens_q is not None:
            return _each_sequence(do, q, k, v, o, lse, options)
        return _by_formula(do, q, k, v, o, lse, options)
    packed = options.cu_seqlens_q is not None
    rows = [kernel_rows(x) for x in (do, q, k, v, o)]
    if packed:
        rows, lse = [as_batch(x) for x in rows], lse[None]
    padded_do, padded_q, padded_k, padded_v, padded_o = rows
    kernels = attend.kernels_for(q, hopper=choice.backend == "hopper")
    dq, dk, dv, delta, _ = kernels.backward(
        padded_do, None, padded_q, padded_k, padded_v, padded_o, lse.contiguous(),
        contiguous(options),
    )  # fmt: skip
    if packed:
        dq, dk, dv, delta = as_packed(dq), as_packed(dk), as_packed(dv), delta[0]
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], delta


def _each_sequence(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: Options
) -> PartGradients:
    dq, dk, dv, delta = (torch.zeros_like(x) for x in (q, k, v, lse))
    for n, rows, keys, of_sequence in formula.sequences(options, q.shape[0], k.shape[0]):
        queries = [as_batch(x[rows]) for x in (do, q, o)]
        found = _by_formula(
            queries[0], queries[1], as_batch(k[keys]), as_batch(v[keys]), queries[2],
            lse[None, :, rows], of_sequence, first_row=n,
        )  # fmt: skip
        dq[rows], dk[keys], dv[keys] = (as_packed(x) for x in found[:3])
        delta[:, rows] = found[3][0]
    return dq, dk, dv, delta


def _by_formula(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: Options,
    *, first_row: int = 0,
) -> PartGradients:  # fmt: skip
    """`part_gradients` in torch, which holds all scores in memory."""
    (B, H_q, T_q, D_v), (_, H_k, T_k, _) = do.shape, k.shape
    groups = (B, H_k, H_q // H_k, T_q)
    with torch.enable_grad():
        inputs = (q.detach().requires_grad_(), k.detach().requires_grad_())
        x = formula.scores(*inputs, options, first_row=first_row)
    with torch.no_grad():
        weights = torch.where(x > float("-inf"), torch.exp(x - lse.unsqueeze(-1)), 0.0)
        do = do.to(x.dtype)
        delta = (do * o).sum(-1)
        grouped = do.reshape(*groups, D_v)
        used = formula.dropped(weights, options, first_row=first_row).reshape(*groups, T_k)
        dv = torch.einsum("bhgqk,bhgqd->bhkd", used, grouped).to(v.dtype)
        v = formula.wide(v, formula.existing_keys(options, T_k, q.device))
        dw = torch.einsum("bhgqd,bhkd->bhgqk", grouped, v).reshape(x.shape)
        dw = formula.dropped(dw, options, first_row=first_row)
        dq, dk = torch.autograd.grad(x, inputs, weights * (dw - delta.unsqueeze(-1)))
    return dq, dk, dv, delta.float()
