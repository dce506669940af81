"""The rehearsal of `test_rehearsal.py`, for caches, 8-bit numbers and the kernels for Hopper."""

from collections.abc import Callable
from typing import Any

import pytest

Played = dict[str, list[dict[str, Any]]]
PARTS = ("launches.cache_calls", "launches.hopper_calls")


@pytest.fixture(scope="module")
def played(rehearse: Callable[..., Played]) -> Played:
    return rehearse(*PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_every_call_reaches_the_gpu(part: str, played: Played) -> None:
    assert played[part]
    assert {scene["name"]: scene["faults"] for scene in played[part] if scene["faults"]} == {}


@pytest.mark.parametrize("part", PARTS)
def test_no_call_waits_for_the_gpu(part: str, played: Played) -> None:
    assert {scene["name"]: scene["syncs"] for scene in played[part] if scene["syncs"]} == {}
