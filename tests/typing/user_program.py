"""A program as users write it, for type checkers. Where they must refuse a line it is ignored."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import fastattn
from fastattn import CausalGQAttention, KVCache, attention, attention_varlen, decode_attention
from fastattn.generation import Sampling, generate_tokens
from fastattn.models.gpt import GPT, GPTConfig

if TYPE_CHECKING:
    from typing_extensions import assert_type

Result = Tensor | tuple[Tensor, Tensor]


def functions(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> None:
    assert_type(attention(q, k, v, causal=True, window=(8, None), softcap=30.0), Tensor)
    assert_type(attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention_varlen(q, k, v, offsets, causal=True), Tensor)
    attention(q, k, v, windows=8)  # type: ignore
    attention(q, k, v, return_lse=1)  # type: ignore
    attention(q, k, v, causal="yes")  # type: ignore
    attention(q, k)  # type: ignore
    assert_type(fastattn.explain(q, k, v).backend, str)
    assert_type(fastattn.merge(q, k, v, q), tuple[Tensor, Tensor])
    assert_type(fastattn.attention_statistics(q, k, top=4).top_positions, Tensor)


def flagged(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cache: KVCache, lse: bool) -> None:
    assert_type(attention(q, k, v, return_lse=lse), Result)
    assert_type(attention_varlen(q, k, v, offsets, return_lse=lse), Result)
    assert_type(decode_attention(q, cache, return_lse=lse), Result)
    assert_type(fastattn.attention_paged(q, cache, offsets, return_lse=lse), Result)
    assert_type(fastattn.additive_attention(q, k, v, q, return_lse=lse), Result)
    assert_type(fastattn.selected_attention(q, k, v, offsets, return_lse=lse), Result)
    assert_type(fastattn.attention_fp8(q, k, v, return_lse=lse), Result)
    assert_type(fastattn.attention_varlen_fp8(q, k, v, offsets, return_lse=lse), Result)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = CausalGQAttention(64, num_heads=4, num_kv_heads=2, rotary="half", window=8)
        self.other = CausalGQAttention(64, heads=4)  # type: ignore
        CausalGQAttention(64, 4, nonsense=1)  # type: ignore
        CausalGQAttention(64, 4, rotary="haf")  # type: ignore
        self.theirs: nn.MultiheadAttention = fastattn.MultiheadAttention(64, num_heads=4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = KVCache(2, 2, max_length=64, head_dim=32, dtype=torch.bfloat16)
    cache.append(k, v)
    cache.append(k)  # type: ignore
    return decode_attention(q, cache)


def train(model: GPT, tokens: Tensor, given: Tensor | None) -> None:
    assert_type(model.forward(tokens, given), tuple[Tensor, Tensor | None])


def generate(prompt: list[int]) -> list[int]:
    model = GPT(GPTConfig(vocab_size=50, num_layers=2)).eval()
    for token in generate_tokens(model, prompt, 4, sampling=Sampling(top_p=0.9)):
        assert_type(token, int)
    with fastattn.patch_sdpa():
        return list(generate_tokens(model, prompt, 3))
