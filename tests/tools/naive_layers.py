"""A naive `CausalGQAttention`, layers to compare it on, and a plain layer to vary."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastattn.modules.self_attention import CausalGQAttention
from fastattn.testing.budget import assert_within_budget
from fastattn.testing.orders import worst_naive

WIDTH = 32

# Constructor arguments beside the width; each case takes another path through the layer.
LAYER_CASES: dict[str, dict[str, Any]] = {
    "mha": {"num_heads": 4},
    "gqa-bias": {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "out_bias": True},
    "mqa-window": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "window": 4},
    "wide-values-rotary": {"num_heads": 2, "num_kv_heads": 1, "v_head_dim": 24, "rotary": "half"},
    "narrow-values-bias": {"num_heads": 4, "num_kv_heads": 2, "v_head_dim": 4, "qkv_bias": True},
    "rotary-half": {"num_heads": 2, "rotary": "half", "rotary_base": 100.0},
    "rotary-interleaved-partial-gqa-window-scale": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "qkv_bias": True,
        "window": 5,
        "rotary": "interleaved",
        "rotary_dim": 6,
        "scale": 0.5,
    },
    "first-softcap-gqa": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "window": 3,
        "keep_first": 2,
        "softcap": 1.5,
    },
    "alibi-sinks": {"num_heads": 3, "head_dim": 16, "alibi": True, "sinks": True},
    "norm-rotary-buckets": {
        "num_heads": 2,
        "qk_norm": True,
        "rotary": "half",
        "relative_bias": 6,
        "relative_max_distance": 10,
    },
}

# Few and small: without a GPU these run in Triton's interpreter.
TRITON_LAYER_CASES: dict[str, dict[str, Any]] = {
    "mqa-rotary": {"num_heads": 2, "num_kv_heads": 1, "rotary": "half"},
    "narrow-values": {"num_heads": 2, "num_kv_heads": 1, "v_head_dim": 8, "rotary": "half"},
    "mha-window": {"num_heads": 2, "window": 4, "qkv_bias": True},
    "mqa-all-scores": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "window": 3,
        "keep_first": 1,
        "qk_norm": True,
        "alibi": True,
        "relative_bias": 6,
        "relative_max_distance": 10,
        "softcap": 2.0,
        "sinks": True,
    },
}


def make_layer(
    device: torch.device | str = "cpu", backend: str = "torch", **kwargs: Any
) -> CausalGQAttention:
    """A layer of width WIDTH with fixed random parameters, none of them left at 0 or 1."""
    torch.manual_seed(0)
    layer = CausalGQAttention(WIDTH, backend=backend, device=device, **kwargs)
    norms = [layer.q_norm.weight, layer.k_norm.weight] if layer.qk_norm else []
    for parameter in (*norms, layer.sinks, layer.relative_bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return layer


def naive_layer(
    layer: CausalGQAttention,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    positions: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """`layer(x, ...)` computed naively: no fusion, no shared heads, no cache.

    Every step runs in the dtype of the layer's parameters, but rotary embedding in fp64.
    Dropout is left out. Arguments and result are those of `CausalGQAttention.forward`.
    """
    B, T, _ = x.shape
    H_q, H_k, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (
        rearrange(F.linear(x, proj.weight, proj.bias), "b t (h d) -> b t h d", h=heads)
        for heads, proj in zip((H_q, H_k, H_k), projections, strict=True)
    )
    step = torch.arange(T, device=x.device)
    if layer.qk_norm:
        q, k = (
            heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
            for heads, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if layer.rotary is not None:
        q, k = (
            _rotated(heads, step if positions is None else positions, layer) for heads in (q, k)
        )
    k, v = (repeat(x, "b t h d -> b t (h group) d", group=H_q // H_k) for x in (k, v))
    scale = D**-0.5 if layer.scale is None else layer.scale
    scores = _modified_scores(layer, torch.einsum("bihd,bjhd->bhij", q, k) * scale)

    i, j = step[:, None], step
    window = T if layer.window is None else layer.window
    assert isinstance(window, int), "the naive layer takes no pairs"
    near = (j > i - window) | (j < layer.keep_first)
    behind = j <= i
    if prefix_lengths is not None:
        behind = behind | (j < prefix_lengths[:, None, None, None])
    visible = (near & behind).expand(B, 1, T, T)
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]
        visible = visible & (same & (documents >= 0)[:, None, :])[:, None]
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    if key_lengths is not None:
        visible = visible & (j < key_lengths[:, None, None, None])
    # min, not -inf: a row without visible keys gets uniform weights, then zeros, and no NaN.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if layer.sinks is not None:
        sinks = layer.sinks.to(x.dtype)[:, None, None].expand(B, H_q, T, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :T].masked_fill(~visible, 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return layer.out_proj(rearrange(out, "b t h d -> b t (h d)"))


def _modified_scores(layer: CausalGQAttention, scores: Tensor) -> Tensor:
    """Scores [B, H_q, T, T] with the layer's softcap, ALiBi and relative bias."""
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    T = scores.shape[-1]
    step = torch.arange(T, device=scores.device)
    distance = step[:, None] - step
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    table = layer.relative_bias
    if table is not None:
        last = layer.relative_max_distance
        buckets = [_bucket(max(0, d), len(table), last) for d in distance.flatten().tolist()]
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


def _rotated(x: Tensor, positions: Tensor, layer: CausalGQAttention) -> Tensor:
    """Rotary embedding of x [B, T, H, D]: each channel pair as a complex number, in fp64."""
    pairs = layer.rotary_dim // 2
    rotary, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
    index = torch.arange(pairs, device=x.device, dtype=torch.float64)
    angle = positions.double()[..., None, None] * layer.rotary_base ** (-index / pairs)
    halves = layer.rotary == "half"
    shape = (*x.shape[:-1], *((2, pairs) if halves else (pairs, 2)))
    by_pair = rotary.reshape(shape).mT if halves else rotary.reshape(shape)
    product = torch.view_as_complex(by_pair.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    real = torch.view_as_real(product)
    return torch.cat(((real.mT if halves else real).flatten(-2).to(x.dtype), rest), dim=-1)


def exact_and_naive(
    layer: CausalGQAttention, x: Tensor, **kwargs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`naive_layer` in fp64, and in the layer's own dtype, on the same values."""
    with torch.no_grad():
        exact = naive_layer(copy.deepcopy(layer).double(), x.double(), **kwargs)
        return exact, worst_naive(exact, lambda: naive_layer(layer, x, **kwargs))


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


def assert_layer_equals_naive(layer: CausalGQAttention, x: Tensor, **kwargs: Tensor | None) -> None:
    """Check layer(x, **kwargs) and its gradients by x and every parameter by the error budget."""
    upstream = torch.randn_like(x)
    exact = copy.deepcopy(layer).double()

    def run(forward: Callable[..., Tensor], layer: CausalGQAttention, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = forward(x)
        wanted = [x, *layer.parameters()]
        return [y.detach(), *torch.autograd.grad(y, wanted, upstream.to(y.dtype))]

    got = run(lambda x: layer(x, **kwargs), layer, x)
    ref = run(lambda x: naive_layer(exact, x, **kwargs), exact, x.double())
    naive = worst_naive(ref, lambda: run(lambda x: naive_layer(layer, x, **kwargs), layer, x))
    names = ("output", "x.grad", *(f"{name}.grad" for name, _ in layer.named_parameters()))
    for name, *triple in zip(names, got, ref, naive, strict=True):
        assert_within_budget(name, *triple)


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
