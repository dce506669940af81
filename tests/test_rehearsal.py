"""A dress rehearsal of the GPU path without a GPU: what no interpreter sees of it.

Triton's own driver specialises, compiles, packs arguments and launches, into a stand-in for
NVIDIA's that checks grids, shared memory and TMA descriptors and computes nothing. See
`tests/rehearsal/`.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

Played = dict[str, list[dict[str, Any]]]
# What the rehearsal has to say of each of `tests/rehearsal/faults.py`.
FAULTS = {
    "batch size": r"compiled again for another shape: \['fill'\]",
    "no launch": "launched nothing",
    "grid": "a grid of 1 x 65536 x 1 programs",
    "read while captured": "item while a CUDA graph is captured",
    "descriptor's stride": r"a descriptor's stride \d is 136 bytes",
    "descriptor's address": r"a descriptor's address 0x\w+ is no multiple of 16",
    "shared memory": r"\d+ bytes of shared memory, of 64|out of resource",
}


@pytest.fixture(scope="module")
def played(rehearse: Callable[..., Played]) -> Played:
    return rehearse("launches.attention_calls", "running.calls", "faults.planted")


@pytest.mark.parametrize("part", ["launches.attention_calls", "running.calls"])
def test_every_call_reaches_the_gpu(part: str, played: Played) -> None:
    assert played[part]
    assert {scene["name"]: scene["faults"] for scene in played[part] if scene["faults"]} == {}


def test_attention_does_not_wait_for_the_gpu(played: Played) -> None:
    scenes = played["launches.attention_calls"]
    assert {scene["name"]: scene["syncs"] for scene in scenes if scene["syncs"]} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, played: Played) -> None:
    faults = next(x["faults"] for x in played["faults.planted"] if x["name"] == fault)
    assert len(faults) == 1
    assert re.search(FAULTS[fault], faults[0]), faults
