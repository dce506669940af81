"""Tiny random Hugging Face models, checked against their own "eager" attention.

"eager" in fp64 is the reference and "eager" in fp32 the naive run of the error budget.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fastattn.testing.budget import assert_within_budget
from fastattn.testing.orders import worst_naive

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
VISION = {
    **{n: SIZES[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads")},
    **{"num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
}
MIXED = ["sliding_attention", "full_attention"]
# Rotary positions stretched from 32 tokens to 64.
_YARN = {
    "rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
}  # fmt: skip


def _grouped(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A config's class, and its fields for 4 query heads on 2 key/value heads."""
    return kind, {**GQA, **fields}


# The class of each decoder's config, and its fields.
_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": _grouped("LlamaConfig"),
    "mistral-window": _grouped("MistralConfig", sliding_window=5),
    "gemma2-softcap": _grouped(
        "Gemma2Config", head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, layer_types=MIXED
    ),
    "gpt-oss-sinks": _grouped(
        "GptOssConfig", head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
        layer_types=MIXED, rope_parameters=_YARN,
    ),
    "qwen3-norm": _grouped("Qwen3Config", head_dim=8),
    "deepseek-values": _grouped(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    ),
    "llama4-chunks": _grouped(
        "Llama4TextConfig", head_dim=8, intermediate_size_mlp=40, num_local_experts=2,
        attention_chunk_size=4, layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0], moe_layers=[],
    ),
}  # fmt: skip
DECODERS = tuple(_DECODERS)


def decoder_config(name: str, **changed: Any) -> Any:
    """The config of one of DECODERS."""
    import transformers

    kind, arguments = _DECODERS[name]
    return getattr(transformers, kind)(**{**arguments, **changed})


def decoder(name: str, device: str) -> Any:
    """One of DECODERS with a head for tokens, as `build` makes it."""
    import transformers

    return build(transformers.AutoModelForCausalLM, decoder_config(name), device)


def build(auto: Any, config: Any, device: str) -> Any:
    """An fp32 model in eval mode with fixed random weights, by a transformers Auto class."""
    from fastattn.compat.transformers.hf_attention import register

    register()
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").to(device)
    if config.model_type in ("gpt_oss", "deepseek_v4"):
        # The faster experts have no fp64.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model.eval()


@contextmanager
def softmax_in_fp64() -> Iterator[None]:
    """Keep fp64 scores in "eager", which casts them to fp32 in every dtype."""
    softmax = torch.nn.functional.softmax

    def wide(x: Tensor, dim: int, **ignored: Any) -> Tensor:
        return softmax(x, dim=dim)

    with mock.patch.object(torch.nn.functional, "softmax", wide):
        yield


def compare(
    model: Any,
    inputs: dict[str, Any],
    select: Callable[[Any], Tensor] = lambda out: out.logits,
    *,
    grads: bool = True,
) -> None:
    """Check outputs and the gradients of all parameters by the error budget."""

    def run(copied: Any, implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        copied.set_attn_implementation(implementation)
        assert copied.config._attn_implementation == implementation
        copied.to(dtype)
        floats = {n for n, x in inputs.items() if torch.is_tensor(x) and x.is_floating_point()}
        cast = {n: x.to(dtype) if n in floats else x for n, x in inputs.items()}
        copied.zero_grad()
        out = select(copied(**cast))
        if not grads:
            return {"output": out.detach()}
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(out.shape, generator=generator).bfloat16().to(out)
        torch.autograd.backward((out * do).sum())
        gradients = {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}
        return {"output": out.detach(), **gradients}

    with softmax_in_fp64():
        ref = run(copy.deepcopy(model), "eager", torch.float64)
    naive = worst_naive(ref, lambda: run(copy.deepcopy(model), "eager", torch.float32))
    ours = run(copy.deepcopy(model), "fastattn", torch.float32)
    assert ours.keys() == ref.keys()
    for name, x in ours.items():
        assert_within_budget(name, x, ref[name], naive[name])


def tokens(B: int, T: int, device: str) -> Tensor:
    """Random token ids [B, T] without special ones."""
    return torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(5)).to(device)


def padded(mask_of_rows: list[tuple[int, int]], T: int, device: str) -> Tensor:
    """int64 [B, T] with ones from start to end."""
    j = torch.arange(T, device=device)
    return torch.stack([(j >= start) & (j < end) for start, end in mask_of_rows]).long()


def layer(causal: bool = True) -> nn.Module:
    """A module with the attributes that an attention function reads."""
    module = nn.Module()
    module.is_causal = causal  # type: ignore[assignment]
    return module


def heads(T_q: int, T_k: int, B: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 2, T_q, 8], k and v [B, 2, T_k, 8]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 2, T, 8, generator=generator) for T in (T_q, T_k, T_k))
    return q, k, v
