"""Shipped verdicts: which Hopper kernels `auto` takes, and what `explain` says of each family."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from fastattn import attention, dispatch, explain
from fastattn.kernels.hopper import forward as hopper_forward
from fastattn.options import Options
from fastattn.testing import make_qkv
from fastattn.tuned import choices, environment, families, shipped
from fastattn.tuned.findings import KEYS

H100 = "NVIDIA H100 80GB HBM3"
ON = {"gpu": H100, "commit": "1234567", "date": "2026-11-30"}
Ship = Callable[..., None]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch, nothing_known: None, device: str) -> Iterator[None]:
    if device != "cpu":
        pytest.skip("a GPU has verdicts of its own")
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    choices.forget()
    yield
    choices.forget()


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Ships these families alone, for bfloat16 and head dim 64, each of its current code."""

    def ship(*names: str, **changes: Any) -> None:
        codes = {x: environment.fingerprints()[families.sources("hopper", x)] for x in names}
        usual = {"backend": "hopper", "dtype": "bfloat16", "head_dim": 64, "verdict": "right", **ON}
        rows = [{**usual, "family": x, "code": code, **changes} for x, code in codes.items()]
        keyed = {tuple(row[field] for field in KEYS["verification"]): row for row in rows}
        monkeypatch.setattr(shipped, "verdicts", lambda: keyed)
        choices.forget()

    return ship


def inputs(**changes: Any) -> Any:
    sizes = {"B": 1, "H_q": 2, "H_k": 1, "T_q": 64, "D": 64, "dtype": torch.bfloat16}
    return make_qkv(**{**sizes, **changes})


def test_what_ran_before_a_change_is_taken_and_told() -> None:
    told = explain(*inputs(), causal=True)
    assert (told.backend, told.reasons) == ("hopper", {})
    assert told.findings == tuple(
        f"{family} bfloat16 64 ran right on {H100} at 415326a (2026-11-22); its code has changed "
        "since"
        for family in ("forward", "backward")
    )
    for served in ({"window": 9}, {"key_lengths": torch.tensor([9])}, {"softcap": 2.0}):
        assert explain(*inputs(), **served).backend == "hopper"


def test_what_never_ran_leaves_the_portable_kernels() -> None:
    slopes = torch.ones(2)
    told = explain(*inputs(), alibi_slopes=slopes)
    assert told.backend == "triton"
    assert told.reasons["hopper"] == (
        "no GPU has run such kernels (forward+alibi_slopes, backward+alibi_slopes): "
        "`fastattn verify --quick` (minutes) checks them"
    )
    assert explain(*inputs(), alibi_slopes=slopes, backend="hopper").backend == "hopper"
    for never in ({"D": 72}, {"D": 96}, {"T_q": 8192, "H_q": 8}):
        assert explain(*inputs(**never), causal=True).backend == "triton"
    # Of a direction, a dtype and a head dim.
    wide = inputs(D=256)
    assert explain(*wide).backend == "triton"
    with torch.no_grad():
        assert explain(*wide).backend == "hopper"
    packed = explain(*inputs(), deterministic=False)
    assert packed.one_pass
    padded = {"key_padding_mask": torch.ones(1, 64, dtype=torch.bool)}
    assert explain(*inputs(), **padded).backend == "triton"


def test_all_families_of_a_call_must_have_run(ship: Ship) -> None:
    call = {"softcap": 2.0, "sinks": torch.zeros(2)}
    names = [f"{x}{y}" for x in ("forward", "backward") for y in ("", "+softcap", "+sinks")]
    ship(*names)
    assert explain(*inputs(), **call).backend == "hopper"
    for missing in names:
        ship(*(x for x in names if x != missing))
        told = explain(*inputs(), **call)
        assert told.backend == "triton" and f"({missing})" in told.reasons["hopper"]


def test_one_pass_never_ran(ship: Ship) -> None:
    ship("forward", "backward")
    told = explain(*inputs(), deterministic=False)
    assert told.backend == "hopper" and not told.one_pass
    assert "(one-pass)" in told.reasons["one-pass"]
    ship("forward", "backward", "one-pass")
    assert explain(*inputs(), deterministic=False).one_pass


