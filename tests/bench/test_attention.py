"""A case through implementations that are right, wrong, unserved, failing or out of memory."""

import warnings
from dataclasses import replace

import pytest
import torch

from fastattn import attention as attend
from fastattn import reference
from fastattn.bench import attention, correctness
from fastattn.bench.attention import Bench, prepare, run_case
from fastattn.bench.cases import Case, gpu_cases
from fastattn.bench.failures import DeviceLost
from fastattn.bench.implementations.implementation import Implementation, Unserved
from fastattn.bench.implementations.registry import (
    IMPLEMENTATIONS,
    ONE_PASS,
    OURS,
    TORCH_PEERS,
    side_by_side,
    why_refused,
)
from fastattn.bench.inputs import make_inputs
from fastattn.bench.measure import Effort, HostTimer
from fastattn.kernels import backward
from fastattn.ops import attend as ops

CASE = Case("forward", "forward", 2, 4, 2, 16, 16, 8, causal=True, dtype="float32", device="cpu")
BACKWARD = replace(CASE, family="backward", direction="forward_backward")
BENCH = Bench(HostTimer(), Effort(warm_up=1, target_ms=0, least=2, most=2, pause=0))


def right(case, inputs):
    return lambda q, k, v: reference.attention(
        q, k, v, causal=case.causal, window=case.window, **inputs.padding()
    )


def wrong(case, inputs):
    good = right(case, inputs)
    return lambda q, k, v: 1.01 * good(q, k, v)


def raising(error):
    def prepare(case, inputs):
        def call(q, k, v):
            raise error

        return call

    return prepare


def implementation(name, prepare, serves=lambda case: None, **options):
    return Implementation(name, serves, prepare, **options)


def outcomes(records):
    return {record["implementation"]: record["status"] for record in records}


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=["forward", "backward"])
def test_every_outcome_is_a_record_and_the_rest_goes_on(case):
    records = run_case(
        case,
        [
            implementation("raises", raising(RuntimeError("illegal instruction"))),
            implementation("memory", raising(torch.OutOfMemoryError("out of memory"))),
            implementation("wrong", wrong),
            implementation("refuses", raising(Unserved("only even lengths"))),
            implementation("absent", right, lambda case: "it is not installed"),
            implementation("torch refuses", raising(RuntimeError("No available kernel. Abort"))),
            implementation("right", right),
        ],
        BENCH,
    )
    assert outcomes(records) == {
        "raises": "failed",
        "memory": "out of memory",
        "wrong": "wrong",
        "refuses": "cannot serve",
        "absent": "cannot serve",
        "torch refuses": "cannot serve",
        "right": "timed",
    }
    by_name = {record["implementation"]: record for record in records}
    assert by_name["raises"]["reason"] == "RuntimeError: illegal instruction"
    assert "exceeds the budget" in by_name["wrong"]["reason"]
    assert by_name["absent"]["reason"] == "it is not installed"
    assert by_name["right"]["ms"]["samples"] == 2
    assert by_name["right"]["tflops"] > 0
    assert all(record["case"]["name"] == case.name for record in records)


def test_what_fails_while_it_is_timed_is_recorded():
    calls = []

    def prepare(case, inputs):
        good = right(case, inputs)

        def call(q, k, v):
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("tired")
            return good(q, k, v)

        return call

    records = run_case(
        CASE, [implementation("tires", prepare), implementation("right", right)], BENCH
    )
    assert outcomes(records) == {"tires": "failed", "right": "timed"}


def test_inputs_that_do_not_fit_are_recorded_for_all():
    def expected(case, inputs):
        raise torch.OutOfMemoryError("too large")

    bench = replace(BENCH, expected=expected)
    found = run_case(CASE, [implementation("a", right), implementation("b", right)], bench)
    assert outcomes(found) == {"a": "out of memory", "b": "out of memory"}


def test_what_ended_a_process_before_is_not_tried_again():
    def prepare(case, inputs):
        raise AssertionError("must not run")

    found = run_case(CASE, [implementation("a", prepare)], BENCH, broken={"a": "ended the process"})
    assert found[0]["status"] == "failed"
    assert found[0]["reason"] == "ended the process"


def test_implementations_are_announced_before_they_run():
    announced = []

    def prepare(case, inputs):
        assert announced[-1] == ("a", "prepares")
        good = right(case, inputs)

        def call(*tensors):
            log.append(announced[-1])
            return good(*tensors)

        return call

    log = []
    run_case(CASE, [implementation("a", prepare)], BENCH, announce=lambda *a: announced.append(a))
    assert announced[0] == ("the reference", "prepares")
    # What is called first compiles; the rest runs on the device.
    assert (log[0], log[-1]) == (("a", "prepares"), ("a", "runs"))


