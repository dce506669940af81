"""`fastattn.swap` on blocks as litgpt, Llama's reference code, books and courses write them."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.rotary import rotary_tables
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

C, H, T = 32, 4, 7


class Books(nn.Module):
    """As books and courses write it: heads, a mask in a buffer, dropout of the weights."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.num_heads = names, H
        for name in names:
            setattr(self, name, nn.Linear(C, C))
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(16, 16).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        *inner, last = (getattr(self, name) for name in self.names)
        q, k, v = (p(x).unflatten(-1, (H, C // H)).transpose(1, 2) for p in inner)
        scores = q @ k.mT
        scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = self.dropout((scores / k.shape[-1] ** 0.5).softmax(-1))
        return last((weights @ v).transpose(1, 2).flatten(2))


class ConfiguredHeads(nn.Module):
    """As litgpt has it: heads and groups in a config, tables [1, T, D], more that may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=H, n_query_groups=2, head_size=C // H, n_layer=48)
        self.qkv = nn.Linear(C, 2 * C)
        self.proj = nn.Linear(C, C)
        self.kv_cache = self.norm_q = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None, input_pos: Any = None
    ) -> Tensor:
        D, groups = self.config.head_size, self.config.n_query_groups
        qkv = self.qkv(x).split((H * D, groups * D, groups * D), -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in qkv)
        assert cos.dim() == sin.dim() == 3
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        q, k = (
            y * cos + torch.cat((-y[..., D // 2 :], y[..., : D // 2]), -1) * sin for y in (q, k)
        )
        k, v = (y.repeat_interleave(H // groups, 1) for y in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.proj(o.transpose(1, 2).flatten(2))


class ByReference(nn.Module):
    """As the reference code of Llama turns queries and keys: `freqs_cis` complex, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.head_dim = H, C // H
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(C, C, bias=False))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, C // H)) for p in (self.wq, self.wk, self.wv))
        q, k = (self.turned(y, freqs_cis) for y in (q, k))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(o.transpose(1, 2).flatten(2))

    def turned(self, y: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).type_as(y)


COS, SIN = rotary_tables(T, C // H)
KNOWN: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "W_q": (Books(("W_q", "W_k", "W_v", "W_o")), ()),
    "W_query": (Books(("W_query", "W_key", "W_value", "out_proj")), ()),
    "config": (ConfiguredHeads(), (COS.repeat(1, 2)[None], SIN.repeat(1, 2)[None])),
    "wq": (ByReference(), (torch.complex(COS, SIN),)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_as_others_write_them(name):
    block, given = KNOWN[name]
    x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
    ref = copy.deepcopy(block).double()(x.double(), *given)
    naive = worst_naive(ref, lambda: block(x, *given))
    done = fastattn.swap(block)
    assert list(done.replaced[""].partition(",")[0].split()) == ["causal", "attention"]
    assert_within_budget("o", block(x, *given), ref, naive)
    assert (done.calls[""].served, done.calls[""].passed) == (1, 0)