def test_a_known_forward_does_not_serve_gradients(ship: Ship, emulated: None) -> None:
    ship("forward")
    qkv, launches = inputs(), []
    for training in (False, False, True, False, True):
        with torch.set_grad_enabled(training):
            attention(*qkv)
        launches.append(hopper_forward.hopper_forward_kernel.launches)
    assert launches == [1, 2, 2, 3, 3]


def test_what_was_wrong_is_passed_over(ship: Ship) -> None:
    ship("forward", verdict="wrong", case="causal", reason="o is 9.1 of its budget")
    told = explain(*inputs(requires_grad=False))
    assert told.backend == "triton"
    assert told.reasons["hopper"] == (
        f"forward bfloat16 64 ran wrong on {H100} at 1234567 (2026-11-30): causal: o is 9.1 of its "
        "budget"
    )


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("hopper/forward_kernel.py", {"forward", "fp8"}),
        ("hopper/backward_dkv.py", {"backward", "one-pass"}),
        ("hopper/pipeline.py", {"forward", "backward", "fp8", "one-pass"}),
        ("rules/mask.py", {"forward", "backward", "fp8", "one-pass"}),
        ("backward_atomic.py", {"backward", "one-pass"}),
        ("launch/tuning/sm_90.json", set()),
        ("decode/kernel.py", set()),
    ],
)
def test_changed_code_is_not_said_to_have_run(
    file: str, changed: set[str], ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("forward", "backward", "fp8", "one-pass")
    ship(*names)
    rows = shipped.verdicts().values()
    assert not any("changed" in shipped.sentence(row) for row in rows)
    digests = environment._digests()
    assert file in digests
    monkeypatch.setattr(environment, "_digests", lambda: {**digests, file: b"another"})
    environment.fingerprints.cache_clear()
    try:
        actual = {row["family"] for row in rows if "changed since" in shipped.sentence(row)}
        assert actual == changed
        assert explain(*inputs()).backend == "hopper"
    finally:
        environment.fingerprints.cache_clear()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_fingerprint_has_all_that_is_imported(direction: str) -> None:
    program = (
        f"import sys, fastattn.kernels.hopper.{direction}\n"
        "print(*(x for x in sys.modules if x.startswith('fastattn.kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    patterns = environment.SOURCES[f"hopper {direction}"]
    names = [x.removeprefix("fastattn.kernels.") for x in done.stdout.decode().split()]
    files = [f"{name.replace('.', '/')}.py" for name in names]
    left = [x for x in files if not any(fnmatchcase(x, y) for y in patterns)]
    # Packages, the interpreter, and forward's kernels for few queries, which are portable.
    others = (
        "rules.py",
        "launch.py",
        "hopper.py",
        "fp8.py",
        "launch/[ei]*.py",
        "decode*",
        "combine.py",
    )
    assert not [x for x in left if not any(fnmatchcase(x, y) for y in others)]


def test_verdicts_are_constants_of_a_graph() -> None:
    """One graph serves all lengths."""

    def backend_of(q: torch.Tensor, **options: Any) -> float:
        checked = Options(scale=1.0, causal=True, **options)
        with_keys = dispatch.choose(q, q, q, checked, among=dispatch.BACKENDS)
        return 1.0 if with_keys.backend == "hopper" else 0.0

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def run(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return q * (1 + backend_of(q) + 2 * backend_of(q, alibi_slopes=slopes))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (70, 90, 200):
            q = torch.ones(1, 2, T, 64, dtype=torch.bfloat16)
            assert torch.equal(run(q, torch.ones(2)), 2 * q)
    torch._dynamo.reset()


def test_slower_kernels_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    choice = explain(*inputs(), alibi_slopes=torch.ones(2))
    with pytest.warns(UserWarning, match=r"run the Hopper kernels .*`fastattn verify --quick`"):
        dispatch.warn_if_slow(choice, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.warn_if_slow(explain(*inputs(D=96)), torch.device("cuda"))
        asked = explain(*inputs(D=96), backend="triton")
        monkeypatch.setattr(dispatch, "_warned", set())
        dispatch.warn_if_slow(asked, torch.device("cuda"))
