"""Small blocks of attention as libraries write them, for tests of `fastattn.swap`."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

C, H = 32, 4
D = C // H


class Timm(nn.Module):
    """timm: torch's function or its own, by a flag."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused_attn = H, D, D**-0.5, fused
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            if attn_mask is not None:
                attn = attn + attn_mask
            x = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class MinGPT(nn.Module):
    """minGPT: one projection, a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head = H
        self.register_buffer("bias", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = (
            y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1)))


class Books(nn.Module):
    """Books and courses: scores are masked in place, and scaled after it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("W_query", "W_key", "W_value", "out_proj"):
            setattr(self, name, nn.Linear(C, C))
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(64, 64).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (H, -1)).transpose(1, 2)
            for p in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[: x.shape[1], : x.shape[1]], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Attend(nn.Module):
    """x-transformers: attention in a part of its own; flash or einsum, one head of keys.

    The library's own part also returns the weights of einsum, and is left for that.
    """

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash, self.scale, self.causal = flash, D**-0.5, True
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k) * self.scale
        i, j = sim.shape[-2:]
        hidden = torch.ones((i, j), dtype=torch.bool, device=q.device).triu(j - i + 1)
        sim = sim.masked_fill(hidden, -torch.finfo(sim.dtype).max)
        attn = self.attn_drop(F.softmax(sim, dim=-1, dtype=torch.float32).type(sim.dtype))
        return torch.einsum("b h i j, b j d -> b h i d", attn, v)


class XTransformers(nn.Module):
    def __init__(self, flash: bool = False) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(C, C, bias=False), nn.Linear(C, 2 * D, bias=False)
        self.attend, self.to_out = Attend(flash), nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.to_q(x), "b n (h d) -> b h n d", h=H)
        out = self.attend(q, *self.to_kv(x).chunk(2, dim=-1))
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class Sam(nn.Module):
    """Segment Anything: relative positions of both axes added in two views, heads in the batch."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.qkv, self.proj, self.size, self.scale = nn.Linear(C, 3 * C), nn.Linear(C, C), size, 0.3
        self.rel_pos_h = nn.Parameter(torch.randn(2 * size - 1, D))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * size - 1, D))

    def forward(self, x: Tensor) -> Tensor:
        B, size = x.shape[0], self.size
        qkv = self.qkv(x).reshape(B, size * size, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * H, size * size, -1).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        steps = torch.arange(size, device=x.device)
        distances = steps[:, None] - steps + size - 1
        r_q = q.reshape(B * H, size, size, -1)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, self.rel_pos_h[distances])
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, self.rel_pos_w[distances])
        attn = attn.view(B * H, size, size, size, size) + rel_h[..., :, None]
        rel_w = rel_w[..., None, :].unflatten(0, (B, H))
        attn = attn.view(B, H, size, size, size, size) + rel_w
        x = attn.view(B * H, size * size, size * size).softmax(dim=-1) @ v
        return self.proj(x.view(B, H, size * size, -1).permute(0, 2, 1, 3).reshape(B, -1, C))


class Swin(nn.Module):
    """Swin v2: cosine attention with a learned scale of each head, positions by a small network.

    Windows are in the batch, each with a mask of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.logit_scale = nn.Parameter(torch.full((H, 1, 1), 2.0))
        self.cpb_mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(inplace=True), nn.Linear(8, H))
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (s h d) -> s b h t d", s=3, h=H)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        (B, T, _), steps = x.shape, torch.arange(x.shape[1], device=x.device)
        distances = (steps[:, None] - steps).to(x.dtype)
        attn = attn + 16 * torch.sigmoid(self.cpb_mlp(distances[..., None])).permute(2, 0, 1)
        windows = steps.new_zeros(B, T)
        windows[:, 2:] = torch.arange(B, device=x.device)[:, None]
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        mask = mask.to(x.dtype).masked_fill(mask != 0, -100.0)
        attn = (attn.view(1, B, -1, T, T) + mask.unsqueeze(1).unsqueeze(0)).view(-1, H, T, T)
        out = self.softmax(attn) @ v
        return self.proj(out.transpose(1, 2).reshape(*x.shape))


def sdpa_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, p, is_causal=mask is None)


