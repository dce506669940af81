"""Latent and sparse layers written out, in the way of `naive_layers`."""

import math
from typing import Any

import torch
from naive_layers import gated_output, heads_of, rotated, turned_heads, visible_pairs
from torch import Tensor

from fastattn import moba_attention, native_sparse_attention


def naive_latent(layer: Any, x: Tensor, turned: Tensor | None = None, **masks: Any) -> Tensor:
    """`MultiheadLatentAttention`, head by head; turned: of `turns`, masks: of `visible_pairs`."""
    w, H, P, V = dict(layer.named_parameters()), layer.num_heads, layer.nope_dim, layer.v_head_dim
    q = (
        _down(w, x, "q_a_proj", "q_a_layernorm") @ w["q_b_proj.weight"].mT
        if ("q_b_proj.weight" in w)
        else x @ w["q_proj.weight"].mT
    )
    kv = _down(w, x, "kv_a_proj_with_mqa")
    c, k_rope = kv[..., : layer.kv_latent_dim], kv[:, :, None, layer.kv_latent_dim :]
    c = _norm(c, w["kv_a_layernorm.weight"])
    heads = q.unflatten(2, (H, -1))
    seen, outputs = visible_pairs(layer, x, **masks)[:, 0], []
    if turned is not None:
        k_rope = rotated(k_rope, turned, layer.rotary)
        heads = torch.cat((heads[..., :P], rotated(heads[..., P:], turned, layer.rotary)), -1)
    for h in range(H):
        rows = w["kv_b_proj.weight"][h * (P + V) : (h + 1) * (P + V)]
        s = heads[:, :, h, :P] @ (c @ rows[:P].mT).mT
        s = (s + heads[:, :, h, P:] @ k_rope[:, :, 0].mT) * layer.scale
        if layer.softcap is not None:
            s = layer.softcap * (s / layer.softcap).tanh()
        s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
        if layer.sinks is not None:
            s = torch.cat((s, layer.sinks[h].expand(*s.shape[:2], 1)), -1)
        weights = s.softmax(-1)[..., : x.shape[1]].masked_fill(~seen, 0)
        outputs.append(weights @ (c @ rows[P:].mT))
    return _linear(w, torch.cat(outputs, -1), "o_proj")


def naive_scale(layer: Any, options: Any) -> float:
    """The factor on a latent layer's scores, of the options that it was made with."""
    factor = getattr(options.get("rotary_scaling"), "factor", 1.0)
    longer = 0.1 * options.get("mscale", 0.0) * math.log(factor) + 1
    usual = longer * longer / math.sqrt(layer.nope_dim + layer.rope_dim)
    return float(options.get("scale", usual))


def _linear(w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].mT
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _down(w: dict[str, Tensor], x: Tensor, name: str, norm: str = "") -> Tensor:
    y = _linear(w, x, name)
    return _norm(y, w[f"{norm}.weight"]) if norm else y


def naive_sparse(
    layer: Any, x: Tensor, positions: Tensor | None = None, turned: Tensor | None = None
) -> Tensor:
    """A layer that selects blocks: what it projects, through the function, which others judge."""
    q, k, v = heads_of(layer, x, x)
    if layer.rotary is not None:
        q, k = turned_heads(layer, q, k, positions, turned)
    G = layer.num_heads // layer.num_kv_heads
    q, k, v = q.transpose(1, 2), k[:, :, ::G].transpose(1, 2), v[:, :, ::G].transpose(1, 2)
    how: dict[str, Any] = {"scale": layer.scale, "backend": "torch"}
    if not hasattr(layer, "pool"):
        out = moba_attention(q, k, v, block_k=layer.block_k, n=layer.n, **how)
        return gated_output(layer, x, out.transpose(1, 2))
    rows = (x @ layer.gate_proj.weight.mT + layer.gate_proj.bias).unflatten(2, (-1, 3))
    gates = (1 / (1 + (-rows).exp())).transpose(1, 2)
    length, step = layer.pool
    pooled = []
    for name, y in (("k", k), ("v", v)):
        weight, places = getattr(layer, f"{name}_pool").weight, getattr(layer, f"{name}_places")
        starts = range(0, y.shape[2] - length + 1, step)
        parts = [(y[:, :, i : i + length] + places).flatten(-2) @ weight.mT for i in starts]
        pooled.append(torch.stack(parts, 2) if parts else y[:, :, :0])
    how |= {"pool": layer.pool, **layer.how}
    out = native_sparse_attention(q, k, v, pooled[0], pooled[1], gates, **how)
    return gated_output(layer, x, out.transpose(1, 2))
