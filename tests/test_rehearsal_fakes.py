"""The rehearsal on fake CUDA tensors: devices of whatever meets, and waits for the GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Played = dict[str, list[dict[str, Any]]]
# What the rehearsal has to say of those that `tests/rehearsal/fakes.py` plants.
FAULTS = {
    "tensor on the CPU": "attention_forward_kernel is launched on tensors of ['cpu', 'cuda:0']",
    "read on the way": "DataDependentOutputException: aten._local_scalar_dense",
    "no fake": "There was no fake impl registered for <CustomOpDef(rehearsal::double)>",
}
PATHS = ("fakes.direct_path", "fakes.op_path")


@pytest.fixture(scope="module")
def played(rehearse: Callable[..., Played]) -> Played:
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch is built for GPUs, so its devices are none that can be replaced")
    return rehearse(*PATHS, "fakes.planted")


@pytest.mark.parametrize("path", PATHS)
def test_every_public_call_keeps_to_the_gpu(path: str, played: Played) -> None:
    assert played[path]
    assert {scene["name"]: scene["faults"] for scene in played[path] if scene["faults"]} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, played: Played) -> None:
    faults = next(x["faults"] for x in played["fakes.planted"] if x["name"] == fault)
    assert len(faults) == 1
    assert FAULTS[fault] in faults[0]