class Fragile(HostTimer):
    """A device whose context can be lost; synchronize() raises from then on."""

    def __init__(self):
        super().__init__()
        self.lost = False

    def break_it(self):
        self.lost = True

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("call", [1, 3])
def test_who_breaks_the_device_is_named(call):
    """In its first call, or in a later one, which raises at the next synchronisation."""
    timer = Fragile()

    def breaks(case, inputs):
        calls = []
        good = right(case, inputs)

        def run(*tensors):
            calls.append(1)
            if len(calls) == call:
                timer.break_it()
            return good(*tensors)

        return run

    found = [implementation("right", right), implementation("breaks", breaks)]
    with pytest.raises(DeviceLost, match="illegal memory access") as lost:
        run_case(CASE, found, replace(BENCH, timer=timer))
    assert lost.value.implementation == "breaks"


def test_a_replay_that_computes_nothing_is_wrong(monkeypatch):
    def record(replays):
        def record_graph(work):
            captured = work()
            return (lambda: captured.copy_(work())) if replays else lambda: None

        return record_graph

    case = replace(CASE, graph=True)
    for replays, outcome in ((True, "timed"), (False, "wrong")):
        monkeypatch.setattr(attention, "record_cuda_graph", record(replays))
        found = run_case(case, [implementation("a", right)], BENCH)
        assert outcomes(found) == {"a": outcome}


def test_the_cause_of_a_failure_is_in_the_record_and_all_of_it_in_the_log(capsys):
    place = "at 1:27: " + "def kernel(): " * 100
    found = run_case(
        CASE, [implementation("a", raising(RuntimeError(f"{place} no such name")))], BENCH
    )
    assert found[0]["reason"].startswith("RuntimeError: at 1:27")
    assert found[0]["reason"].endswith("no such name")
    assert len(found[0]["reason"]) < 450
    log = capsys.readouterr().err
    assert f"a on {CASE.name}" in log
    assert "Traceback" in log and place in log


def test_slow_preparation_is_left_out_with_a_reason():
    slow = implementation("slow", right, slow_to_prepare=True)
    assert slow.why_not(CASE) is None
    assert "compiles for long" in slow.why_not(replace(CASE, slow_peers=False))


def test_backward_runs_its_forward_before():
    case = replace(BACKWARD, direction="backward")
    calls = []

    def prepare_counting(case, inputs):
        good = right(case, inputs)

        def call(q, k, v):
            calls.append(1)
            return good(q, k, v)

        return call

    inputs = make_inputs(case)
    expected = correctness.expect(case, inputs)
    work, _ = prepare(implementation("a", prepare_counting), case, inputs, expected)
    before = len(calls)
    dq, dk, dv = work()
    assert len(calls) == before
    assert (dq.shape, dk.shape, dv.shape) == (inputs.q.shape, inputs.k.shape, inputs.v.shape)


@pytest.mark.parametrize("name", ["fastattn-torch", "sdpa", "naive"])
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        BACKWARD,
        replace(BACKWARD, direction="backward"),
        replace(CASE, lengths=(16, 5)),
        replace(CASE, lengths=(16, 5), padding_side="left", causal=False),
        replace(CASE, window=(3, 2), causal=False),
        replace(CASE, T_q=1),
        replace(CASE, layout="bhtd"),
    ],
    ids=lambda case: f"{case.name}-{case.padding_side}",
)
def test_implementations_of_the_cpu_pass_the_check(name, case):
    found = next(i for i in side_by_side("cpu") if i.name == name)
    inputs = make_inputs(case)
    prepare(found, case, inputs, correctness.expect(case, inputs))


@pytest.mark.parametrize("name", [OURS, ONE_PASS])
def test_triton_passes_the_check(name, device, monkeypatch):
    """In the interpreter where there is no GPU: what the benchmarks call is what they time."""
    ours = next(i for i in IMPLEMENTATIONS if i.name == name)
    launched = []
    monkeypatch.setattr(
        backward,
        "launch_finish_dq",
        lambda *tensors, launch=backward.launch_finish_dq: launched.append(launch(*tensors)),
    )
    case = replace(BACKWARD, lengths=(16, 5), device=device)
    inputs = make_inputs(case)
    prepare(ours, case, inputs, correctness.expect(case, inputs))
    assert bool(launched) == (name == ONE_PASS)
    assert ours.serves(replace(case, device="cuda")) is None
    why_not = ours.serves(replace(CASE, device="cuda"))
    assert why_not == (None if name == OURS else "its forward is that of fastattn-triton")


