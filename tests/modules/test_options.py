"""The table of a layer's options: signatures, errors, and defaults of models."""

import dataclasses
import inspect

import pytest

from fastattn import CausalGQAttention, GQAttention
from fastattn.models.model_config import TransformerConfig
from fastattn.modules.cross_attention import CrossGQAttention
from fastattn.modules.options import SelfOptions, SharedOptions, passed_as, table

LAYERS = ((GQAttention, SelfOptions), (CrossGQAttention, SharedOptions))


@pytest.mark.parametrize(("layer", "kind"), LAYERS, ids=("self", "cross"))
def test_a_signature_shows_every_option(layer, kind):
    shown = inspect.signature(layer).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    for name, row in table(kind).items():
        assert shown[name].default == row.default
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert shown["softcap"].annotation == float | None


@pytest.mark.parametrize("layer", [GQAttention, CausalGQAttention, CrossGQAttention])
def test_an_unknown_option_is_refused(layer):
    with pytest.raises(TypeError, match=f"{layer.__name__}.* unexpected keyword argument 'soft'"):
        layer(8, 2, soft=1.0)


@pytest.mark.parametrize(("layer", "kind"), LAYERS, ids=("self", "cross"))
def test_options_of_scores_reach_attention(layer, kind):
    made = layer(8, 2, softcap=3.0)
    assert made.score_options()["softcap"] == 3.0
    assert made.score_options().keys() >= set(passed_as(kind, "score"))


def test_models_have_the_defaults_of_layers():
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    shared = fields.keys() & table(SelfOptions).keys()
    assert shared >= {"softcap", "sinks", "window", "keep_first", "scoring"}
    assert {name: fields[name] for name in shared} == {
        name: table(SelfOptions)[name].default for name in shared
    }


def test_a_causal_layer_takes_no_causal() -> None:
    for causal in (False, True):
        with pytest.raises(TypeError, match=r"takes no causal: use GQAttention\(\.\.\., causal="):
            CausalGQAttention(8, 2, causal=causal)
