"""The table of a layer's options: signatures, errors, and defaults of models."""

import dataclasses
import inspect

import pytest

from fastattn import GQAttention
from fastattn.models.model_config import TransformerConfig
from fastattn.modules.cross_attention import CrossGQAttention
from fastattn.modules.options import SelfOptions, SharedOptions, table

LAYERS = ((GQAttention, SelfOptions), (CrossGQAttention, SharedOptions))


@pytest.mark.parametrize(("layer", "kind"), LAYERS, ids=("self", "cross"))
def test_a_signature_shows_every_option(layer, kind):
    shown = inspect.signature(layer).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    for name, row in table(kind).items():
        assert shown[name].default == row.default
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert shown["softcap"].annotation == float | None


def test_models_have_the_defaults_of_layers():
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    shared = fields.keys() & table(SelfOptions).keys()
    assert shared >= {"softcap", "sinks", "window", "keep_first", "scoring"}
    assert {name: fields[name] for name in shared} == {
        name: table(SelfOptions)[name].default for name in shared
    }
