"""FP8 attention in the benchmarks: what it serves, what is timed, and its own check."""

from dataclasses import replace

import pytest
import torch
from gluon_emulator import Emulated

from fastattn import dispatch
from fastattn.bench.cases.case import Case
from fastattn.bench.cases.correctness import expect
from fastattn.bench.cases.fp8 import EIGHT_BITS
from fastattn.bench.cases.inputs import make_inputs
from fastattn.bench.time.attention import prepare, run_case
from fastattn.bench.time.samples import Bench, HostTimer
from fastattn.kernels.hopper import forward
from fastattn.ops import fp8

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Case("forward", "forward", 2, 4, 2, 70, 130, 64, causal=True, dtype="bfloat16", device="cpu")
BOTH = pytest.mark.parametrize("kind", EIGHT_BITS, ids=lambda x: x.name)


@pytest.fixture
def emulated(monkeypatch):
    kernel = Emulated(forward.hopper_forward_kernel)
    monkeypatch.setattr(forward, "hopper_forward_kernel", kernel)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)


@BOTH
def test_says_what_it_does_not_serve(kind, emulated):
    assert kind.serves(CASE) is None
    changes = ({"direction": "forward_backward"}, {"family": "decode"}, {"option": "alibi_slopes"})
    for change in (*changes, {"D": 80}, {"lengths": (130, 7), "padding_side": "left"}):
        assert "only" in kind.serves(replace(CASE, **change))
    (record,) = run_case(replace(CASE, dtype="float32"), [kind], Bench(HostTimer()))
    assert record["status"] == "cannot serve" and "out_dtype is float32" in record["reason"]


@BOTH
@pytest.mark.parametrize("options", [{"window": (50, 9), "causal": False}, {"lengths": (130, 61)}])
def test_passes_its_check_and_packs_outside_the_timer(kind, options, emulated, monkeypatch):
    packed, pack = [], fp8.pack
    monkeypatch.setattr(fp8, "pack", lambda *arguments: packed.append(1) or pack(*arguments))
    case = replace(CASE, **options)
    inputs = make_inputs(case)
    work, _ = prepare(kind, case, inputs, expect(case, inputs))
    packed.clear()
    o, _ = work()
    assert o.shape == (2, 4, 70, 64) and o.dtype == torch.bfloat16
    assert kind.name == f"fastattn-hopper-fp8{'' if packed else '-packed'}"


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
