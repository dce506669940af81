"""Generated layers, their calls and their steps over caches, against naive formulas."""

import inspect
import os
import sys

import pytest
import torch
from fuzz.layer_judges import check_layer
from fuzz.layers import CALLS, KINDS, TAKES, drawn_layer

import fastattn.modules.sparse
from fastattn import CausalGQAttention

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))
# Backends by how many tests there are, and layers in each.
BUDGET = {"torch": (4, 100), "triton": (2, 6)}


@pytest.mark.parametrize(
    ("backend", "turn"),
    [(backend, turn) for backend, (turns, _) in BUDGET.items() for turn in range(turns)],
)
def test_generated_layers(backend: str, turn: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("layers are drawn on a CPU, for torch and the interpreter")
    count = BUDGET[backend][1]
    for seed in range(FIRST + turn * count, FIRST + (turn + 1) * count):
        case = drawn_layer(seed, backend)
        sys.stdout.write(f"make fuzz SEED={seed} BACKEND={backend}\n{case}\n")
        check_layer(case)


def test_every_layer_option_and_argument_is_generated() -> None:
    public = [*vars(fastattn).values(), *vars(fastattn.modules.sparse).values()]
    classes = [x for x in public if isinstance(x, type) and issubclass(x, torch.nn.Module)]
    layers = {x for x in classes if x.__module__.startswith("fastattn.modules.")}
    assert layers == {*KINDS.values(), CausalGQAttention}
    cases = [drawn_layer(seed, "torch") for seed in range(400)]
    for kind, layer in KINDS.items():
        drawn = [case for case in cases if case.kind == kind]
        assert {name for case in drawn for name in case.options} == TAKES[kind]
        assert {name for case in drawn for name in case.call} == {*CALLS[kind]}
        taken = inspect.signature(layer.forward).parameters
        beside = {"self", "x", "memory", "unnamed", "others", "cache", "absorbed"}
        assert taken.keys() - beside == {*CALLS[kind]}