class TorchTune(nn.Module):
    """torchtune: a function on the object, grouped heads expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(C, width, bias=False) for width in (C, C // 2, C // 2, C)
        )
        self.attn_dropout, self.attention_call = 0.0, sdpa_call

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, D)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        p = self.attn_dropout if self.training else 0.0
        return self.output_proj(self.attention_call(q, k, v, mask, p).transpose(1, 2).flatten(2))


class Processor:
    """diffusers: what computes attention is no module, and can be exchanged."""

    def __call__(self, attn: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for p in (attn.to_q, attn.to_k, attn.to_v)
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=attn.scale)
        return attn.to_out[1](attn.to_out[0](o.transpose(1, 2).flatten(2)))


class Diffusers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(C, C), nn.Dropout(0.0)])
        self.heads, self.scale, self.processor = H, D**-0.5, Processor()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.processor(self, x, **kwargs)


class Mixer(nn.Module):
    """A name that says nothing of attention; heads in the batch, scores by baddbmm, a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.slope = nn.Linear(C, 3 * C), nn.Linear(C, C), 0.1
        self.window, self.prefix = 3, 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.a(x), "b t (s h d) -> s (b h) t d", s=3, h=H)
        steps = torch.arange(x.shape[1], device=x.device)
        distances = (steps[:, None] - steps).abs()
        bias = (-self.slope * distances).to(q.dtype).expand(len(q), -1, -1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
        seen = (distances < self.window) | (steps < self.prefix)
        seen[0] = True
        out = mixed(torch.where(seen, scores, -torch.inf), v)
        return self.b(rearrange(out, "(b h) t d -> b t (h d)", h=H))


def mixed(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "timm": Timm,
    "timm-eager": lambda: Timm(fused=False),
    "mingpt": MinGPT,
    "books": Books,
    "x-transformers": XTransformers,
    "x-transformers-flash": lambda: XTransformers(flash=True),
    "sam": Sam,
    "swin-v2": Swin,
    "torchtune": TorchTune,
    "diffusers": Diffusers,
    "mixer": Mixer,
}
# Where the block takes this number of tokens alone.
LENGTHS = {"sam": 9}


@torch.no_grad()
def _no_grad_mask(m: Tensor) -> Tensor:
    return torch.ones_like(m).triu(1)


def _sunk(s: Tensor, v: Tensor, first: bool) -> Tensor:
    z = v.mean((0, 2, 3)).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
    s = torch.cat([z, s], -1) * 0.5 if first else torch.cat([s, z], -1)
    weights = (s - s.amax(-1, keepdim=True)).softmax(-1)
    return (weights[..., 1:] if first else weights[:, :, :, :-1]) @ v


def _in_one_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (B, H, T, _), (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
    s = q.new_zeros(1, 1, T).repeat(B * H, 1, 1).baddbmm(batch1=q, batch2=k.mT)
    s = s.view(B, H, T, T).softmax(-1).type_as(s).view(B * H, T, T)
    return torch.bmm(s, v).unflatten(0, (B, H))


def _out_of_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        s = q @ k.mT
    return s.softmax(-1) @ v


def _viewed(out: Tensor) -> Tensor:
    return out.view(-1).view(out.shape)


def _by_name(s: Tensor) -> Tensor:
    return torch.nan_to_num(input=s.softmax(dim=-1)).permute(dims=(0, 1, 2, 3))


def _rows(m: Tensor) -> Tensor:
    return m.to(torch.bool).view(1, 1, *m.shape).expand(1, 2, -1, -1).reshape(2, *m.shape)[:1]


def _billion(s: Tensor) -> Tensor:
    return s.new_full(size=(), fill_value=1e9, dtype=torch.float64).to(dtype=s.dtype)


# Of q, k, v, their scores, and what is hidden, which is a whole row too.
FORMS: dict[str, Callable[..., Tensor]] = {
    "nan": lambda q, k, v, s, m: _viewed(_by_name(s.masked_fill(m, -math.inf)) @ v),
    "again": lambda q, k, v, s, m: (
        F.dropout(s.where(~_rows(m), -1e9).softmax(-1), 0.0, True).masked_fill(_rows(m), 0) @ v
    ),
    "less": lambda q, k, v, s, m: (s - m * _billion(s)).softmax(-1) @ v,
    "dots": lambda q, k, v, s, m: torch.einsum("...id,...jd->...ij", [q, k]).softmax(-1) @ v,
    "no-grad": lambda q, k, v, s, m: s.masked_fill(_no_grad_mask(m), -1e9).softmax(-1) @ v,
    "five": lambda q, k, v, s, m: ((q[:, None] @ k[:, None].mT - 1.0 * m).softmax(-1) @ v[:, None])[
        :, 0
    ],
    "two": lambda q, k, v, s, m: (v[0, 0].T @ (q[0, 0] @ k[0, 0].T).softmax(-1).t()).T.expand_as(v),
    "more-values": lambda q, k, v, s, m: (q[0] @ k[0].mT + 1.0 * m).softmax(-1) @ v,
    "sink": lambda q, k, v, s, m: _sunk(s, v, first=False),
    "sink-shared": lambda q, k, v, s, m: _sunk(q[:1] @ k[:1].mT, v, first=False),
    "sink-first": lambda q, k, v, s, m: _sunk(s, v, first=True),
    "one-batch": lambda q, k, v, s, m: _in_one_batch(q, k, v),
    "out-of-autocast": lambda q, k, v, s, m: _out_of_autocast(q, k, v),
}


class Formed(nn.Module):
    """The formula in one of these forms."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.form = nn.Linear(C, 3 * C), form

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        row = torch.arange(x.shape[1])[:, None]
        hidden = (row < row.T) | (row == 3)
        return self.form(q, k, v, q @ k.mT, hidden).transpose(1, 2).flatten(2)


@torch.compiler.allow_in_graph
def tanh(x: Tensor) -> Tensor:
    """A function of a library's own, which torch.compile takes whole."""
    return torch.tanh(x)


class SelfMade(nn.Module):
    """Attention of no known pattern: another function's softmax, returned weights, odd masks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (-0.3 if self.kind == "negative" else 0.3)
        if self.kind == "keys":
            scores = scores * torch.arange(1.0, x.shape[1] + 1)
        if self.kind == "lowered":
            scores = scores - scores.amax(-2, keepdim=True)
        if self.kind in ("softcap", "foreign"):
            scores = 2 * (torch.tanh if self.kind == "softcap" else tanh)(scores / 2)
        numbers = torch.ones(x.shape[1], x.shape[1]).triu(1)
        ahead = numbers > 0
        if self.kind in ("fill", "other-mask"):
            scores = scores.masked_fill(ahead, -1e4 if self.kind == "fill" else -math.inf)
        if self.kind == "asserts":
            assert [len(x[x.isfinite()])] == [x.isfinite().sum()]
        if self.kind == "whole":
            scores = (9 * scores).to(torch.int32).to(q.dtype)
        if self.kind == "other-dim":
            scores = scores.softmax(2)
        if self.kind.startswith("in-place"):
            bias = torch.arange(float(x.shape[1]))
            scores = scores + bias[:, None]
        if self.kind == "in-place":
            bias[1:].add_(1)
        if self.kind in ("turned", "shared"):
            weights = (q.flatten(0, 1) @ k.flatten(0, 1).mT).softmax(-1).view(scores.shape)
            if self.kind == "turned":
                return weights.transpose(0, 1) @ v.transpose(0, 1)
            return weights @ v[:, :1]
        with torch.set_grad_enabled(self.kind != "no-grad"):
            weights = scores.softmax(-1) if self.kind != "other-dim" else scores
        if self.kind == "gate":
            weights = weights * 0.5
        if self.kind == "blind":
            weights = weights.nan_to_num(nan=1.0)
        if self.kind == "other-mask":
            weights = weights.masked_fill(numbers <= 0, 0)
        if self.kind == "vector":
            return (x @ x[0, 0]).softmax(-1) @ x[0]
        if self.kind == "values":
            return weights @ v[0, 0, :, 0]
        if self.kind == "sorted":
            weights = weights.sort(-1)[0]
        if self.kind == "kept":
            self.weights = weights
        if self.kind == "in-place-late":
            bias[1:].add_(1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return out + weights.sum() if self.kind == "returned" else out
