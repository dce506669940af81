"""Rows that a run stores are rows that calls read."""

import pytest
import torch

from fastattn.bench.tune.candidates import CALLS, Shape
from fastattn.bench.tune.plan import (
    Gpu,
    backend_choice,
    hopper_choice,
    pass_choice,
    split_choice,
    tile_choice,
)
from fastattn.bench.tune.trial import Outcome
from fastattn.kernels.hopper import tile_table
from fastattn.kernels.launch import tiles
from fastattn.tuned import choices
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

SHAPE = Shape(64, 16, 16)
GPU = Gpu("sm_90", 227 * 1024, 132, hopper=True)


def stored(tmp_path, choice) -> dict:
    """The row of a choice in which the last candidate takes half of the shipped one's time."""
    last = choice.candidates[-1]
    samples = {choice.shipped.name: [[2.0] * 10], last.name: [[1.0] * 10]}
    finals = {name: each * len(choice.cases) for name, each in samples.items()}
    row = Outcome(choice, {}, finals).row()
    assert row is not None and row["gain"] == 0.5
    store = Store(Environment("imaginary", 132, "1", "2", "3", "4"), tmp_path)
    assert store.put(choice.kind, {**row, "arch": "sm_90"})
    (actual,) = store.read(choice.kind)
    return actual


@pytest.fixture(autouse=True)
def nothing_installed():
    yield
    tiles.install((), tiles.current_device())
    choices.forget()


@pytest.mark.parametrize("calls", CALLS)
def test_tiles_of_every_class_are_looked_up(tmp_path, calls):
    choice = tile_choice("backward_dq", calls, SHAPE, GPU)
    tiles.install([stored(tmp_path, choice)], tiles.current_device())
    actual = tiles.lookup("backward_dq", 2, 64, calls)
    assert actual == choice.candidates[-1].forced["backward_dq"]
    others = {"plain", "masked", "bias", "scores", "heavy"} - {calls}
    # Calls without a row of their own take that of a wider class.
    wider = {"plain": {"masked"}, "scores": {"bias"}, "heavy": {"bias", "scores"}}.get(calls, set())
    assert all(tiles.lookup("backward_dq", 2, 64, c) != actual for c in others - wider)


@pytest.mark.parametrize("kernel", tiles.HOPPER)
def test_shapes_of_the_hopper_kernels_are_looked_up(tmp_path, kernel):
    choice = hopper_choice(kernel, SHAPE)
    assert choice is not None
    tiles.install([stored(tmp_path, choice)], tiles.current_device())
    if kernel == "hopper_forward":
        actual = tile_table.forward_config(64, False)
    elif kernel == "hopper_fp8":
        actual = tile_table.fp8_config(64, False)
        assert tile_table.fp8_config(64, True) != actual, "calls that are short of registers"
    else:
        actual = tile_table.backward_config(kernel.removeprefix("hopper_"), 64, False, False)
    assert actual == choice.candidates[-1].forced[kernel]
    if kernel == "hopper_forward":
        assert actual.SLACK == 0 and choice.candidates[-1].name.endswith("no slack)")
    if kernel == "hopper_one_pass":
        assert not actual.DQ_BY_TMA and choice.candidates[-1].name.endswith("threads add)")


def test_splits_of_decoding_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "applies", lambda device: True)
    here = torch.device("cuda", max(0, tiles.current_device()))
    choices.adopt(here, {"splits": [stored(tmp_path, split_choice(SHAPE))]})
    assert tiles.programs_at_once(2, 64) == 4
    choices.forget()
    assert tiles.programs_at_once(2, 64) is None


@pytest.mark.parametrize("waves", ["few", "some", "many"])
def test_backends_and_passes_are_found(tmp_path, waves):
    device = torch.device("cuda", 7)
    backends = backend_choice("training", SHAPE, True, waves, 132, hopper=True)
    assert backends is not None
    rows = {"backends": [stored(tmp_path, backends)]}
    rows["passes"] = [stored(tmp_path, pass_choice("hopper", SHAPE))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "environment", lambda device: Environment("x", 132, "", "", "", ""))
        actual = choices.adopt(device, rows)
    row = actual.fastest("training", torch.bfloat16, 64, True, waves)
    assert row is not None and (row["backend"], row["ms"]) == ("torch", {"hopper": 2, "torch": 1})
    assert actual.fastest("forward", torch.bfloat16, 64, True, waves) is None
    assert actual.passes["hopper", "bfloat16", 64]["passes"] == "two"
