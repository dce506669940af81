"""The backward that deterministic=False permits: right numbers, atomics only where permitted."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

import fastattn
from fastattn import dispatch
from fastattn.kernels.launch import tiles
from fastattn.ops import attention_ops, schema
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, assert_within_budget, make_qkv
from fastattn.testing.inputs import draw

interpreted = pytest.mark.skipif(
    not tiles._INTERPRETING, reason="atomics are counted in the interpreter"
)
SIZES: dict[str, Any] = {"B": 2, "H_q": 2, "H_k": 1, "T_q": 19, "T_k": 27, "D": 16}


one_pass = partial(fastattn.attention, backend="triton", deterministic=False)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_do_not_exist_add_nothing(causal: bool, device: str) -> None:
    """A weight of theirs would be exp(0 - lse), here inf, and dK and dV need no mask for it."""
    q, k, v = make_qkv(1, 2, 1, 40, 27, 16, device=device)
    with torch.no_grad():
        # Quarters, whose products have exact sums: both backwards see the same scores.
        q.copy_((4 * q).round() / 4 + 6)
        k.copy_((4 * k).round() / 4 - 6)
        k[:, :, 21:] = v[:, :, 21:] = float("nan")
    gradients = []
    for deterministic in (True, False):
        o, lse = fastattn.attention(
            q, k, v, causal=causal, key_lengths=torch.tensor([21], device=device),
            return_lse=True, backend="triton", deterministic=deterministic,
        )  # fmt: skip
        assert lse[:, :, -1].max() < -89
        gradients.append(torch.autograd.grad(o.sin().sum(), (q, k, v)))
    for name, two, one in zip(("dq", "dk", "dv"), *gradients, strict=True):
        assert_within_budget(name, one, two.double(), two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_have_the_gradients_of_two_passes(dtype: torch.dtype, device: str) -> None:
    """With equal tiles dv has the same bits; dq is the same fp32 sum in another order."""
    q, k, v = make_qkv(**SIZES, dtype=dtype, device=device)
    tile = tiles.TileConfig(16, 32)
    results = []
    with tiles.forced(backward_dkv=tile, backward_one_pass=tile):
        for deterministic in (True, False):
            o, lse = fastattn.attention(
                q, k, v, causal=True, dropout=0.2,
                dropout_seed=torch.tensor([1, 2], device=device),
                key_lengths=torch.tensor([27, 20], device=device),
                return_lse=True, backend="triton", deterministic=deterministic,
            )  # fmt: skip
            loss = o.float().sin().sum() + lse[0].sin().sum()
            results.append((o.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))))
    for name, two, one in zip(("o", "lse", "dq", "dk", "dv"), *results, strict=True):
        if name == "dq" or (name == "dk" and not tiles._INTERPRETING):
            assert_within_budget(name, one, two.double(), two)
        else:
            assert torch.equal(two, one), name


@pytest.fixture
def atomics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every kernel that adds by an atomic."""
    calls: list[str] = []
    one_pass(*make_qkv(1, 1, 1, 1, D=16))  # a first call repairs the interpreter
    builder = triton.runtime.interpreter.interpreter_builder
    add = builder.create_atomic_rmw

    def counting(*arguments: Any) -> Any:
        calls.append("atomic")
        return add(*arguments)

    monkeypatch.setattr(builder, "create_atomic_rmw", counting)
    return calls


@contextmanager
def deterministic_algorithms(**how: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, **how)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return fastattn.attention(q, k, v, causal=True, backend="triton", **options).sum()


def directly(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    torch.autograd.grad(loss(q, k, v, **options), (q, k, v))


def by_op(q: Tensor, k: Tensor, v: Tensor, deterministic: bool = True) -> None:
    options = Options(causal=True, scale=0.25, atomic_dq=not deterministic)
    o, _ = attention_ops.attention_forward.op(q, k, v, *schema.flat(options))
    torch.autograd.grad(o.sum(), (q, k, v))


def by_function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    torch.func.grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2))(q, k, v)


@interpreted
@pytest.mark.parametrize("run", [directly, by_op, by_function])
def test_atomics_run_where_they_are_permitted_alone(run: Any, atomics: list[str]) -> None:
    q, k, v = make_qkv(1, 1, 1, 9, D=16)
    for _ in range(2):  # a call that is made for the first time, and one that is known
        run(q, k, v)
        run(q, k, v, deterministic=True)
        for how in ({}, {"warn_only": True}):
            with deterministic_algorithms(**how):
                run(q, k, v, deterministic=False)
        assert atomics == []
        run(q, k, v, deterministic=False)
        assert atomics != []
        del atomics[:]
    # Asked when the backward runs.
    o = loss(q, k, v, deterministic=False)
    with deterministic_algorithms():
        torch.autograd.grad(o, (q, k, v), retain_graph=True)
    assert atomics == []
    torch.autograd.grad(o, (q, k, v))
    assert atomics != []


@interpreted
def test_a_compiled_call_is_one_graph_and_keeps_the_permission(atomics: list[str]) -> None:
    q, k, v = make_qkv(1, 2, 1, 9, D=16)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(q, k, v, deterministic=False), (q, k, v))
    assert atomics != []
    expected = torch.autograd.grad(loss(q, k, v, deterministic=False), (q, k, v))
    assert all(map(torch.equal, actual, expected))


def explain(device: str, D: int = 64, **options: Any) -> fastattn.Explanation:
    inputs = make_qkv(**{**SIZES, "D": D}, dtype=torch.bfloat16, device=device)
    return fastattn.explain(*inputs, **{"backend": "triton", "deterministic": False, **options})


def test_explain_tells_the_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: False)
    actual, default = explain(device), explain(device, deterministic=True)
    assert (actual.one_pass, actual.reasons) == (True, {})
    assert str(actual) == "backend: triton\nbackward: one-pass"
    assert (default.one_pass, str(default)) == (False, "backend: triton")
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    assert explain(device, backend="hopper").one_pass
    assert explain(device, 256, backend="hopper").backend == "hopper"
    keys = draw(1, 9, 64).to(device, torch.bfloat16)
    reasons = {
        "its kernel does not support relative_keys": explain(device, relative_keys=keys),
        "the torch backend has a backward of its own": explain(device, backend="torch"),
        "softcap at head dim 128": explain(device, 128, backend="hopper", softcap=3.0),
        "dK and dV of head dim 256 need a kernel each": explain(device, 256, backend="hopper"),
    }
    with deterministic_algorithms():
        reasons["torch.use_deterministic_algorithms(True) rules it out"] = explain(device)
    for reason, explanation in reasons.items():
        assert not explanation.one_pass and reason in explanation.reasons["one-pass"]


@pytest.mark.gpu
def test_long_sums_on_a_gpu() -> None:
    """Many programs add to each row, in whatever order they run."""
    q, k, v = make_qkv(2, 4, 2, 900, 1100, 64, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        assert_matches_reference(one_pass, q, k, v, causal=True)
