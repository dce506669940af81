"""`fastattn verify`: broken kernels are named, kept and forgotten; an installed wheel does it."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_hopper import forget
from fake_child import FakeChild
from triton import TritonError

import fastattn
from fastattn.cli.main import main
from fastattn.functional.call_options import dense_options
from fastattn.kernels import forward
from fastattn.kernels.hopper.host import why_not_hopper
from fastattn.ops import attention_ops
from fastattn.testing.budget import PastBudget, assert_within_budget
from fastattn.testing.inputs import draws, make_qkv
from fastattn.testing.option_examples import option_examples
from fastattn.testing.supervision import Ended
from fastattn.testing.verify import attention, caches, child, scoring, verification
from fastattn.testing.verify import case as cases_of_families
from fastattn.testing.verify.case import Case, Setting, Subject, same_bits
from fastattn.testing.verify.cases import FAMILIES, Scope
from fastattn.testing.verify.verdicts import Outcome, finding, still_holds
from fastattn.tuned import choices
from fastattn.tuned.environment import environment
from fastattn.tuned.store import Store

CHECKOUT = Path(__file__).resolve().parents[3]
REFUSED = 'backend "hopper" cannot serve this call: head dim 40 is not 64, 128 or 256'
NANS = partial(assert_within_budget, "o", ref=torch.ones(3).double(), naive=torch.ones(3))
DRAWN = draws()
SUBJECT = Subject("triton", "forward", "bfloat16", 64)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.skip("kernels are broken in the interpreter")
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    # This very process, so that kernels can be broken for it.
    here = partial(child.serve, torch.device("cpu"))
    monkeypatch.setattr(verification, "_start", lambda device, children: FakeChild(here))
    monkeypatch.setattr(verification, "_children", lambda device: 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Replaces what the forward kernel gives by a function of it."""
    launch = forward.launch_forward

    def replace(change: Callable[..., Any]) -> None:
        monkeypatch.setattr(forward, "launch_forward", lambda *x: change(*launch(*x)))
        monkeypatch.setattr(forward, "prepare_forward", lambda *_: None)

    forget()
    yield replace
    forget()


def stored() -> list[dict[str, Any]]:
    return Store(environment("cpu")).read("verification")


def test_what_is_right_is_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "found.json"
    command = ["verify", "--quick", "--family", "fp8", "append", "--export", str(file)]
    assert main(command) == 0
    written = capsys.readouterr()
    table = [line.split()[:2] for line in written.out.splitlines()[:3]]
    assert table == [["backend", "family"], ["triton", "append"], ["triton", "fp8"]]
    assert "6 cases of 2 kinds of kernels: all are within their budgets" in written.out
    left_out = "Not checked without a GPU: compiled kernels"
    assert left_out in written.out and left_out in (CHECKOUT / "docs" / "gpu.md").read_text()
    assert "interpreted" in written.err and "2/2 triton fp8 bfloat16 64: right" in written.err
    rows = json.loads(file.read_text())["verification"]
    assert rows == stored()
    found = [(x["family"], x["cases"], x["verdict"]) for x in rows]
    assert found == [("append", 2, "right"), ("fp8", 4, "right")]
    # A run that goes on skips what has a verdict, and nothing begins without time.
    device = torch.device("cpu")
    scope = verification.scope_of(device, quick=True, families=["append", "fp8"])
    assert not list(verification.run(scope, device, again=False))
    assert not list(verification.run(scope, device, left=lambda: 0.0))


