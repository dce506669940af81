"""Which backend serves a call, and why."""

import os
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .ops import attend, call
from .options import Options

ENVIRONMENT = "FASTATTN_BACKEND"


class Explanation(NamedTuple):
    """The backend that serves a call, and the reason why each faster one was passed over.

    forced: the caller asked for this backend, by argument or by FASTATTN_BACKEND.
    one_pass: whether gradients come in one pass with atomics, which deterministic=False permits.
    Where they do not although it does, `reasons` has "one-pass" too.
    split_keys: whether keys are split among programs, as decoding splits them: there are few
    queries.
    """

    backend: str
    reasons: dict[str, str]
    forced: bool = False
    one_pass: bool = False
    split_keys: bool = False

    def __str__(self) -> str:
        forward = ["forward: keys split among programs"] if self.split_keys else []
        backward = ["backward: one-pass"] if self.one_pass else []
        passed_over = [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"backend: {self.backend}", *forward, *backward, *passed_over])


def asked_for(backend: str | None) -> str:
    """The backend that a call asks for by argument or, where that leaves it open, environment.

    Raises:
        ValueError: it is unknown.
    """
    forced = checks.check_backend(backend)
    if forced == "auto" and (named := os.environ.get(ENVIRONMENT)):
        forced = checks.check_backend(named, ENVIRONMENT)
    return forced


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    backend: str | None = None,
    *,
    hopper: bool = False,
) -> Explanation:
    """The first backend of hopper, triton, torch that serves the call, or the forced one.

    hopper: whether the caller has Hopper kernels.

    Raises:
        ValueError: a forced backend (argument or FASTATTN_BACKEND) is unknown or cannot serve.
    """
    forced = asked_for(backend)
    if forced == "torch":
        return Explanation("torch", {"triton": 'backend "torch" was asked for'}, forced=True)
    reason = why_not_triton(q, k, v, options)
    why_not_hopper = reason or _why_not_hopper(q, k, v, options, hopper)
    if forced == "auto" and why_not_hopper is None:
        few = attend.why_hopper_is_not_worth_it(q)
        why_not_hopper = _why_split(q, k, v, options) or few
    if forced in ("hopper", "auto") and why_not_hopper is None:
        return Explanation("hopper", {}, forced=forced == "hopper")
    if forced == "hopper":
        raise ValueError(f'backend "hopper" cannot serve this call: {why_not_hopper}')
    if reason is None:
        # Elsewhere its absence surprises nobody.
        passed_over = {}
        if hopper and attend.on_hopper(q.device):
            asked = 'backend "triton" was asked for'
            passed_over["hopper"] = asked if why_not_hopper is None else why_not_hopper
        return Explanation("triton", passed_over, forced=forced == "triton")
    if forced == "triton":
        raise ValueError(f'backend "triton" cannot serve this call: {reason}')
    return Explanation("torch", {"triton": reason})


def with_forward(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> Explanation:
    """The choice for a call, and whether its forward splits the keys."""
    split = choice.backend == "triton" and attend.why_not_split(q, k, v, options) is None
    return choice._replace(split_keys=split)


def with_backward(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> Explanation:
    """The choice for a call, and which backward it gets where the one with atomics is permitted."""
    if not options.atomic_dq:
        return choice
    reason: str | None = "the torch backend has a backward of its own"
    if choice.backend != "torch":
        hopper = choice.backend == "hopper" and attend.hopper_has_backward(q, k, v, options)
        reason = attend.why_not_one_pass(q.shape[-1], options, hopper=hopper)
    if reason is None:
        return choice._replace(one_pass=True)
    return choice._replace(reasons={**choice.reasons, "one-pass": reason})


def _why_split(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why a call that the kernels for Hopper could serve is not for them, or None."""
    if attend.why_not_split(q, k, v, options) is not None:
        return None
    return "there are few queries, and the portable kernels split the keys among programs"


def _why_not_hopper(q: Tensor, k: Tensor, v: Tensor, options: Options, hopper: bool) -> str | None:
    return attend.why_not_hopper(q, k, v, options) if hopper else "it has no such kernel"


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why the Triton kernels cannot serve this call, or None if they can."""
    if (reason := why_no_kernel({"q": q})) is not None:
        return reason
    widest = max(q.shape[-1], v.shape[-1])
    if widest > attend.MAX_HEAD_DIM:
        return f"head dim {widest} is larger than {attend.MAX_HEAD_DIM}"
    if widest > attend.MAX_HEAD_DIM_NARROW and q.dtype == torch.float32:
        limit = attend.MAX_HEAD_DIM_NARROW
        return f"head dim {widest} is larger than {limit}, the limit for float32"
    if widest > attend.MAX_HEAD_DIM_NARROW and torch.version.hip is not None:
        return f"head dim {widest} is larger than {attend.MAX_HEAD_DIM_NARROW}, the limit on AMD"
    if q.is_cuda and q.dtype == torch.bfloat16 and not _has_bf16(q.device):
        return "this GPU has no bfloat16 matrix units (compute capability below 8.0)"
    return None


def why_no_kernel(inputs: dict[str, Tensor]) -> str | None:
    """Why no Triton kernel takes these tensors, by name; the first tells their device."""
    name, x = next(iter(inputs.items()))
    if not call.TRITON_INSTALLED:
        return "triton is not installed"
    if x.is_cpu:
        if not call.interpreting():
            return f"{name} is on the CPU and TRITON_INTERPRET=1 is not set"
    elif not x.is_cuda:
        return f"{name} is on {x.device.type}; kernels exist for CUDA and ROCm devices"
    for x in inputs.values():
        if x.dtype == torch.float64:
            names = " or ".join(inputs)
            return f"{names} is float64; kernels exist for float16, bfloat16 and float32"
    return None


def takes_kernel(task: str, backend: str | None, inputs: dict[str, Tensor]) -> bool:
    """Whether the kernel does a task beside attention itself, else torch.

    Args:
        task: what is done, for the message.
        backend: as the caller gave it.
        inputs: by their names; the first tells the device.

    Raises:
        ValueError: the backend is unknown, or "triton" and cannot.
    """
    forced = asked_for(backend)
    if forced == "torch":
        return False
    reason = why_no_kernel(inputs)
    if forced == "triton":
        if reason is not None:
            raise ValueError(f'backend "triton" cannot {task}: {reason}')
        return True
    # Interpreted, the kernel is opt-in: torch does the same at once.
    return reason is None and not next(iter(inputs.values())).is_cpu


def _has_bf16(device: torch.device) -> bool:
    # Of torch's questions about a device this is the one that torch.compile folds into a constant.
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= 8


_warned: set[str] = set()


def warn_if_slow(explanation: Explanation, device: torch.device) -> None:
    """Say once for each reason that a GPU tensor is served by torch although nobody asked."""
    if explanation.backend == "torch" and not explanation.forced:
        warn_once(f"fastattn falls back to torch: {explanation.reasons['triton']}", device, 5)


def warn_once(message: str, device: torch.device, stacklevel: int) -> None:
    """A warning about a call on a GPU, the first time; none where something is traced."""
    if device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
