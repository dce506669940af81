"""A case through implementations that are right, wrong, unserved, failing or out of memory."""

import warnings
from dataclasses import replace

import pytest
import torch

from fastattn import dispatch, reference
from fastattn.bench.cases import correctness
from fastattn.bench.cases.case import Case
from fastattn.bench.cases.inputs import CACHES, Implementation, Unserved, make_inputs
from fastattn.bench.cases.registry import BY_NAME, ON_CPU, ONE_PASS, PORTABLE, try_pinned
from fastattn.bench.cases.sets import every_row
from fastattn.bench.time import attention
from fastattn.bench.time.attention import prepare, run_case
from fastattn.bench.time.samples import Bench, Effort, HostTimer
from fastattn.kernels import backward

CASE = Case("forward", "forward", 2, 4, 2, 16, 16, 8, causal=True, dtype="float32", device="cpu")
BACKWARD = replace(CASE, family="backward", direction="forward_backward")
BENCH = Bench(HostTimer(), Effort(warm_up=1, target_ms=0, least=2, most=2, pause=0))


def right(case, inputs):
    options = {"causal": case.causal, "window": case.window, **inputs.padding()}
    return lambda q, k, v: reference.attention(q, k, v, **options)


def calling(before, factor=1.0):
    """Prepares a right function that calls before(n) in its n-th call."""

    def prepare(case, inputs):
        good, calls = right(case, inputs), []

        def call(*tensors):
            calls.append(1)
            before(len(calls))
            return factor * good(*tensors)

        return call

    return prepare


def raising(error, first=1):
    def before(n):
        if n >= first:
            raise error

    return calling(before)


def outcomes(case, bench=BENCH, **prepares):
    """Records by implementation."""
    several = [Implementation(name, lambda case: None, f) for name, f in prepares.items()]
    return {record["implementation"]: record for record in run_case(case, several, bench)}


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=["forward", "backward"])
def test_every_outcome_is_a_record_and_the_rest_goes_on(case, capsys):
    place = "at 1:27: " + "def kernel(): " * 100
    expected = {
        "raises": (raising(RuntimeError("illegal\ninstruction")), "failed"),
        "long": (raising(RuntimeError(f"{place} no such name")), "failed"),
        "tires": (raising(RuntimeError("tired"), first=4), "failed"),
        "memory": (raising(torch.OutOfMemoryError("out of memory")), "out of memory"),
        "wrong": (calling(lambda n: None, factor=1.01), "wrong"),
        "refuses": (raising(Unserved("only even lengths")), "cannot serve"),
        "right": (right, "timed"),
    }
    results = outcomes(case, **{name: prepare for name, (prepare, _) in expected.items()})
    assert {n: r["status"] for n, r in results.items()} == {n: s for n, (_, s) in expected.items()}
    assert results["raises"]["reason"] == "RuntimeError: illegal instruction"
    assert "exceeds the budget" in results["wrong"]["reason"]
    assert (results["right"]["ms"]["samples"], results["right"]["tflops"] > 0) == (2, True)
    assert all(record["case"]["name"] == case.name for record in results.values())
    # The record has where a compiler's message begins and the cause at its end, the log all.
    reason = results["long"]["reason"]
    assert reason.startswith("RuntimeError: at 1:27") and reason.endswith("no such name")
    log = capsys.readouterr().err
    assert len(reason) < 450 and "\nlong:\nTraceback" in log and place in log


def test_who_does_not_run_has_a_reason():
    def expected(case, inputs):
        raise torch.OutOfMemoryError("too large")

    never = raising(AssertionError)
    absent = Implementation("absent", lambda case: "it is not installed", never)
    broken, too_large = (Implementation(name, lambda case: None, never) for name in ("a", "b"))
    bench = replace(BENCH, broken={"a": "ended the process"}, expected=expected)
    actual = run_case(CASE, [absent, broken, too_large], bench)
    assert [(record["status"], record["reason"]) for record in actual] == [
        ("cannot serve", "it is not installed"),
        ("failed", "ended the process"),
        ("out of memory", "too large"),
    ]


