"""A naive `GQAttention`, layers to compare it on, and a plain layer to vary."""

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastattn.models.positions import RelativeScalar, RelativeTransformerXL
from fastattn.modules.cross_attention import CrossGQAttention
from fastattn.modules.layer import AttentionLayer
from fastattn.modules.self_attention import CausalGQAttention, GQAttention
from fastattn.rotary_scaling import RotaryScaling
from fastattn.testing.orders import worst_naive

WIDTH = 32
_Layer = TypeVar("_Layer", bound=AttentionLayer)


def make_layer(
    device: torch.device | str = "cpu",
    backend: str = "torch",
    kind: Callable[..., _Layer] = CausalGQAttention,  # type: ignore[assignment]
    **kwargs: Any,
) -> _Layer:
    """A layer of width WIDTH with fixed random parameters, none of them left at 0 or 1."""
    torch.manual_seed(0)
    layer = kind(WIDTH, backend=backend, device=device, **kwargs)
    for name, parameter in layer.named_parameters():
        if "proj" not in name or name.startswith("relative."):
            torch.nn.init.normal_(parameter)
    return layer.to(device)


def naive_layer(
    layer: GQAttention,
    x: Tensor,
    positions: Tensor | None = None,
    turned: Tensor | None = None,
    **masks: Tensor | None,
) -> Tensor:
    """`layer(x, ...)` computed naively: no fusion, no shared heads, no cache.

    Every step runs in the dtype of the layer's parameters, but rotary embedding in fp64.
    Dropout is left out. Arguments and result are those of `GQAttention.forward`.

    Args:
        turned: from `turns`, in place of positions. masks: of `visible_pairs`.
    """
    q, k, v = heads_of(layer, x, x)
    if layer.rotary is not None:
        q, k = turned_heads(layer, q, k, positions, turned)
    return _attended(layer, x, q, k, v, visible_pairs(layer, x, **masks))


def turned_heads(
    layer: Any, q: Tensor, k: Tensor, positions: Tensor | None, turned: Tensor | None
) -> list[Tensor]:
    """q and k [B, T, H, D] rotated to positions, or by `turns`."""
    if turned is None:
        places = torch.arange(q.shape[1], device=q.device) if positions is None else positions
        turned = turns(places, layer.rotary_dim, layer.rotary_base)
    return [rotated(heads, turned, layer.rotary) for heads in (q, k)]


def visible_pairs(
    layer: Any,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """The pairs of tokens of x [B, T, C] that see each other, bool [B, 1, T, T]."""
    B, T, _ = x.shape
    step = torch.arange(T, device=x.device)
    i, j = step[:, None], step
    behind = j <= i if layer.causal else torch.ones_like(j <= i)
    if prefix_lengths is not None:
        behind = behind | (j < torch.as_tensor(prefix_lengths).view(-1, 1, 1, 1))
    visible = (_near(layer, i, j) & behind).expand(B, 1, T, T)
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]
        visible = visible & (same & (documents >= 0)[:, None, :])[:, None]
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    if key_lengths is not None:
        visible = visible & (j < key_lengths[:, None, None, None])
    return visible


