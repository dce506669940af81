"""Calls like an earlier one skip what was worked out for that, and nothing else."""

import gc
import sys
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from stays import way

from fastattn import attention, attention_varlen
from fastattn.bench.time import overhead
from fastattn.functional import call_memo, decode
from fastattn.kernels.launch import launches as plan
from fastattn.testing import make_qkv
from fastattn.testing.compiling.compile_pool import CompilePool

pytestmark = pytest.mark.usefixtures("nothing_known")

by_triton = partial(attention, backend="triton")
SIZES = {"B": 1, "H_q": 2, "H_k": 1, "T_q": 9, "T_k": 9, "D": 16}


def inputs(device: str, **changes) -> tuple[torch.Tensor, ...]:
    return make_qkv(**{**SIZES, "dtype": torch.float32, "device": device, **changes})


def test_a_known_packed_call_has_gradients_of_its_lse(device: str) -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in inputs(device))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        _, lse = attention_varlen(*leaves, starts, return_lse=True, backend="triton")
        return torch.autograd.grad(lse.sin().sum(), leaves)

    once, again = gradients(), gradients()
    assert once[0].count_nonzero()
    assert all(map(torch.equal, once, again))


def test_calls_on_meta_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has no driver on a machine without one, unless it interprets, as here."""

    def active(dtype: torch.dtype) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(call_memo.attention_ops, "device_key", active)
    q, k, v = inputs("meta")
    for _ in range(2):
        assert attention(q, k, v, causal=True).shape == q.shape


def test_dropout_draws_a_seed_at_each_call(device: str, checked: list[str]) -> None:
    tensors = inputs(device)
    torch.manual_seed(3)
    first, second = (by_triton(*tensors, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(by_triton(*tensors, dropout=0.5), first)
    assert len(checked) == 1


@pytest.mark.parametrize("memo", [call_memo, plan], ids=["calls", "launches"])
def test_the_least_recently_used_is_dropped(
    memo: Any, device: str, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_slot", lru_cache(2)(memo._slot.__wrapped__))
    made: list[int] = []
    bind = plan.Launch.bind
    monkeypatch.setattr(plan.Launch, "bind", lambda *x: made.append(1) or bind(*x))
    seen = []
    for T in (1, 2, 1, 3, 1, 2):
        q, k, v = inputs(device, T_q=T, T_k=T, requires_grad=False)
        call_memo.forget() if memo is plan else None
        attention(q, k, v, backend="triton")
        seen.append(len(checked if memo is call_memo else made))
    assert seen == [1, 2, 2, 3, 3, 4]


LENGTHS = torch.tensor([60])
OPTIONS: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "tensors": {"key_lengths": LENGTHS, "sinks": torch.zeros(2), "alibi_slopes": torch.ones(2)},
    "tensors between 16 bytes": {"key_lengths": torch.cat([LENGTHS, LENGTHS])[1:]},
}


def seen_by_triton() -> dict[str, list[int]]:
    """How many launches Triton looked at the arguments of, after each of several calls."""
    looked = 0
    run = triton.JITFunction.run

    def counting(*args, **kwargs):
        nonlocal looked
        looked += 1
        return run(*args, **kwargs)

    results: dict[str, list[int]] = {}
    with overhead.stand_in_gpu(), mock.patch.object(triton.JITFunction, "run", counting):
        for name, options in OPTIONS.items():
            looked, results[name] = 0, []
            for T in (64, 64, 65):
                q = torch.zeros(1, 2, T, 32, dtype=torch.bfloat16)
                attention(q, q, q, backend="triton", **options)
                results[name].append(looked)
        for row in ("packed", "decode", "decode, paged"):
            call, tensors = overhead.ROWS[row]("cpu")
            looked, results[row] = 0, []
            for _ in range(2):
                call(*tensors)
                results[row].append(looked)
    return results


def test_a_known_call_launches_its_compiled_kernel(compile_pool: CompilePool) -> None:
    assert compile_pool.call(f"{__file__}:seen_by_triton", "sm_90") == {
        **{key: [1, 1, 2] for key in OPTIONS},
        **{key: [1, 1] for key in ("packed", "decode", "decode, paged")},
    }


def python_calls() -> dict[str, list[tuple[int, set[str]]]]:
    """Python functions that known calls enter on the way to the driver, and the library's files."""
    results: dict[str, list[tuple[int, set[str]]]] = {}
    # Of a cache on a GPU the host reads no lengths.
    unread = mock.patch.object(decode, "check_view_values", lambda view: None)
    with overhead.stand_in_gpu(), unread:
        for row in overhead.ROWS:
            results[row] = []
            for name, call in overhead.calls("cpu", row).items():
                if name != "bare launch":
                    for _ in range(3):
                        call()
                    results[row].append(entered(call))
    return results


def entered(call) -> tuple[int, set[str]]:
    count, files = 0, set()

    def counting(frame, event, arg):
        nonlocal count
        count += event == "call"
        name = frame.f_globals.get("__name__", "")
        # The driver's stand-in and the benchmark are on no user's way.
        if name.startswith("fastattn.") and not name.startswith(
            ("fastattn.testing", "fastattn.bench")
        ):
            files.add(name)

    gc.collect()
    gc.disable()  # finalizers of other tests' objects are no part of the call
    sys.setprofile(counting)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, files


def test_the_host_does_little_for_a_known_call(compile_pool: CompilePool) -> None:
    """A call that is checked enters hundreds of functions."""
    actual = compile_pool.call(f"{__file__}:python_calls", "sm_90")
    counts = {row: [count for count, _ in calls] for row, calls in actual.items()}
    # Two more kernels make what these masks are read from.
    tables = {row: counts.pop(row) for row in ("key_padding_mask", "documents")}
    assert max(map(max, counts.values())) < 60, counts
    assert max(map(max, tables.values())) < 90, tables
    for row in ("plain", "decode"):
        assert len(actual[row][0][1]) <= 9, actual[row][0][1]  # the first is without gradients


def test_torch_does_little_for_a_known_call(device: str) -> None:
    """A call that is checked enters sixty functions."""
    q, k, v = inputs(device, H_k=2, requires_grad=False)
    call = partial(attention, q, k, v, causal=True, backend="torch")
    call()
    assert entered(call)[0] <= 15


def test_four_frames_lead_to_the_launch_of_a_known_call(device: str) -> None:
    q, k, v = inputs(device, requires_grad=False)
    call = partial(by_triton, q, k, v, causal=True)
    assert way(call).frames > 4
    assert way(call).frames == 4