def test_implementations_are_announced_before_they_run():
    announced, log = [], []
    bench = replace(BENCH, announce=lambda *told: announced.append(told))
    outcomes(CASE, bench, a=calling(lambda n: log.append(announced[-1])))
    assert announced[:2] == [("the reference", "prepares"), ("a", "prepares")]
    # What is called first compiles; the rest runs on the device.
    assert (log[0], log[-1]) == (("a", "prepares"), ("a", "runs"))


@pytest.mark.parametrize(("replays", "outcome"), [(True, "timed"), (False, "wrong")])
def test_a_replay_that_computes_nothing_is_wrong(replays, outcome, monkeypatch):
    def into_its_output(case, inputs):
        compute, o = right(case, inputs), torch.empty_like(inputs.q)
        return lambda *tensors: o.copy_(compute(*tensors))

    def record_graph(work):
        work()
        return work if replays else lambda: None

    monkeypatch.setattr(attention, "record_cuda_graph", record_graph)
    assert outcomes(replace(CASE, graph=True), a=into_its_output)["a"]["status"] == outcome


def test_backward_runs_its_forward_before():
    case, calls = replace(BACKWARD, direction="backward"), []
    inputs = make_inputs(case)
    one = Implementation("a", lambda case: None, calling(calls.append))
    work, _ = prepare(one, case, inputs, correctness.expect(case, inputs))
    before = len(calls)
    assert [x.shape for x in work()] == [inputs.q.shape, inputs.k.shape, inputs.v.shape]
    assert len(calls) == before


@pytest.mark.parametrize(
    "case",
    [
        replace(BACKWARD, direction="backward"),
        replace(CASE, lengths=(16, 5)),
        replace(CASE, lengths=(16, 5), padding_side="left", causal=False),
        replace(CASE, window=(3, 2), causal=False),
        replace(CASE, family="decode", T_q=1, layout="bhtd"),
    ],
    ids=lambda case: f"{case.name}-{case.padding_side}",
)
def test_implementations_of_the_cpu_pass_the_check(case):
    actual = run_case(case, ON_CPU, BENCH)
    assert [record["implementation"] for record in actual] == ["fastattn-torch", "sdpa", "naive"]
    assert {record["status"] for record in actual} == {"timed"}, actual


@pytest.mark.parametrize("cache", CACHES)
def test_caches_have_the_keys_and_values_of_the_oracle(cache):
    """Codes too, which the case's dtype has exactly."""
    sizes = {"H_q": 4, "H_k": 1, "D": 576} if cache == "latent" else {"D": 16}
    case = replace(CASE, family="decode", T_q=1, T_k=128, layout="bhtd", option=cache, **sizes)
    case = replace(case, dtype="bfloat16")
    (record,) = run_case(case, [BY_NAME["fastattn-torch"]], BENCH)
    assert record["status"] == "timed", record
    inputs = make_inputs(case)
    assert (inputs.view.block_table is None) == (cache != "paged")
    assert (inputs.view.k_scale is None) == (cache not in ("int8", "fp8"))
    expected = correctness.expect(case, inputs)
    inputs.view.lengths.sub_(40)
    with pytest.raises(AssertionError, match="o: error"):
        prepare(BY_NAME["fastattn-torch"], case, inputs, expected)


@pytest.mark.parametrize("name", [PORTABLE, ONE_PASS])
def test_triton_passes_the_check(name, device, monkeypatch):
    """In the interpreter where there is no GPU: what the benchmarks call is what they time."""
    launched, launch = [], backward.launch_finish_dq
    monkeypatch.setattr(backward, "launch_finish_dq", lambda *x: launched.append(launch(*x)))
    case = replace(BACKWARD, lengths=(16, 5), device=device)
    inputs = make_inputs(case)
    prepare(BY_NAME[name], case, inputs, correctness.expect(case, inputs))
    assert bool(launched) == (name == ONE_PASS)
    assert BY_NAME[name].serves(replace(case, device="cuda")) is None
    why_not = BY_NAME[name].serves(replace(CASE, device="cuda"))
    assert why_not == (None if name == PORTABLE else "it has the forward of fastattn-triton")


