"""The table of a layer's options: signatures, errors, and defaults of models."""

import dataclasses

from fastattn.models.model_config import TransformerConfig
from fastattn.modules.options import SelfOptions, table


def test_models_have_the_defaults_of_layers():
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    shared = fields.keys() & table(SelfOptions).keys()
    assert shared >= {"softcap", "sinks", "window", "keep_first", "scoring"}
    assert {name: fields[name] for name in shared} == {
        name: table(SelfOptions)[name].default for name in shared
    }
