"""Every row of refusals.txt is refused by name, and the call that it changes is served."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls_of_flash_attn import offsets
from refusals import rows_of, served
from torch.nn.attention.flex_attention import create_block_mask
from transformers_models import heads, layer

import fastattn
from fastattn.compat import diffusers, flex_attention, llama, xformers
from fastattn.compat.flash_attn import passes, rotary, version_2, version_3, version_4
from fastattn.compat.flash_mla import flash_mla_with_kvcache
from fastattn.compat.transformers import attention_forward

pytestmark = pytest.mark.usefixtures("models_on_torch")

ROWS = rows_of(__file__)
Z = torch.zeros
Q, ROW, CACHE, NEW = Z(1, 4, 2, 8), Z(4, 2, 8), Z(3, 12, 2, 8), Z(3, 1, 2, 8)
CU, PAGES = offsets((4,), "cpu"), {"block_table": Z(1, 1).int()}
TABLE = {"block_table": Z(3, 1).int()}
ROTARY = {"rotary_cos": Z(12, 4), "rotary_sin": Z(12, 4)}


def dense(q: Any = Q, k: Any = Q, v: Any = Q, **change: Any) -> Any:
    return version_2.flash_attn_func(q, k, v, **change)


def packed(k: Any = ROW, **change: Any) -> Any:
    given = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
    return version_2.flash_attn_varlen_func(ROW, k, k, **{**given, **change})


def cached(**change: Any) -> Any:
    given = {"k_cache": CACHE, "v_cache": CACHE, "k": NEW, "v": NEW, "cache_seqlens": 3}
    return version_2.flash_attn_with_kvcache(**{"q": Z(3, 1, 4, 8), **given, **change})


def third(*qkv: Any, **change: Any) -> Any:
    return version_3.flash_attn_func(*(qkv or (Q, Q, Q)), **change)


def fourth(**change: Any) -> Any:
    return version_4.flash_attn_func(Q, Q, Q, **change)


GIVEN = {"dropout_p": 0, "softmax_scale": 0.3, "window_size_left": -1, "window_size_right": -1}
GIVEN |= {"alibi_slopes": None, "softcap": 0.0, "causal": False}


def backward(**change: Any) -> Any:
    given = dict.fromkeys(("dout", "q", "k", "v", "out"), Q) | dict.fromkeys(("dq", "dk", "dv"))
    given |= {"softmax_lse": Z(1, 2, 4), "deterministic": False, **GIVEN}
    return passes._flash_attn_backward(**{**given, **change})


LATENT, LATENTS = Z(1, 1, 2, 24), Z(1, 4, 1, 24)
X, H_K = Z(2, 4, 24, 8), Z(2, 2, 24, 8)
SLOPES = torch.linspace(0.1, 0.8, 4)
MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)


def flex(q: Any = X, k: Any = X, v: Any = X, **change: Any) -> Any:
    return flex_attention.flex_attention(q, k, v, **change)


def scored(score_mod: Any = lambda s, b, h, i, j: s + i) -> Any:
    return flex(score_mod=score_mod)


TOKEN, HELD = Z(2, 1, 32), Z(2, 3, 2, 8)


def llama_layer(k: Any = HELD, v: Any = HELD, **change: Any) -> Any:
    layer = llama.LlamaAttention(fastattn.GQAttention(32, 4, 2, rotary="interleaved"))
    return layer(**{"x": TOKEN, "use_kv_cache": True, "cache_k": k, "cache_v": v, **change})


def padded(mask: Any = (True, True)) -> Any:
    layer = llama.LlamaAttention(fastattn.GQAttention(32, 4, 2))
    return layer(TOKEN, padding_mask=torch.tensor(mask)[:, None])


KEYS = torch.ones(1, 4, dtype=torch.bool)
RING, ULYSSES = (
    SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=n)) for n in (2, 1)
)


def diffused(k: Any = Q, v: Any = Q, mask: Any = None, **change: Any) -> Any:
    return diffusers.attend(Q, k, v, mask, **change)


def layered(mask: Any = None, T_q: int = 4, B: int = 1, **change: Any) -> Any:
    """A layer of transformers, with 4 keys."""
    return attention_forward(layer(), *heads(T_q, 4, B), mask, **change)


def latent(q: Any = LATENT, cache: Any = LATENTS, **change: Any) -> Any:
    """Latents of 16 columns and 8 more in a page of 4 tokens, of which 3 are there."""
    lengths, table = torch.tensor([3], dtype=torch.int32), Z(1, 1).int()
    return flash_mla_with_kvcache(q, cache, table, lengths, 16, **change)


def efficient(bias: Any = None, *, q: Any = Q, k: Any = Q, v: Any = Q, **change: Any) -> Any:
    return xformers.memory_efficient_attention(q, k, v, bias, **change)


NAMES = vars(version_2) | vars(rotary) | vars(flex_attention) | globals()
# The others are called by rows with all that they take.
CHANGED = [name for name in ROWS if name in globals()]


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    assert served(ROWS[name], NAMES) == []


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_rows_change_is_served(name: str) -> None:
    globals()[name]()
