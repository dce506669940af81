"""Tiny models of today with latent attention, served through transformers: as "eager".

Logits and every gradient by the error budget, and a prompt and steps by transformers' own cache.
"""

from typing import Any

import pytest
import torch
import transformers as tr
from transformers_models import GQA, MIXED, SIZES, build, compare, padded, tokens

pytestmark = pytest.mark.usefixtures("models_on_torch")

MLA = {
    **SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
DENSE = {"mlp_layer_types": ["dense"]}
INDEXER = {**DENSE, "index_topk": 5, "index_head_dim": 16, "index_n_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", {**MLA, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "first_k_dense_replace": 1}),
    "deepseek_v32": ("DeepseekV32Config", {**MLA, **INDEXER}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**MLA, **INDEXER}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**MLA, **DENSE}),
    "youtu": ("YoutuConfig", MLA),
    "minicpm3": ("MiniCPM3Config", MLA),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **GQA, "head_dim": 12, "v_head_dim": 8, "sliding_window": 4, "layer_types": MIXED,
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **SIZES, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2,
            "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
            "sliding_window": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 16, "hc_mult": 2, "qk_rope_head_dim": 8,
        },
    ),
}  # fmt: skip


def model_of(name: str, device: str) -> Any:
    kind, fields = MODELS[name]
    return build(tr.AutoModelForCausalLM, getattr(tr, kind)(**fields), device)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, device: str) -> None:
    mask = padded([(0, 11), (3, 11)], 11, device)
    inputs = {"input_ids": tokens(2, 11, device), "attention_mask": mask}
    compare(model_of(name, device), inputs, lambda out: out.logits[:, 3:])  # without padding


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_tokens_of_eager(name: str, device: str) -> None:
    model, ids = model_of(name, device), tokens(2, 6, device)
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **how)
    model.set_attn_implementation("fastattn")
    assert torch.equal(model.generate(ids, **how), expected)