def naive_cross(layer: CrossGQAttention, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
    """A cross-attention in the way of `naive_layer`; seen: bool [B, S]."""
    q, k, v = heads_of(layer, x, memory)
    return _attended(layer, x, q, k, v, seen[:, None, None])


def heads_of(layer: AttentionLayer, x: Tensor, memory: Tensor) -> list[Tensor]:
    """q, k, v [B, T, H_q, D], normalised, with key/value heads repeated."""
    H_q, H_k = layer.num_heads, layer.num_kv_heads
    split = []
    for name, part, heads in (("q", x, H_q), ("k", memory, H_k), ("v", memory, H_k)):
        proj = getattr(layer, f"{name}_proj")
        y = rearrange(F.linear(part, proj.weight, proj.bias), "b t (h d) -> b t h d", h=heads)
        if layer.qk_norm and name != "v":
            weight = getattr(layer, f"{name}_norm").weight
            y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        if layer.scoring == "multiplicative" and name == "q":
            y = torch.einsum("hde,bihe->bihd", layer.score_weight, y)
        split.append(repeat(y, "b t h d -> b t (h group) d", group=H_q // heads))
    return split


def _near(layer: Any, i: Tensor, j: Tensor) -> Tensor:
    """The pairs that window, stride and first keys leave, bool [T, T]."""
    window, stride = layer.window, getattr(layer, "stride", None)
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (None, None)
    near = torch.ones_like(i == j)
    if left is not None:
        near = near & (i - j <= left)
    if right is not None and (not layer.causal or not isinstance(window, int)):
        near = near & (j - i <= right)
    if stride is not None:
        on_stride = (i - j) % stride == 0
        near = on_stride if window is None else near | on_stride
    return near | (j < getattr(layer, "keep_first", 0))


def _attended(
    layer: AttentionLayer, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """softmax(scores) v over the visible keys, through gates and the output projection."""
    scores, relative = _scores(layer, q, k), getattr(layer, "relative", None)
    # min, not -inf: a row without visible keys gets uniform weights, then zeros, and no NaN.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if layer.sinks is not None:
        sinks = layer.sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]].masked_fill(~visible, 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    if relative is not None and relative.has_values:
        vectors = _by_pair(relative, relative.values(), q.shape[1])
        out = out + torch.einsum("bhij,hijd->bihd", weights, vectors.expand(q.shape[2], -1, -1, -1))
    return gated_output(layer, x, out)


def gated_output(layer: AttentionLayer, x: Tensor, out: Tensor) -> Tensor:
    """[B, T, H_q, D_v] through gates and the output projection."""
    if layer.output_gate is not None:
        proj, H_q = layer.output_gate_proj, layer.num_heads
        weight = rearrange(proj.weight, "(h gate) c -> h gate c", h=H_q)
        gates = torch.einsum("btc,hgc->bthg", x, weight)
        if proj.bias is not None:
            gates = gates + rearrange(proj.bias, "(h gate) -> h gate", h=H_q)
        out = out / (1 + (-gates).exp())
    return layer.out_proj(rearrange(out, "b t h d -> b t (h d)"))


def _scores(layer: AttentionLayer, q: Tensor, k: Tensor) -> Tensor:
    """Scores [B, H_q, T_q, T_k] of any scoring, with all terms by position."""
    if layer.scoring == "additive":
        sums = (q[:, :, None] + k[:, None]).tanh()
        scores = torch.einsum("hd,bijhd->bhij", layer.score_vector, sums)
    else:
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scheme, T = getattr(layer, "relative", None), q.shape[1]
    if scheme is not None and scheme.has_keys:
        vectors = _by_pair(scheme, scheme.keys(), T)
        vectors = vectors.repeat_interleave(q.shape[2] // len(vectors), dim=0)
        scores = scores + torch.einsum("bihd,hijd->bhij", q, vectors)
        if isinstance(scheme, RelativeTransformerXL):
            scores = scores + torch.einsum("hd,bjhd->bhj", scheme.u, k)[:, :, None]
            scores = scores + torch.einsum("hd,hijd->hij", scheme.v, vectors)
    if layer.scoring == "scaled_dot":
        scores = scores * (q.shape[-1] ** -0.5 if layer.scale is None else layer.scale)
    return _modified_scores(layer, scores)


def _by_pair(scheme: Any, vectors: Tensor, T: int) -> Tensor:
    """Vectors [H, 2R + 1, D] of distances for each pair of tokens, [H, T, T, D]."""
    step, R = torch.arange(T, device=vectors.device), vectors.shape[1] // 2
    return vectors[:, (step[:, None] - step).clamp(-R, R) + R]


def _modified_scores(layer: AttentionLayer, scores: Tensor) -> Tensor:
    """Scores [B, H_q, T, T] with the layer's softcap, ALiBi and relative bias."""
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    if not isinstance(layer, GQAttention):
        return scores
    T = scores.shape[-1]
    if isinstance(layer.relative, RelativeScalar):
        scores = scores + _by_pair(layer.relative, layer.relative.bias[..., None], T)[..., 0]
    step = torch.arange(T, device=scores.device)
    distance = step[:, None] - step
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    table = layer.relative_bias
    if table is not None:
        last, each = layer.relative_max_distance, len(table) // (1 if layer.causal else 2)
        buckets = [
            _bucket(max(0, d) if layer.causal else abs(d), each, last)
            + each * (d < 0 and not layer.causal)
            for d in distance.flatten().tolist()
        ]
        bias = table[torch.tensor(buckets, device=table.device)].view(T, T, -1)
        scores = scores + bias.permute(2, 0, 1)
    return scores


def _bucket(distance: int, buckets: int, last: int) -> int:
    """The T5 bucket of a distance: the last that starts at or before it."""
    exact = buckets // 2
    starts = [
        *range(exact),
        *(exact * (last / exact) ** (n / (buckets - exact)) for n in range(buckets - exact)),
    ]
    return sum(start <= distance for start in starts) - 1


def turns(
    positions: Tensor, rotary_dim: int, base: float, scaling: RotaryScaling | None = None
) -> Tensor:
    """e^(i angle) of every pair and position, fp32 as in tables: complex [..., T, pairs]."""
    pairs = rotary_dim // 2
    index = torch.arange(pairs, device=positions.device, dtype=torch.float64)
    rate, length = base ** (-index / pairs), 1.0
    if scaling is not None:
        rate, length = scaling.frequencies(rotary_dim, base, positions.device), scaling.amplitude
    angle = positions.double()[..., None] * rate
    return torch.polar(torch.full_like(angle, length), angle).to(torch.complex64)


def rotated(x: Tensor, turned: Tensor, style: str | None) -> Tensor:
    """Rotary embedding of x [B, T, H, D]: each channel pair turned, in fp64."""
    pairs = turned.shape[-1]
    rotary, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
    halves = style == "half"
    shape = (*x.shape[:-1], *((2, pairs) if halves else (pairs, 2)))
    by_pair = rotary.reshape(shape).mT if halves else rotary.reshape(shape)
    (a, b), (cos, sin) = by_pair.unbind(-1), (turned.real, turned.imag)
    cos, sin = cos[..., None, :], sin[..., None, :]
    real = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat(((real.mT if halves else real).flatten(-2).to(x.dtype), rest), dim=-1)


def exact_and_naive(
    layer: AttentionLayer,
    *inputs: Tensor,
    naive: Callable[..., Tensor] = naive_layer,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The naive layer in fp64, and in the layer's own dtype, on the same values."""
    with torch.no_grad():
        wide = [x.double() for x in inputs]
        exact = naive(copy.deepcopy(layer).double(), *wide, **kwargs)
        return exact, worst_naive(exact, lambda: naive(layer, *inputs, **kwargs))


def assert_checkpointing_changes_nothing(layer: nn.Module, x: Tensor) -> None:
    """Activation checkpointing recomputes the same gradients, bit for bit, dropout included."""

    def recomputing(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)

    grads = []
    forwards: tuple[Callable[[Tensor], Any], ...] = (layer, recomputing)
    for run in forwards:
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]))
    for direct, recomputed in zip(*grads, strict=True):
        assert torch.equal(direct, recomputed)


class Block(nn.Module):
    """Attention of width WIDTH and 4 heads whose scores, weights and output a subclass may change.

    `attributes` are set on it.
    """

    def __init__(self, causal: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.num_heads, self.causal = 4, causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def weights(self, weights: Tensor) -> Tensor:
        return weights

    def output(self, out: Tensor) -> Tensor:
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (part h d) -> part b h t d", part=3, h=self.num_heads)
        scores = self.scores(q @ k.mT / math.sqrt(q.shape[-1]))
        if self.causal:
            T = x.shape[1]
            unseen = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(unseen, float("-inf"))
        return self.output(
            self.proj(rearrange(self.weights(scores.softmax(-1)) @ v, "b h t d -> b t (h d)"))
        )
