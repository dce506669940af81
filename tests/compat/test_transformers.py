"""Models of transformers with attn_implementation="fastattn" against the same models with "eager".

The models are tiny and random: see `transformers_models`.
"""

import builtins
import sys
import warnings
from contextlib import nullcontext
from inspect import signature
from unittest import mock

import pytest
import torch
import transformers as tr
from nightly import gate_cases
from oracles import assert_by_oracle
from transformers_models import (
    DECODERS,
    GQA,
    MIXED,
    SIZES,
    build,
    compare,
    decoder,
    decoder_config,
    padded,
    softmax_in_fp64,
    tokens,
)

from fastattn.compat.transformers import hf_attention

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")
# A model's argument for its cache: past_key_values until transformers 5.23.
CACHE = "cache" if "cache" in signature(tr.LlamaModel.forward).parameters else "past_key_values"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(
            (x, None)
            for x in gate_cases([x for x in DECODERS if x != "qwen3-norm"], ["qwen3-norm"])
        ),
        ("llama-gqa", "triton"),
    ],
)
def test_decoder_with_padding(name, backend, device, monkeypatch):
    layers = {}
    if backend is not None:
        monkeypatch.setenv("FASTATTN_BACKEND", backend)
        layers = {"num_hidden_layers": 1}
    mask = padded([(4, 12), (0, 12), (0, 9)], 12, device)
    inputs = {"input_ids": tokens(3, 12, device), "attention_mask": mask}
    model = build(tr.AutoModelForCausalLM, decoder_config(name, **layers), device)
    compare(model, inputs, lambda out: out.logits[mask.bool()])


def test_blocks_that_an_indexer_chose(device, monkeypatch):
    """MiniMax M3: two of up to five blocks for each K/V head and query, gradients too."""
    config = tr.MiniMaxM3VLTextConfig(
        **GQA, head_dim=8, rotary_dim=4, dense_intermediate_size=40, shared_intermediate_size=20,
        num_local_experts=2, num_experts_per_tok=1, index_n_heads=2, index_head_dim=8,
        index_block_size=4, index_topk_blocks=2, mlp_layer_types=["dense", "dense"],
        layer_types=["minimax_m3_sparse", "full_attention"],
    )  # fmt: skip
    selected = mock.Mock(side_effect=hf_attention.selected_attention)
    monkeypatch.setattr(hf_attention, "selected_attention", selected)
    mask = padded([(0, 18), (0, 13)], 18, device)
    inputs = {"input_ids": tokens(2, 18, device), "attention_mask": mask}
    model = build(tr.AutoModel, config, device)
    compare(model, inputs, lambda out: out.last_hidden_state[mask.bool()])
    assert [call.kwargs["block"] for call in selected.call_args_list] == [(1, 4)]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt-oss-sinks"])
@torch.no_grad()
def test_chunked_prefill(name, device):
    """A prompt in pieces, T_q < T_k, into a cache that grows."""
    model, ids = decoder(name, device), tokens(2, 13, device)

    def run(dtype, implementation="eager"):
        model.to(dtype).set_attn_implementation(implementation)
        cache = tr.DynamicCache(config=model.config)
        pieces = ids.split([4, 6, 1, 2], dim=1)
        with softmax_in_fp64() if dtype == torch.float64 else nullcontext():
            parts = [model(piece, **{CACHE: cache}).logits for piece in pieces]
        return [torch.cat(parts, dim=1)]

    assert_by_oracle(run(torch.float32, "fastattn"), run, names="logits")


@pytest.mark.parametrize(
    ("name", "cache"),
    gate_cases(
        [("llama-gqa", "static"), ("gemma2-softcap", None), ("t5", None)],
        [("llama-gqa", None), ("gemma2-softcap", "static")],
    ),
)
def test_generated_tokens_are_equal(name, cache, device):
    model = t5(device) if name == "t5" else decoder(name, device)
    inputs = {
        "input_ids": tokens(2, 9, device), "attention_mask": padded([(4, 9), (0, 9)], 9, device),
        "cache_implementation": cache, "max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    ways = {"greedy": {}, "sampled": {"do_sample": True}, "beam": {"num_beams": 3}}
    results = {}
    for implementation in ("eager", "fastattn"):
        model.set_attn_implementation(implementation)
        for way, options in ways.items():
            torch.manual_seed(3)
            options = {"do_sample": False, **options}
            results[implementation, way] = model.generate(**inputs, **options).tolist()
    for way in ways:
        assert results["fastattn", way] == results["eager", way], way
    assert len({str(results["eager", way]) for way in ways}) > 1


# Older releases know it by the name that now warns.
_ENABLE = "activation_checkpointing_enable"


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_and_training(reentrant, device):
    model = decoder("llama-gqa", device).train()
    enable = getattr(model, _ENABLE, model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    inputs = dict.fromkeys(("input_ids", "labels"), tokens(2, 8, device))
    mask = padded([(0, 8), (0, 5)], 8, device)
    compare(model, {**inputs, "attention_mask": mask}, lambda out: out.loss)


def test_dropout_of_weights_is_used_in_training_alone(device, attention_calls):
    config = tr.LlamaConfig(**GQA, attention_dropout=0.5)
    model = build(tr.AutoModelForCausalLM, config, device)
    model.set_attn_implementation("fastattn")
    ids = tokens(1, 6, device)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
        assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert {options["dropout"] for options in attention_calls} == {0.0, 0.5}


def test_encoder_with_window_and_padding(device, attention_calls):
    config = tr.ModernBertConfig(
        **SIZES, local_attention=6, layer_types=MIXED, cls_token_id=1, sep_token_id=2
    )
    model = build(tr.AutoModel, config, device)
    mask = padded([(0, 9), (0, 14)], 14, device)
    inputs = {"input_ids": tokens(2, 14, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.last_hidden_state[mask.bool()])
    assert {options.get("window") for options in attention_calls} == {None, (3, 3)}


def t5(device):
    config = tr.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=10,
    )  # fmt: skip
    return build(tr.AutoModelForSeq2SeqLM, config, device)


def test_encoder_decoder_with_relative_bias(device):
    inputs = {"input_ids": tokens(2, 11, device), "decoder_input_ids": tokens(2, 7, device)}
    mask = padded([(0, 6), (0, 11)], 11, device)
    compare(t5(device), {**inputs, "attention_mask": mask})


def test_missing_transformers_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *rest, **named)

    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "\.\[hf\]" in a checkout'):
        hf_attention.register()


def test_older_versions_are_refused_and_newer_ones_warn_once(swap, device, monkeypatch):
    hf_attention._check_version.cache_clear()
    with pytest.warns(UserWarning, match=r"5\.25\.0 is newer than 5\.4 to 5\.24"):
        hf_attention._check_version("5.25.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("5.25.0", "5.24.4.dev0", "5.4.0"):
            hf_attention._check_version(version)
    model = decoder("llama-gqa", device)
    monkeypatch.setattr("transformers.__version__", "5.3.1")
    with pytest.raises(ImportError, match=r"transformers 5\.4 to 5\.24, got 5\.3\.1: there use"):
        hf_attention.register()
    assert "got 5.3.1" in swap(model).left[""]