def test_a_broken_kernel_is_named_and_kept(
    launched: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(lambda o, lse: (o * 1.1, lse))
    assert main(["verify", "--quick", "--family", "packed"]) == 1
    line = capsys.readouterr().out.splitlines()[2]
    assert re.match(r"triton packed bfloat16 64: wrong: causal: o: error .* exceeds the", line)
    (row,) = stored()
    assert (row["family"], row["verdict"], row["case"]) == ("packed", "wrong", "causal")
    assert row["share"] > 1 and row["reason"].startswith("o: error")
    # Of a case that the next run, in which all is right, lacks.
    Store(environment("cpu")).put("verification", row | {"case": "many sequences"})
    monkeypatch.setattr(child, "outcome", lambda case, _: Outcome(case.name, "right", 0.1, ""))
    assert main(["verify", "--quick", "--family", "packed"]) == 0
    assert [x["case"] for x in stored()] == ["many sequences"]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (lambda _: 0.3, ("right", 0.3, "")),
        (raising(PastBudget("dq: error", 4.0)), ("wrong", 4.0, "dq: error")),
        (lambda _: NANS(torch.empty(3)), ("wrong", None, "o has NaN or inf")),
        (lambda _: same_bits(lambda: (DRAWN(3),)), ("wrong", None, "results [0] differ bitwise")),
        (raising(RuntimeError("address")), ("crash", None, "RuntimeError: address")),
        (raising(TritonError("tl.dot")), ("no compile", None, "TritonError: tl.dot")),
        (raising(RuntimeError("PassManager::run failed")), ("no compile", None, "PassManager")),
        (raising(torch.OutOfMemoryError("full")), ("unserved", None, "OutOfMemoryError: full")),
        (raising(ValueError(REFUSED)), ("unserved", None, REFUSED)),
        (raising(ValueError("q must be")), ("crash", None, "ValueError: q must be")),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_what_comes_of_a_case(check: Any, expected: tuple[Any, ...]) -> None:
    actual = child.outcome(Case("x", check), Setting(SUBJECT, torch.device("cpu")))
    assert actual[:3] == ("x", *expected[:2])
    assert expected[2] in actual.reason


def test_verdicts_are_forgotten(launched: Any, capsys: pytest.CaptureFixture) -> None:
    launched(raising(RuntimeError("an illegal memory access")))
    actual = fastattn.verify(families=["forward"], dtypes=["float32"])
    assert [(*x[:4], x.verdict) for x in actual] == [("triton", "forward", "float32", 64, "crash")]
    assert len(stored()) == 1
    assert main(["verify", "--clear"]) == 0
    assert "forgot" in capsys.readouterr().out
    assert stored() == []


def test_a_pass_of_other_cases_lifts_no_verdict() -> None:
    failed = {"verdict": "wrong", "case": "many heads"}
    other, same = (Outcome(x, "right", 0.1, "") for x in ("full", "many heads"))
    assert still_holds(failed, [other])
    assert not still_holds(failed, [other, same])
    assert not still_holds(failed, [other, Outcome("full", "hang", None, "")])
    assert not still_holds({"verdict": "right", "case": "full"}, [other])


def test_the_worst_case_is_the_verdict() -> None:
    right, more = Outcome("a", "right", 0.2, ""), Outcome("b", "right", 0.4, "")
    wrong, nan = Outcome("c", "wrong", 3.0, "off"), Outcome("d", "wrong", None, "NaN")
    crash, none = Outcome("e", "crash", None, "lost"), Outcome("f", "unserved", None, "")
    assert finding(SUBJECT, [none]) is None
    worst = {(right, more, none): "b", (right, wrong): "c", (wrong, nan): "d", (nan, crash): "e"}
    for outcomes, case in worst.items():
        actual = finding(SUBJECT, outcomes)
        assert actual is not None and actual.case == case
        assert actual.cases == len(outcomes) - (none in outcomes)


@pytest.mark.parametrize("check", [lambda _: 0.3, raising(ValueError(REFUSED))])
def test_a_hopper_kernel_that_was_left_did_not_compile(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that meets it is served by other kernels, and the next one is refused."""
    monkeypatch.setattr(attention_ops, "uncompiled", ["one of its kernels does not compile here"])
    actual = child.outcome(Case("x", check), Setting(SUBJECT, torch.device("cpu")))
    assert actual == ("x", "no compile", None, "one of its kernels does not compile here")
    assert attention_ops.uncompiled == []


def test_the_scopes() -> None:
    """A full verification has every kind, a quick one part of it; names of cases are unique."""
    whole, quick = Scope(), Scope(quick=True)
    portable, hopper = FAMILIES["triton"], FAMILIES["hopper"]
    count = 15 * 9 + 3 * 2 + len(hopper) * 6
    assert len(whole.subjects()) == len(set(whole.subjects())) == count
    assert set(quick.subjects()) < set(whole.subjects())
    seldom = {x for x in hopper if x.startswith("one-pass+")}
    named = {(x.backend, x.family) for x in quick.subjects()}
    kinds = {("hopper", x) for x in hopper if x not in seldom}
    assert named == kinds | {("triton", x) for x in portable}
    assert {x.family for x in Scope(interpreted=True).subjects()} == set(portable)
    for subject in quick.subjects():
        names = [case.name for case in whole.cases(subject)]
        assert len(names) == len(set(names))
        assert {case.name for case in quick.cases(subject)} <= set(names)
        assert quick.cases(subject)


def test_the_most_used_kernels_are_verified_first() -> None:
    families = list(dict.fromkeys((x.backend, x.family) for x in Scope(quick=True).subjects()))
    first = ("forward", "backward", "backward+parts", "one-pass", "forward+packed")
    assert families[:5] == [("hopper", x) for x in first]
    begin = families.index(("triton", "decode"))
    assert {backend for backend, _ in families[:begin]} == {"hopper"}
    assert families[begin + 1 : begin + 3] == [("triton", "append"), ("triton", "forward")]
    assert Scope(("triton",)).subjects()[0].family == "forward"


@pytest.mark.parametrize(
    ("told", "at", "why", "hung", "worst"),
    [
        ([["a", "right", 0.1, ""]], "a", "", False, "right"),
        ([["a", "right", 0.1, ""]], "b", "made no progress", True, "hang"),
        ([], "a", "ended by SIGSEGV", False, "crash"),
        # It lost the device, has said so, and ended its process.
        ([["a", "crash", None, "illegal"]], "a", "ended with exit code 3", False, "crash"),
    ],
)
def test_a_case_that_ends_its_process_has_an_outcome(
    told: Any, at: str, why: str, hung: bool, worst: str
) -> None:
    ended = Ended((SUBJECT, ["a", "b"]), [{"outcome": x} for x in told], at, why, hung)
    subject, actual = verification.outcomes_of(ended)
    assert (subject, actual[-1].verdict, actual[-1].case) == (SUBJECT, worst, at)
    assert len(actual) == len({x.case for x in actual})


def test_calls_go_by_verdicts_on_these_families() -> None:
    """Every family that a call asks for has cases: of Hopper's kernels, if they serve the call."""
    asked = set()
    for H_k, D_v in ((4, 64), (2, 64), (4, 56)):
        q, k, v = (torch.zeros(2, *x) for x in ((4, 20, 64), (H_k, 24, 64), (H_k, 24, D_v)))
        for example in option_examples(4, H_k, 20, 24, 64, reach=3).values():
            checked = dense_options(q, k, v, **example)
            named = choices.families("triton", q, k, v, checked, training=True)
            assert set(named) <= set(FAMILIES["triton"])
            if (bias := checked.attn_bias) is not None:
                checked = checked._replace(attn_bias=bias.bfloat16())
            qkv = q.bfloat16(), k.bfloat16(), v.bfloat16()
            if why_not_hopper(*qkv, checked) is None:
                asked |= {*choices.families("hopper", *qkv, checked, training=True)}
    assert asked <= set(FAMILIES["hopper"])
    directions = [x for x in FAMILIES["hopper"] if x.startswith(("forward", "backward"))]
    assert {x.partition("+")[2] for x in set(directions) - asked} == {
        "parts", "packed", "fp32_results"
    }  # fmt: skip


@pytest.mark.parametrize("family", ["forward+alibi_slopes", "backward+parts", "forward+head_dim"])
def test_a_case_makes_calls_of_its_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()

    def record(q: Any, k: Any, v: Any, *, return_lse: bool, backend: str, **options: Any) -> Any:
        checked = dense_options(q, k, v, **options)
        training = torch.is_grad_enabled()
        made.update(choices.families(backend, q, k, v, checked, training))
        raise AssertionError

    monkeypatch.setattr(cases_of_families, "attention", record)
    subject = Subject("hopper", family, "bfloat16", 64)
    for one in Scope(quick=True).cases(subject):
        with pytest.raises(AssertionError):
            one.check(Setting(subject, torch.device("cpu")))
    direction = family.partition("+")[0]
    assert made == {"forward", direction, family}


@pytest.mark.parametrize("backend", FAMILIES)
def test_every_case_passes_by_torchs_formula(backend: str, one_thread: None) -> None:
    """Or the case is wrong, which only a GPU's time would tell; two ask for a GPU themselves."""
    for family in FAMILIES[backend]:
        setting = Setting(Subject("torch", family, "float32", 64), torch.device("cpu"))
        for one in Scope().cases(Subject(backend, family, "float32", 64)):
            if one.name not in ("more tiles than multiprocessors", "codes"):
                one.check(setting)


def test_what_learns_has_the_dtype_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        cases_of_families, "assert_matches_reference", lambda *x, **how: given.update(how)
    )
    setting = Setting(Subject("triton", "forward", "bfloat16", 64), torch.device("cpu"))
    setting.compare(sinks=torch.zeros(4), alibi_slopes=torch.zeros(4))
    assert given["sinks"].dtype is torch.bfloat16 and given["alibi_slopes"].dtype is torch.float32


def test_many_sequences_are_held_to_the_reference(launched: Any) -> None:
    """Each of them: the error is in the rows of the last alone."""
    (case,) = (x for x in attention.packed() if x.name == "many sequences")
    setting = Setting(SUBJECT._replace(family="packed"), torch.device("cpu"))
    assert 0 < case.check(setting) <= 1

    def spoil(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o[:, :, -1] *= 1.5
        return o, lse

    forget()
    launched(spoil)
    with pytest.raises(PastBudget):
        case.check(setting)


def test_what_an_append_stores_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (x for x in caches.append() if x.name == "rows, plain")
    append = fastattn.KVCache.append

    def spoil(cache: Any, *tokens: Any, backend: str, **how: Any) -> Any:
        turned = append(cache, *tokens, backend="torch", **how)
        cache.k[0, 0, 0, 0] += backend == "triton"
        return turned

    monkeypatch.setattr(fastattn.KVCache, "append", spoil)
    with pytest.raises(AssertionError, match="1 numbers differ"):
        case.check(Setting(SUBJECT, torch.device("cpu")))


def test_the_keys_that_statistics_list_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(*tensors: Any, **how: Any) -> Any:
        actual = fastattn.attention_statistics(*tensors, **how)
        return actual._replace(top_positions=actual.top_positions.flip(2))

    monkeypatch.setattr(scoring, "attention_statistics", spoil)
    q, k, _ = make_qkv(1, 2, 1, 9, 9, 8, requires_grad=False)
    with pytest.raises(PastBudget, match="weights at top_positions"):
        scoring.assert_statistics(q, k, "torch", {})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--backend", "hopper", "backends must be some of triton here, got 'hopper'"),
        ("--family", "backwards", "families must be some of forward, backward, one-pass"),
        ("--device", "cuda:9", "device must be one that torch sees"),
    ],
)
def test_unknown_names_are_one_line(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["verify", option, value]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastattn: error: ") and message in line