def test_hopper_kernels_are_asked_what_they_serve(monkeypatch):
    hopper = next(i for i in IMPLEMENTATIONS if i.name == "fastattn-hopper")
    case = replace(CASE, device="cuda", dtype="bfloat16", D=64)
    assert "compute capability 9.0" in hopper.serves(replace(case, device="cpu"))
    monkeypatch.setattr(ops, "on_hopper", lambda device: True)
    assert hopper.serves(case) is None
    assert "head dim 80" in hopper.serves(replace(case, D=80))
    assert "decoding" in hopper.serves(replace(case, family="decode"))
    padded = replace(case, lengths=(16, 5), padding_side="left")
    assert "no key_padding_mask" in hopper.serves(padded)
    one_pass = next(i for i in IMPLEMENTATIONS if i.name == "fastattn-hopper-one-pass")
    backward = replace(BACKWARD, device="cuda", dtype="bfloat16", D=128)
    assert one_pass.serves(backward) is None
    assert one_pass.serves(case) == "its forward is that of fastattn-hopper"
    wide = replace(backward, D=256)
    assert one_pass.serves(wide) == "dK and dV of head dim 256 take a kernel each"
    assert hopper.serves(wide) is None


def test_every_implementation_answers_for_every_case():
    names = [i.name for i in side_by_side("cuda")]
    assert {OURS, *TORCH_PEERS, "sdpa-efficient", "sdpa-math", "naive"} <= set(names)
    for case in gpu_cases("full"):
        for found in side_by_side("cuda"):
            reason = found.why_not(case)
            assert reason is None or reason


def test_scores_that_fill_the_memory_are_left_out():
    naive = next(i for i in IMPLEMENTATIONS if i.name == "naive")
    large = replace(CASE, T_q=2**15, T_k=2**15, B=1, H_q=8)
    assert "scores in memory" in naive.serves(large)


def test_a_refusal_has_torch_s_words():
    inputs = make_inputs(CASE)

    def refuses(q, k, v):
        warnings.warn(
            "Flash attention kernel not used because: (Triggered in sdp.cpp)", stacklevel=1
        )
        warnings.warn(
            "Memory Efficient attention has been runtime disabled. (Triggered)", stacklevel=1
        )
        warnings.warn(
            "Flash does not support non-null attn_mask. (Triggered in sdp.cpp)", stacklevel=1
        )
        raise RuntimeError("No available kernel. Aborting execution.")

    words = "Flash attention kernel not used because: Flash does not support non-null attn_mask."
    assert why_refused(refuses, inputs) == words
    assert why_refused(lambda q, k, v: q, inputs) is None
    with pytest.raises(RuntimeError, match="boom"):
        why_refused(raising(RuntimeError("boom"))(CASE, inputs), inputs)


@pytest.mark.gpu
def test_pinned_backends_say_why_they_refuse():
    flash = next(i for i in IMPLEMENTATIONS if i.name == "sdpa-flash")
    case = replace(CASE, lengths=(16, 5), device="cuda", dtype="bfloat16")
    with pytest.raises(Unserved, match="mask"):
        flash.prepare(case, make_inputs(case))


@pytest.mark.gpu
def test_flex_passes_the_check_or_says_why():
    case = replace(BACKWARD, T_q=256, T_k=256, D=64, device="cuda", dtype="bfloat16")
    found = run_case(case, [i for i in side_by_side("cuda") if i.name == "flex"], BENCH)
    assert found[0]["status"] == "timed", found


def test_decoding_reads_a_case_as_a_cache() -> None:
    """The call under the timer is decode_attention, on the case's own memory."""
    case = replace(
        CASE, family="decode", direction="forward", T_q=1, causal=True, layout="bhtd", lengths=None
    )
    inputs = make_inputs(case)
    ours = next(i for i in IMPLEMENTATIONS if i.name == "fastattn-torch")
    call = ours.prepare(case, inputs)
    found = call(inputs.q, inputs.k, inputs.v)
    expected = attend(inputs.q, inputs.k, inputs.v, causal=True, backend="torch")
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        inputs.k[:, :, -1] += 1
    assert not torch.equal(call(inputs.q, inputs.k, inputs.v), found)


def test_decoding_covers_batches_caches_and_heads_with_and_without_graphs() -> None:
    cases = [case for case in gpu_cases("full") if case.family == "decode"]
    grid = {(c.B, c.T_k, c.H_q, c.graph) for c in cases}
    assert len(grid) == len(cases) == 64
    assert {c.name for c in cases if c.graph}.isdisjoint(c.name for c in cases if not c.graph)
    assert {c.dtype for c in cases} == {"bfloat16"}
