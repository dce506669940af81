"""The plan of a tuning run, the shapes that models have, and rows that calls read."""

import pytest
import torch

from fastattn.bench.tune.candidates import CALLS, Shape, usual_shape
from fastattn.bench.tune.plan import (
    USUAL_SHAPES,
    Gpu,
    backend_choice,
    hopper_choice,
    pass_choice,
    plan_of,
    shapes_of,
    split_choice,
    tile_choice,
)
from fastattn.bench.tune.trial import Outcome
from fastattn.bench.tune.tune import chosen
from fastattn.kernels.hopper import tile_table
from fastattn.kernels.launch import tiles
from fastattn.tuned import choices
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

H100 = Gpu("sm_90", 227 * 1024, 132, hopper=True)
A100 = Gpu("sm_80", 163 * 1024, 108, hopper=False)
SHAPE = Shape(64, 16, 16)


def test_a_plan_tunes_tiles_before_backends_and_plain_calls_before_others():
    names = [choice.name for choice in plan_of([usual_shape(128)], H100)]
    firsts = (
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
        "tiles: forward masked 2 bytes D 128",
        "tiles: backward_one_pass heavy 2 bytes D 128",
    )
    places = [names.index(name) for name in firsts]
    assert places == sorted(places)
    assert len(names) == len(set(names)) == 4 * 5 + 12 + 2 + 2 + 1 + 5


def test_a_plan_has_no_more_than_the_gpu_has():
    names = [x.name for x in plan_of([usual_shape(64), usual_shape(64, "float32")], A100)]
    assert len(set(names)) == len(names)
    assert not any("hopper" in name or "bias" in name for name in names)
    # First all plain calls, of every shape.
    firsts = [name.split(": ")[1] for name in names if "tiles: forward" in name]
    plain = [("plain" in name, "4 bytes" in name) for name in firsts]
    assert plain[:3] == [(True, False), (True, True), (False, False)]
    hopper = [x.name for x in plan_of([usual_shape(256), usual_shape(64, "float32")], H100)]
    kernels = ("hopper_forward plain 2", "hopper_fp8 plain 1")
    expected = [f"tiles: {kernel} bytes D 256" for kernel in kernels]
    assert [name for name in hopper if "tiles: hopper" in name] == expected


def test_a_part_of_a_plan_is_named_by_kinds_and_kernels():
    plan = plan_of([usual_shape(64)], H100)
    names = [step.name for step in chosen(plan, ("passes", "hopper_dkv"))]
    passes = [f"passes: {backend} bfloat16 D 64" for backend in ("hopper", "triton")]
    assert names == [*passes, "tiles: hopper_dkv plain 2 bytes D 64"]
    assert chosen(plan, None) == plan


def test_the_shipped_choice_comes_first_and_once():
    for step in plan_of(USUAL_SHAPES, H100):
        names = [candidate.name for candidate in step.candidates]
        numbers = [f"{n} at once" for n in (2, 1, 3, 4)]
        hopper = ["hopper"] * (step.key.get("dtype") == "bfloat16")
        assert len(names) == len(set(names)) >= 2, step.name
        assert names == {
            "backends": [*hopper, "triton", "torch"],
            "passes": ["one", "two"],
            "splits": [*numbers, *(f"{x}, one launch" for x in numbers)],
        }.get(step.kind, names)