def test_hopper_kernels_say_what_they_do_not_serve(monkeypatch):
    """In a case without a backward, of another head dim, in decoding, and in one pass."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    hopper, one_pass = BY_NAME["fastattn-hopper"], BY_NAME["fastattn-hopper-one-pass"]
    case = replace(CASE, dtype="bfloat16", D=84)
    (record,) = run_case(case, [hopper], BENCH)
    assert record["status"] == "cannot serve" and "head dim 84" in record["reason"]
    assert "decoding" in hopper.serves(replace(case, family="decode"))
    assert one_pass.serves(case) == "it has the forward of fastattn-hopper"
    wide = replace(BACKWARD, dtype="bfloat16", D=256)
    with pytest.raises(Unserved, match="dK and dV of head dim 256 need a kernel each"):
        one_pass.prepare(wide, make_inputs(wide))
    one_pass.prepare(replace(wide, D=128), make_inputs(replace(wide, D=128)))


def test_every_implementation_answers_for_every_case():
    rows = list(every_row("full"))
    assert all(one.serves(case) != "" for case, _ in rows for one in BY_NAME.values())
    large = replace(CASE, T_q=2**15, T_k=2**15, B=1, H_q=8, device="cuda", dtype="bfloat16")
    assert "scores in memory" in BY_NAME["naive"].serves(large)
    assert BY_NAME["flex"].serves(large) is None
    for peer in ("flex", "sdpa-cudnn", "sdpa"):
        assert BY_NAME[peer].serves(replace(large, option="documents")) is None
        assert BY_NAME[peer].serves(replace(large, option="sinks")) == "it has no sinks"


def test_auto_is_blamed_and_excluded_as_the_kernels_that_it_chooses(monkeypatch):
    """It counts as one with the backend of this case, whose name its record has."""
    announced = []
    auto = Implementation("auto", lambda case: None, right, chooses=lambda case, inputs: "chosen")
    bench = replace(BENCH, announce=lambda *told: announced.append(told[0]))
    (record,) = run_case(CASE, [auto], bench)
    assert (record["status"], record["kernels"]) == ("timed", "chosen")
    assert {*announced} == {"the reference", "chosen"}
    (record,) = run_case(CASE, [auto], replace(bench, broken={"chosen": "hung"}))
    assert (record["status"], record["reason"]) == ("failed", "hung")
    (record,) = run_case(CASE, [auto], replace(bench, broken={"auto": "hung"}))
    assert record["status"] == "timed"
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    ours, inputs = BY_NAME["fastattn"], make_inputs(CASE)
    assert ours.chooses(CASE, inputs) == "fastattn-triton"  # in fp32; kernels are interpreted here


def test_a_refusal_has_torch_s_words():
    inputs = make_inputs(CASE)

    def refuses(q, k, v):
        for words in ("Flash not used because:", "It has been disabled.", "it takes no mask."):
            warnings.warn(f"{words} (Triggered in sdp.cpp)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(Unserved, match=r"^Flash not used because: it takes no mask\.$"):
        try_pinned(refuses, inputs)
    works, fails = right(CASE, inputs), raising(RuntimeError("boom"))(CASE, inputs)
    assert try_pinned(works, inputs) is works
    with pytest.raises(RuntimeError, match="boom"):
        try_pinned(fails, inputs)


@pytest.mark.gpu
def test_peers_pass_the_check_or_say_why():
    case = replace(CASE, lengths=(16, 5), device="cuda", dtype="bfloat16")
    with pytest.raises(Unserved, match="mask"):
        BY_NAME["sdpa-flash"].prepare(case, make_inputs(case))
    case = replace(BACKWARD, T_q=256, T_k=256, D=64, device="cuda", dtype="bfloat16")
    actual = run_case(case, [BY_NAME["flex"]], BENCH)
    assert actual[0]["status"] == "timed", actual
