"""Configurations of models: checks, JSON, old files, presets."""

import json

import pytest
from torch._subclasses import FakeTensorMode

from fastattn.models.encoder import Encoder, EncoderConfig
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.model_config import TransformerConfig
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig

RELATIVE = {"positions": "content", "relative_values": True}


ADDITIVE = {"scoring": "additive"}
ODD = {"positions": "sinusoidal", "embed_dim": 9, "num_heads": 3}
MERGE = {"sparse": "merge", "window": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride": 0}, "stride must be a positive integer, got 0"),
        ({"num_layers": 1.5}, "num_layers must be a positive integer, got 1.5"),
        ({"num_heads": True}, "num_heads must be a positive integer, got True"),
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a positive integer, got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be a positive integer, got 0"),
        ({"embed_dim": 30}, "embed_dim must be a multiple of num_heads=4, got 30"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4, got 3"),
        ({"positions": "first"}, "positions must be 'learned', .* or 'none', got 'first'"),
        ({"rotary_style": "x"}, "rotary_style must be 'half' or 'interleaved', got 'x'"),
        ({"positions": "rotary", "embed_dim": 20}, "must be even .* 20 / 4 = 5"),
        ({"rotary_base": 0}, "rotary_base must be positive, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"attention_dropout": -0.5}, r"attention_dropout must be in \[0, 1\), got -0.5"),
        ({"keep_first": 1}, "keep_first=1 keeps keys that a window or stride hides"),
        ({"softcap": -1.0}, "softcap must be positive and finite, got -1.0"),
        ({"activation": "elu"}, "activation must be 'relu', .* or 'swiglu', got 'elu'"),
        ({"relative_distance": 0}, "relative_distance must be a positive integer, got 0"),
        ({"relative_table": "fixed"}, "relative_table must be 'trained' or 'sinusoidal', got"),
        ({"sparse": "all"}, "sparse must be 'alternate' or 'merge', got 'all'"),
        ({"stride": 2}, "stride needs sparse='alternate' or 'merge', got 2 without it"),
        (MERGE, "sparse='merge' needs window and stride, got window=3 and stride=None"),
        ({"output_gate": "row"}, "output_gate must be 'head' or 'element', got 'row'"),
        ({"scoring": "cosine"}, "scoring must be 'scaled_dot', .* or 'additive', got 'cosine'"),
        ({"block": "both"}, "block must be 'pre', 'post' or 'parallel', got 'both'"),
        ({"norm": "batch"}, "norm must be 'layernorm' or 'rmsnorm', got 'batch'"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        (ODD, "embed_dim must be even for sinusoids, got 9"),
        ({"relative_values": True}, "needs positions to be one of scalar, .* got 'learned'"),
        ({**RELATIVE, "window": 3}, "window cannot go with relative_values, got 3"),
        ({**RELATIVE, "softcap": 2.0}, "softcap cannot go with relative_values, got 2.0"),
        ({**RELATIVE, "sinks": True}, "sinks cannot go with relative_values, got True"),
        ({**RELATIVE, "attention_dropout": 0.1}, "attention_dropout cannot go with relative_val"),
        ({**ADDITIVE, "sinks": True}, "sinks cannot go with scoring='additive', got"),
        ({**ADDITIVE, "positions": "alibi"}, "positions must be 'learned', .* with scoring='addit"),
    ],
)
def test_wrong_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderConfig(0), "vocab_size must be a positive integer, got 0"),
        (lambda: EncoderConfig(5, 0), "context_length must be a positive integer, got 0"),
        (lambda: Seq2SeqConfig(0, 5), "source_vocab_size must be a positive integer, got 0"),
        (lambda: Seq2SeqConfig(5, 0), "target_vocab_size must be a positive integer, got 0"),
        (lambda: Seq2SeqConfig(5, 5, 0), "source_length must be a positive integer, got 0"),
        (lambda: Seq2SeqConfig(5, 5, 5, 0), "target_length must be a positive integer, got 0"),
        (lambda: Seq2SeqConfig(5, 5, num_decoder_layers=0), "num_decoder_layers must be a positi"),
        (lambda: Seq2SeqConfig(5, 6, share_embeddings=True), "one vocabulary, got source_vocab_s"),
        (lambda: EncoderConfig(5, block="x"), "block must be 'pre'"),
        (lambda: Seq2SeqConfig.from_dict({"source_vocab_size": 5}), "Seq2SeqConfig needs the fie"),
        (lambda: EncoderConfig.from_dict({"vocab_size": 5, "tags": 3}), "EncoderConfig has no fi"),
        (lambda: GPTConfig.preset("gpt5"), "GPTConfig has the presets gpt2-small, .* got 'gpt5'"),
        (lambda: TransformerConfig.preset("x"), "TransformerConfig has the presets none, got 'x'"),
    ],
)
def test_wrong_configs_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(5, block="parallel", sparse="merge", window=3, stride=2, label_smoothing=0.1),
        EncoderConfig(5, positions="transformer_xl", norm="rmsnorm", scoring="dot"),
        Seq2SeqConfig(5, 6, 7, 8, num_decoder_layers=2, activation="swiglu"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_config_survives_json(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


# Parameters as published, or counted by the model's own authors' code.
PRESETS = {
    "gpt2-small": (GPTConfig, GPT, 124_439_808),
    "tinyllama": (GPTConfig, GPT, 1_100_048_384),
    # Without the vectors of its two segments, and its pooler.
    "bert-base": (EncoderConfig, Encoder, 109_482_240 - 2 * 768 - (768 * 768 + 768)),
    # Embedding; attentions, feed-forward layers and norms of six layers on either side.
    "transformer-base": (
        Seq2SeqConfig,
        Seq2Seq,
        37000 * 512 + 6 * (12 * (512**2 + 512) + 2 * (2 * 512 * 2048 + 2560) + 5 * 1024),
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_published(name):
    config, model, parameters = PRESETS[name]
    with FakeTensorMode():
        built = model(config.preset(name, window=128))
    assert built.config.window == 128, "a change"
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
