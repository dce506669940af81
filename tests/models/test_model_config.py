"""Configurations of models: checks, JSON, old files, presets."""

import pytest
import transformers as tr
from torch._subclasses import FakeTensorMode

from fastattn.models.encoder import Encoder, EncoderConfig
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.gpt2 import config_from_hf
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig

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


def test_presets_have_the_options_of_transformers():
    assert GPTConfig.preset("gpt2-small") == config_from_hf(tr.GPT2Config().to_dict())
    ours, theirs = EncoderConfig.preset("bert-base"), tr.BertConfig()
    dropouts = theirs.hidden_dropout_prob, theirs.attention_probs_dropout_prob
    assert (ours.dropout, ours.attention_dropout) == dropouts
    assert (ours.activation, ours.norm_eps) == (theirs.hidden_act, theirs.layer_norm_eps)
