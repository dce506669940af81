"""The plan of a tuning run, step by step, and the shapes that models have."""

import json

import pytest

from fastattn.bench.tune.candidates import Shape, usual_shape
from fastattn.bench.tune.plan import (
    USUAL_SHAPES,
    Gpu,
    Verification,
    backend_choice,
    shapes_of,
    steps,
)

H100 = Gpu("sm_90", 227 * 1024, 132, hopper=True)
A100 = Gpu("sm_80", 163 * 1024, 108, hopper=False)


def test_a_plan_verifies_first_and_tunes_tiles_before_backends_and_plain_calls_before_others():
    names = [step.name for step in steps([usual_shape(128)], H100)]
    firsts = (
        "verify bfloat16 D 128: triton forward, triton backward, triton one-pass, hopper forward, "
        "hopper backward, hopper one-pass, triton decode, hopper fp8",
        "tiles: forward plain 2 bytes D 128",
        "tiles: backward_one_pass plain 2 bytes D 128",
        "backends: forward bfloat16 D 128 causal many",
        "backends: training bfloat16 D 128 full few",
        "passes: hopper bfloat16 D 128",
        "passes: triton bfloat16 D 128",
        "tiles: decode plain 2 bytes D 128",
        "splits: 2 bytes D 128",
        "tiles: hopper_forward plain 2 bytes D 128",
        "tiles: hopper_fp8 plain 1 bytes D 128",
        "verify bfloat16 D 128: triton masked, triton bias, triton scores, triton heavy",
        "tiles: forward masked 2 bytes D 128",
        "tiles: backward_one_pass heavy 2 bytes D 128",
    )
    places = [names.index(name) for name in firsts]
    assert places == sorted(places)
    assert len(names) == len(set(names)) == 2 + 4 * 5 + 12 + 2 + 2 + 1 + 5


def test_a_plan_has_no_more_than_the_gpu_has():
    names = [step.name for step in steps([usual_shape(64), usual_shape(64, "float32")], A100)]
    assert len(set(names)) == len(names)
    assert not any("hopper" in name or "bias" in name for name in names)
    # First all plain calls, of every shape.
    firsts = [name for name in names if name.startswith("verify")]
    assert [("plain" if "forward" in x else "other", "float32" in x) for x in firsts] == [
        ("plain", False),
        ("plain", True),
        ("other", False),
        ("other", True),
    ]
    hopper = [step.name for step in steps([usual_shape(256), usual_shape(64, "float32")], H100)]
    assert [name for name in hopper if "tiles: hopper" in name] == [
        "tiles: hopper_forward plain 2 bytes D 256",
        "tiles: hopper_fp8 plain 1 bytes D 256",
    ]


def test_the_shipped_choice_comes_first_and_once():
    for step in steps(USUAL_SHAPES, H100):
        if isinstance(step, Verification):
            continue
        names = [candidate.name for candidate in step.candidates]
        assert len(names) == len(set(names)) >= 2, step.name
        if step.kind == "backends":
            hopper = step.key["dtype"] == "bfloat16"
            assert names == (["hopper"] if hopper else []) + ["triton", "torch"]
        elif step.kind == "passes":
            assert names == ["one", "two"]
        elif step.kind == "splits":
            assert names == ["2 at once", "1 at once", "3 at once", "4 at once"]


@pytest.mark.parametrize("waves", ["few", "some", "many"])
@pytest.mark.parametrize("shape", [*USUAL_SHAPES, Shape(80, 12, 12, T=512), Shape(128, 64, 8)])
@pytest.mark.parametrize("multiprocessors", [16, 108, 132])
def test_calls_have_the_waves_that_they_stand_for(shape, waves, multiprocessors):
    """Query tiles of 128 rows: fewer than multiprocessors, up to four times as many, or more."""
    actual = backend_choice("forward", shape, True, waves, multiprocessors, hopper=False)
    if actual is None:
        # A tile a head is too many, or a tile more.
        assert shape.H_q > 0.5 * multiprocessors and waves != "many"
        return
    (case,) = actual.cases
    tiles = case.B * case.H_q * -(-case.T_q // 128) / multiprocessors
    least, limit = {"few": (0, 1), "some": (1, 4), "many": (4, 1000)}[waves]
    assert least <= tiles < limit


CONFIGURATIONS = {
    "transformers": (
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        Shape(128, 32, 8),
    ),
    "gpt2": ({"n_embd": 768, "n_head": 12, "n_positions": 1024}, Shape(64, 12, 12, T=1024)),
    "head-dim": (
        {"text_config": {"num_attention_heads": 8, "head_dim": 256, "hidden_size": 1152}},
        Shape(256, 8, 8),
    ),
    "long": (
        {"d_model": 512, "num_heads": 8, "max_position_embeddings": 131072},
        Shape(64, 8, 8, T=8192),
    ),
    "ours": (
        {"config": {"model": {"embed_dim": 128, "num_heads": 4, "context_length": 256}}},
        Shape(32, 4, 4, T=256),
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_says_its_shape(tmp_path, name):
    data, shape = CONFIGURATIONS[name]
    file = tmp_path / ("checkpoint.json" if name == "ours" else "config.json")
    file.write_text(json.dumps(data))
    assert shapes_of(tmp_path) == shapes_of(file) == [shape]
    assert shapes_of(tmp_path, heads=16, kv_heads=2, head_dims=[64])[0][:3] == (64, 16, 2)


def test_shapes_are_the_usual_ones_or_those_that_are_named():
    assert shapes_of() == list(USUAL_SHAPES)
    assert shapes_of(head_dims=[64], dtypes=["float16", "float32"]) == [
        usual_shape(64, "float16"),
        usual_shape(64, "float32"),
    ]
    assert [shape.D for shape in shapes_of(heads=8)] == [128, 64]
    assert Shape(80, 8, 8).BLOCK_D == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads are a multiple of kv_heads; got head dim 128, 6"),
        ({"head_dims": [512]}, "a head dim is 1 to 256, .* got head dim 512"),
        ({"dtypes": ["float64"]}, "dtype must be one of bfloat16, .*got 'float64'"),
    ],
)
def test_shapes_that_cannot_be_served_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        shapes_of(**arguments)


def test_a_configuration_without_heads_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match=r"config\.json says neither num_attention_heads"):
        shapes_of(tmp_path)
