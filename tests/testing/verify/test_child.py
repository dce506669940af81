"""Messages of a child that verifies, by which its parent tells a hang from a compilation."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import compiling_for
from fastattn.testing.supervision import STALL
from fastattn.testing.verify import child
from fastattn.testing.verify.case import Case, Subject


@triton.jit
def zero(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, 0.0)


def compiled_twice() -> list[Any]:
    """Messages of two launches of a kernel, and a mark between them."""
    told: list[Any] = []
    with compiling_for("sm_90"), child.telling_of_compilations(lambda **x: told.append(x)):
        for _ in range(2):
            zero[(1,)](torch.empty(1))
            told.append("launched")
    return told


def test_a_kernel_may_compile_for_long_and_must_run_in_seconds(compile_pool: CompilePool) -> None:
    told = compile_pool.call(f"{Path(__file__)}:compiled_twice", "sm_90")
    assert told == [{"doing": "prepares"}, {"doing": "runs"}, "launched", "launched"]
    assert STALL["runs"] <= 8 < 60 <= STALL["prepares"]


@pytest.mark.parametrize(("device", "doing"), [("cuda", "runs"), ("cpu", "prepares")])
def test_a_case_runs_from_its_begin(
    device: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    cases = [Case("a case", lambda _: 0.5)]
    monkeypatch.setitem(child.FAMILIES["triton"], "forward", lambda: iter(cases))
    subject = Subject("triton", "forward", "bfloat16", 64)
    child.run(subject, ["a case"], torch.device(device), lambda **x: told.append(x))
    assert told[0] == {"at": "a case", "doing": doing}
    assert told[1]["outcome"].share == 0.5
