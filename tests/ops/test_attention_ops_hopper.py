"""Kernels that an op launches on a Hopper GPU: its own, or the portable ones where they fail."""

import warnings

import pytest
import torch
import triton
from torch import Tensor

import fastattn
from fastattn import tracing
from fastattn.functional import call_memo
from fastattn.kernels import backward, forward
from fastattn.kernels.hopper import backward as hopper_backward
from fastattn.kernels.hopper import forward as hopper_forward
from fastattn.kernels.hopper import tile_table
from fastattn.kernels.launch import tiles
from fastattn.ops import attention_ops
from fastattn.options import Options
from fastattn.testing import make_qkv


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, nothing_known: None, hopper_ran: None) -> list[str]:
    """The Hopper launchers that were called: the portable ones, in their place."""
    launches = []

    def launch_forward(*arguments):
        launches.append("forward")
        return forward.launch_forward(*arguments)

    def launch_backward(*arguments):
        launches.append("backward")
        return backward.launch_backward(*arguments)

    monkeypatch.setattr(hopper_forward, "launch_hopper_forward", launch_forward)
    monkeypatch.setattr(hopper_forward, "prepare_hopper_forward", lambda *_: None)
    monkeypatch.setattr(hopper_backward, "launch_hopper_backward", launch_backward)
    monkeypatch.setattr(attention_ops, "uncompiled", [])
    return launches


@pytest.fixture
def inputs(device: str) -> tuple[Tensor, ...]:
    return make_qkv(B=1, H_q=2, H_k=1, T_q=64, D=64, dtype=torch.bfloat16, device=device)


def run(inputs: tuple[Tensor, ...], backend: str | None) -> tuple[Tensor, ...]:
    o = fastattn.attention(*inputs, causal=True, backend=backend)
    return (o.detach(), *torch.autograd.grad(o.float().sin().sum(), inputs))


@pytest.mark.parametrize("backend", ["hopper", None])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "op"])
def test_hopper_kernels_come_first_on_their_gpu(
    backend: str | None, traced: bool, called, inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the launchers and back is under test."""
    monkeypatch.setattr(tracing, "may_be_traced", lambda x: traced)
    assert all(map(torch.equal, run(inputs, backend), run(inputs, "triton")))
    assert called == ["forward", "backward"]
    assert fastattn.explain(*inputs, backend=backend).backend == "hopper"
    portable = fastattn.explain(*inputs, backend="triton")
    assert portable.reasons == {"hopper": 'backend "triton" was requested'}


@pytest.mark.parametrize("launcher", ["launch_hopper_forward", "launch_hopper_backward"])
def test_what_does_not_compile_for_hopper_is_served_all_the_same(
    launcher: str, called, inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = triton.TritonError("no such\ninstruction")

    def refuse(*_):
        raise error

    owner = hopper_forward if "forward" in launcher else hopper_backward
    monkeypatch.setattr(owner, launcher, refuse)
    if owner is hopper_forward:
        monkeypatch.setattr(owner, "prepare_hopper_forward", lambda *_: refuse)
    with pytest.warns(UserWarning, match="uses triton instead: .*TritonError: no such instruction"):
        ours = run(inputs, None)
    assert all(map(torch.equal, ours, run(inputs, "triton")))
    told = fastattn.explain(*inputs)
    assert told.backend == "triton"
    assert "does not compile here" in told.reasons["hopper"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(inputs, None)

    # What ran and failed is no reason to go on.
    call_memo.forget()
    monkeypatch.setattr(attention_ops, "uncompiled", [])
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        run(inputs, None)


@triton.jit
def until(b, h, q_pos, k_pos):
    return k_pos <= q_pos + h


def test_explain_masks_by_functions(called, inputs) -> None:
    promised = fastattn.BlockMask(until, per_head=False)
    assert fastattn.explain(*inputs, mask_mod=promised).backend == "hopper"
    told = fastattn.explain(*inputs, mask_mod=until)
    assert told.backend == "triton" and "per_head=False" in told.reasons["hopper"]


def test_a_function_that_no_compiler_takes_leaves_hopper_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise triton.TritonError("a name in mask_mod is not defined")

    monkeypatch.setattr(attention_ops, "uncompiled", [])
    with pytest.raises(triton.TritonError):
        attention_ops.by_hopper(refuse, refuse)
    assert not attention_ops.uncompiled


def test_a_tuned_shape_that_does_not_compile_is_taken_back(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments):
        if tile_table.forward_config(64, False).BLOCK == 64:
            raise triton.TritonError("too many registers")
        return forward.launch_forward(*arguments)

    monkeypatch.setattr(hopper_forward, "launch_hopper_forward", launch)
    monkeypatch.setattr(attention_ops, "uncompiled", [])
    monkeypatch.setattr(tiles, "_installed", {})
    row = {"kernel": "hopper_forward", "element_size": 2, "BLOCK_D": 64, "BLOCK": 64, "STAGES": 2}
    tiles.install([row | {"D": 64}], tiles.current_device())
    q, k, v = make_qkv(B=1, H_q=1, H_k=1, T_q=16, D=64, dtype=torch.bfloat16, device=device)
    attention_ops.hopper_forward.direct(q, k, v, Options(scale=0.125))
    assert not attention_ops.uncompiled
    assert tile_table.forward_config(64, False).BLOCK == 128
