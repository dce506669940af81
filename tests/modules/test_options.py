"""The table of a layer's options: signatures, errors, and defaults of models."""

import dataclasses

import pytest

from fastattn import GQAttention, MultiheadLatentAttention, NativeSparseAttention
from fastattn.models.model_config import TransformerConfig
from fastattn.modules.options import SelfOptions, table


def test_models_have_the_defaults_of_layers():
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    shared = fields.keys() & table(SelfOptions).keys()
    assert shared >= {"softcap", "sinks", "window", "keep_first", "scoring"}
    assert {name: fields[name] for name in shared} == {
        name: table(SelfOptions)[name].default for name in shared
    }


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (GQAttention(8, 2), "embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=4"),
        (GQAttention(8, 2, causal=False, v_head_dim=3, rotary="half", scoring="dot"),
         "embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, v_head_dim=3, causal=False, "
         "rotary='half', rotary_base=10000, rotary_dim=4, scoring='dot'"),
        (MultiheadLatentAttention(8, 2, kv_latent_dim=4, nope_dim=4, rope_dim=0, window=3),
         "embed_dim=8, num_heads=2, kv_latent_dim=4, nope_dim=4, rope_dim=0, v_head_dim=4, "
         "window=3"),
        (NativeSparseAttention(8, 2, first=0, backend="torch"),
         "embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, block_k=64, n=16, window=512, "
         "first=0, latest=2, pool=(32, 16), backend='torch'"),
    ],
)  # fmt: skip
def test_layers_show_what_they_were_made_with(layer, words):
    assert layer.extra_repr() == words
