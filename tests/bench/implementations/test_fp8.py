"""FP8 attention in the benchmarks: what it serves, what is timed, and its own check."""

from dataclasses import replace

import pytest
import torch

from fastattn.bench.attention import prepare
from fastattn.bench.cases import Case
from fastattn.bench.correctness import expect
from fastattn.bench.implementations.fp8 import EIGHT_BITS
from fastattn.bench.inputs import make_inputs
from fastattn.kernels.hopper import forward
from fastattn.ops import attend, fp8
from fastattn.testing.gluon_emulator import Emulated

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Case("forward", "forward", 2, 4, 2, 70, 130, 64, causal=True, dtype="bfloat16", device="cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Emulated(forward.hopper_forward_kernel)
    monkeypatch.setattr(forward, "hopper_forward_kernel", kernel)
    monkeypatch.setattr(attend, "on_hopper", lambda device: True)


def test_both_are_measured():
    names = [found.name for found in EIGHT_BITS]
    assert names == ["fastattn-hopper-fp8", "fastattn-hopper-fp8-packed"]


@pytest.mark.parametrize("found", EIGHT_BITS, ids=lambda found: found.name)
def test_says_what_it_does_not_serve(found, monkeypatch):
    assert "compute capability 9.0" in found.serves(CASE)
    monkeypatch.setattr(attend, "on_hopper", lambda device: True)
    assert found.serves(CASE) is None
    assert "no backward" in found.serves(replace(CASE, direction="forward_backward"))
    assert "decoding" in found.serves(replace(CASE, family="decode"))
    assert "key_padding_mask" in found.serves(replace(CASE, lengths=(130, 7), padding_side="left"))
    assert "out_dtype is float32" in found.serves(replace(CASE, dtype="float32"))
    assert "head dim 80" in found.serves(replace(CASE, D=80))


@pytest.mark.parametrize("found", EIGHT_BITS, ids=lambda found: found.name)
@pytest.mark.parametrize(
    "case",
    [CASE, replace(CASE, causal=False, window=(50, 9)), replace(CASE, lengths=(130, 61))],
    ids=lambda case: f"{case.name}-{case.lengths}",
)
def test_passes_its_check(found, case, emulated):
    inputs = make_inputs(case)
    work, _ = prepare(found, case, inputs, expect(case, inputs))
    o = work()
    assert o.shape == (2, 4, 70, 64) and o.dtype == torch.bfloat16


def test_what_is_packed_is_not_packed_in_the_timer(emulated, monkeypatch):
    packed = []
    pack = fp8.pack
    monkeypatch.setattr(fp8, "pack", lambda *given: packed.append(1) or pack(*given))
    inputs = make_inputs(CASE)
    for found, passes in zip(EIGHT_BITS, (1, 0), strict=True):
        work, _ = prepare(found, CASE, inputs, expect(CASE, inputs))
        packed.clear()
        work()
        assert len(packed) == passes


@pytest.mark.parametrize("head", [(0, 0), (1, 3)])
def test_the_check_finds_a_wrong_head(head, emulated, monkeypatch):
    attend = fp8.attend

    def wrong(*arguments):
        o, lse = attend(*arguments)
        o[head] *= 1.2
        return o, lse

    monkeypatch.setattr(fp8, "attend", wrong)
    inputs = make_inputs(CASE)
    with pytest.raises(AssertionError, match="o: error"):
        prepare(EIGHT_BITS[0], CASE, inputs, expect(CASE, inputs))