@pytest.mark.parametrize("waves", ["few", "some", "many"])
def test_calls_have_the_waves_that_they_stand_for(waves):
    """Query tiles of 128 rows: fewer than multiprocessors, up to four times as many, or more."""
    for shape in (*USUAL_SHAPES, Shape(80, 12, 12), Shape(128, 64, 8)):
        for multiprocessors in (16, 108, 132):
            actual = backend_choice("forward", shape, True, waves, multiprocessors, hopper=False)
            if actual is None:
                # A tile a head is too many, or a tile more.
                assert shape.H_q > 0.5 * multiprocessors and waves != "many"
                continue
            (case,) = actual.cases
            assert (case.H_q, case.H_k) == (shape.H_q, shape.H_k)
            count = case.B * case.H_q * -(-case.T_q // 128) / multiprocessors
            least, limit = {"few": (0, 1), "some": (1, 4), "many": (4, 1000)}[waves]
            assert least <= count < limit


def test_shapes_are_the_usual_ones_or_those_that_are_named():
    assert shapes_of() == list(USUAL_SHAPES)
    half, single = usual_shape(64, "float16"), usual_shape(64, "float32")
    assert shapes_of(head_dims=[64], dtypes=["float16", "float32"]) == [half, single]
    assert [shape.D for shape in shapes_of(heads=8)] == [128, 64]
    assert Shape(80, 8, 8).BLOCK_D == 128
    for arguments, message in (
        ({"heads": 6, "kv_heads": 4}, "heads are a multiple of kv_heads; got head dim 128, 6"),
        ({"head_dims": [512]}, "a head dim is 1 to 256, .* got head dim 512"),
        ({"dtypes": ["float64"]}, "dtype must be one of bfloat16, .*got 'float64'"),
    ):
        with pytest.raises(ValueError, match=message):
            shapes_of(**arguments)


@pytest.fixture
def stored(tmp_path):
    """Stores and reads the row of a choice whose last candidate takes half of the shipped time."""

    def store_and_read(choice):
        samples = {choice.shipped.name: [[2.0] * 10], choice.candidates[-1].name: [[1.0] * 10]}
        finals = {name: each * len(choice.cases) for name, each in samples.items()}
        row = Outcome(choice, {}, finals).row()
        assert row["gain"] == 0.5
        store = Store(Environment("imaginary", 132, "1", "2", "3", "4"), tmp_path)
        assert store.put(choice.kind, {**row, "arch": "sm_90"})
        return store.read(choice.kind)[0]

    yield store_and_read
    tiles.install((), tiles.current_device())
    choices.forget()


@pytest.mark.parametrize("calls", CALLS)
def test_tiles_of_every_class_are_looked_up(stored, calls):
    choice = tile_choice("backward_dq", calls, SHAPE, H100)
    tiles.install([stored(choice)], tiles.current_device())
    actual = tiles.lookup("backward_dq", 2, 64, calls)
    assert actual == choice.candidates[-1].forced["backward_dq"]


@pytest.mark.parametrize("kernel", tiles.HOPPER)
def test_shapes_of_the_hopper_kernels_are_looked_up(stored, kernel):
    choice = hopper_choice(kernel, SHAPE)
    tiles.install([stored(choice)], tiles.current_device())
    actual = {
        "hopper_forward": lambda name: tile_table.forward_config(64, False),
        "hopper_fp8": lambda name: tile_table.fp8_config(64, False),
    }.get(kernel, lambda name: tile_table.backward_config(name, 64, False, False))
    assert actual(kernel.removeprefix("hopper_")) == choice.candidates[-1].forced[kernel]


def test_splits_of_decoding_are_looked_up(stored, monkeypatch):
    monkeypatch.setattr(choices, "applies", lambda device: True)
    here = torch.device("cuda", max(0, tiles.current_device()))
    choices.adopt(here, {"splits": [stored(split_choice(SHAPE))]})
    assert tiles.programs_at_once(2, 64) == 4 and tiles.one_launch(2, 64)
    assert not tiles.one_launch(1, 64)
    choices.forget()
    assert tiles.programs_at_once(2, 64) is None and not tiles.one_launch(2, 64)


@pytest.mark.parametrize("waves", ["few", "some", "many"])
def test_backends_and_passes_are_found(stored, waves, monkeypatch):
    backends = backend_choice("training", SHAPE, True, waves, 132, hopper=True)
    assert backends.cases[0].direction == "forward_backward"
    rows = {"backends": [stored(backends)], "passes": [stored(pass_choice("hopper", SHAPE))]}
    monkeypatch.setattr(choices, "environment", lambda _: Environment("x", 132, "", "", "", ""))
    actual = choices.adopt(torch.device("cuda", 7), rows)
    row = actual.fastest("training", torch.bfloat16, 64, True, waves)
    assert (row["backend"], row["ms"]) == ("torch", {"hopper": 2, "torch": 1})
    assert actual.fastest("forward", torch.bfloat16, 64, True, waves) is None
    assert actual.passes["hopper", "bfloat16", 64]["passes"] == "two"
