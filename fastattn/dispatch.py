"""The choice of a backend for a call, with reasons."""

import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, kernels, tracing
from .ops import attention_ops, call, spread
from .ops.derivatives import transforms
from .ops.gradients import Kernels
from .options import Options
from .tuned import choices
from .tuned.families import head_dim_class

# And on a GPU with fewer registers or without matrix units for float32: wider tiles spill.
MAX_HEAD_DIM, MAX_HEAD_DIM_NARROW, MAX_HEAD_DIM_RDNA = 512, 256, 128
_NOT_HOPPER = "its kernels are written for GPUs of compute capability 9.0"
ENVIRONMENT, LOG = "FASTATTN_BACKEND", "FASTATTN_LOG"
# Functions by the family of their kernels, other than `attention` and `attention_varlen`.
_FUNCTIONS: dict[str | None, str] = {
    "decode": "decode_attention",
    "selected": "selected_attention",
    "statistics": "attention_statistics",
}


class Explanation(NamedTuple):
    """The backend of a call, and why each faster one was not used.

    Attributes:
        forced: the backend was requested by argument or by FASTATTN_BACKEND.
        one_pass: whether gradients come in one pass with atomics, which deterministic=False
            permits. If permitted but not used, `reasons` has "one-pass" too.
        split_keys: whether keys are split among programs, as in decoding: there are few queries.
        measured: `fastattn tune` found this backend the fastest on this device.
        findings: results of `fastattn verify` and `fastattn tune` for it on this device.
    """

    backend: str
    reasons: dict[str, str]
    forced: bool = False
    one_pass: bool = False
    split_keys: bool = False
    measured: bool = False
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        forward = ["forward: keys split among programs"] if self.split_keys else []
        backward = ["backward: one-pass"] if self.one_pass else []
        passed_over = [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        findings = [f"  {finding}" for finding in self.findings]
        return "\n".join([f"backend: {self.backend}", *forward, *backward, *passed_over, *findings])


# The variable, maybe encoded. os.environ.get encodes its name at each access.
_STORED = vars(os.environ).get("_data")
raw_name: Callable[[], Any] = partial(os.environ.get, ENVIRONMENT)
if _STORED is not None:
    raw_name = partial(_STORED.get, os.environ.encodekey(ENVIRONMENT))


def requested_backend(backend: str | None) -> str:
    """The backend requested by argument, or else by the environment.

    Raises:
        ValueError: the backend is unknown.
    """
    forced = checks.check_backend(backend)
    if forced == "auto" and (named := os.environ.get(ENVIRONMENT)):
        forced = checks.check_backend(named, ENVIRONMENT)
    return forced


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason that the Triton kernels cannot serve this call, or None."""
    if (reason := why_no_kernel({"q": q})) is not None:
        return reason
    if (reason := transforms.why_no_tangents(q, k, v, options)) is not None:
        return reason
    wanted = torch.is_grad_enabled() and any(map(tracing.wants_gradient, options.mod_tensors))
    if wanted and (tracing.may_be_traced(q) or tracing.in_forward_mode()):
        return "mod_tensors require a gradient, which kernels compute only where nothing traces"
    widest = max(q.shape[-1], v.shape[-1])
    if options.key2 is not None:
        if options.relative_keys is not None:
            return "its kernels do not support relative_keys and key2 together"
        widest = max(q.shape[-1] + options.key2.shape[-1], v.shape[-1])
    limit, of = MAX_HEAD_DIM, ""
    if _is_rdna(q.device):
        if q.dtype == torch.float32 or options.relative_keys is not None:
            return "tiles for float32, and those for relative_keys, spill registers on RDNA"
        limit, of = MAX_HEAD_DIM_RDNA, ", the limit on RDNA"
    elif q.dtype == torch.float32 or torch.version.hip is not None:
        of = "for float32" if q.dtype == torch.float32 else "on AMD"
        limit, of = MAX_HEAD_DIM_NARROW, f", the limit {of}"
    return f"head dim {widest} is larger than {limit}{of}" if widest > limit else None


def on_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9.0, as the Hopper kernels need."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # Of torch's device queries, torch.compile folds only this one into a constant.
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


def why_not_hopper(
    q: Tensor, k: Tensor, v: Tensor, options: Options, device: torch.device | None = None
) -> str | None:
    """Reason that the Hopper kernels cannot serve a call on q's or this device, or None."""
    if not on_hopper(device or q.device):
        return _NOT_HOPPER
    if attention_ops.uncompiled:
        return attention_ops.uncompiled[0]
    try:
        return kernels.hopper_host.why_not_hopper(q, k, v, options)
    except ImportError as error:
        return f"this release of Triton lacks what its kernels import: {error}"


def why_not_hopper_fp8(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dtype: torch.dtype
) -> str | None:
    """Reason that the Hopper kernel cannot serve an FP8 call with o in `dtype`, or None.

    q, k, v: tensors of the call's shapes on its device, of any dtype.
    """
    if not call.TRITON_INSTALLED:
        return "triton is not installed"
    if not on_hopper(q.device):
        return _NOT_HOPPER
    return kernels.hopper_host.why_not_hopper_fp8(q, k, v, options, dtype)


def why_no_kernel(inputs: dict[str, Tensor]) -> str | None:
    """Reason that no Triton kernel takes these tensors, the first on the call's device, or None."""
    name, x = next(iter(inputs.items()))
    if not call.TRITON_INSTALLED:
        return "triton is not installed"
    if x.is_cpu:
        if not call.interpreting():
            return f"{name} is on the CPU and TRITON_INTERPRET=1 is not set"
    elif not x.is_cuda:
        return f"{name} is on {x.device.type}; kernels exist for CUDA and ROCm devices"
    elif _spills_all(x.device):
        return "tiles spill registers below compute capability 8.0 and on gfx10; none was tried"
    for x in inputs.values():
        if x.dtype == torch.float64:
            names = " or ".join(inputs)
            return f"{names} is float64; kernels exist for float16, bfloat16 and float32"
    return None


def _spills_all(device: torch.device) -> bool:
    # torch.compile folds this query of a device into a constant, and no other.
    major = torch.cuda.get_device_properties(device).major
    return major < 8 if torch.version.hip is None else major == 10


def _is_rdna(device: torch.device) -> bool:
    amd = device.type == "cuda" and torch.version.hip is not None
    return amd and torch.cuda.get_device_properties(device).major >= 10


def _why_hopper_is_slow(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if kernels.decode_splits.why_not_split(q, k, v, options) is None:
        return "there are few queries, and the portable kernels split the keys among programs"
    return why_not_worth_it(q)


def why_not_worth_it(q: Tensor) -> str | None:
    """Reason that the Hopper kernels are slow for so few queries, or None."""
    return kernels.hopper_host.why_not_worth_it(q)


class Backend(NamedTuple):
    """Kernels of one kind, and the calls that they serve.

    kernels: their launchers.
    why_not: reason that they cannot serve a call that the next backend can, or None.
    why_slow: reason that the next backend is faster in a call that these serve, or None.
    why_not_one_pass: (q, k, options) -> reason that gradients take two passes, or None.
    on: whether they are written for a device.
    """

    name: str
    kernels: Kernels
    why_not: Callable[[Tensor, Tensor, Tensor, Options], str | None]
    why_slow: Callable[[Tensor, Tensor, Tensor, Options], str | None]
    why_not_one_pass: Callable[[Tensor, Tensor, Options], str | None]
    on: Callable[[torch.device], bool]


TRITON = Backend(
    "triton",
    attention_ops.PORTABLE,
    why_not_triton,
    lambda *call: None,
    attention_ops.why_not_one_pass,
    lambda device: True,
)
HOPPER = Backend(
    "hopper",
    attention_ops.HOPPER,
    why_not_hopper,
    _why_hopper_is_slow,
    attention_ops.why_not_one_pass_on_hopper,
    lambda device: on_hopper(device),
)
# The fastest first. Torch serves all other calls.
BACKENDS = (HOPPER, TRITON)
_BY_NAME = {one.name: one for one in BACKENDS}


def launched(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Kernels, Options]:
    """Kernels of a choice but torch, and options without a wrong or slower one-pass backward."""
    launchers = _BY_NAME[choice.backend].kernels
    if options.atomic_dq and _why_two_passes(choice, q, k, v, options) is not None:
        options = options._replace(atomic_dq=False)
    return launchers, options


def _why_two_passes(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> str | None:
    """Reason against the one-pass backward here, or None; a forced backend keeps one pass."""
    return None if choice.forced else choices.why_not_one_pass(choice.backend, q, k, v, options)


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    backend: str | None = None,
    *,
    among: tuple[Backend, ...] = (TRITON,),
    family: str | None = None,
    training: bool | None = None,
    also: tuple[str, ...] = (),
) -> Explanation:
    """The forced backend, or the first one that serves the call, else torch.

    Skips, unless forced, backends that `fastattn verify` found wrong on this device, and Hopper's
    kernels where no GPU has run them right.

    among: the BACKENDS with kernels for the caller. family: of verification; default: those of
    attention. training: whether there is a backward; default: if autograd needs one. also: further
    families of verification.

    Raises:
        TypeError: the call would see a part of its sequence, see `spread`.
        ValueError: a forced backend is unknown or cannot serve the call.
    """
    dense = "attention" if options.cu_seqlens_q is None else "attention_varlen"
    spread.refuse(_FUNCTIONS.get(family, dense))
    forced = requested_backend(backend)
    if forced == "torch":
        return Explanation("torch", {"triton": 'backend "torch" was requested'}, forced=True)
    why: dict[str, str | None] = {}
    uncompiled = family == "statistics" and _is_rdna(q.device)
    reason = "Triton 3.7 does not compile its kernels for RDNA" if uncompiled else None
    for one in reversed(among):
        why[one.name] = reason = reason or one.why_not(q, k, v, options)
    fastest = None
    if why["triton"] is None:
        # Installs the tiles of this device, for forced backends too.
        judged = why if forced == "auto" else {}
        fastest = choices.judge(judged, q, k, v, options, family, training, also)
    if forced == "auto":
        for one in among:
            why[one.name] = why[one.name] or one.why_slow(q, k, v, options)
    elif forced not in why or why[forced] is not None:
        reason = why.get(forced) or reason or "there is no such kernel"
        raise ValueError(f'backend "{forced}" cannot serve this call: {reason}')
    for index, one in enumerate(among):
        if one.name == forced or (forced == "auto" and why[one.name] is None):
            requested = f'backend "{one.name}" was requested'
            # On other devices a faster backend is not expected.
            faster = {x.name: why[x.name] or requested for x in among[:index] if x.on(q.device)}
            return Explanation(
                one.name, faster, forced=one.name == forced, measured=fastest == one.name
            )
    if options.batch_invariant and q.is_cuda:
        raise ValueError(
            f'batch_invariant: "triton" cannot serve this call: {why["triton"]}; pass '
            'backend="torch" in every call for equal bits'
        )
    return Explanation("torch", {"triton": str(why["triton"])}, measured=fastest == "torch")


def with_forward(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> Explanation:
    """Add to a choice whether its forward splits the keys."""
    if choice.backend != "triton":
        return choice
    why_not = kernels.decode_splits.why_not_split(q, k, v, options)
    return choice._replace(split_keys=why_not is None)


def split_calls() -> tuple[tuple[int, int], ...]:
    """Numbers of queries and keys for each kernel that splits keys."""
    return kernels.decode_splits.SPLIT_CALLS


def with_backward(
    choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> Explanation:
    """Add to a choice which backward it gets if atomics are permitted."""
    if not options.atomic_dq:
        return choice
    reason: str | None = "the torch backend has a backward of its own"
    if choice.backend != "torch":
        reason = _BY_NAME[choice.backend].why_not_one_pass(q, k, options)
    reason = reason or _why_two_passes(choice, q, k, v, options)
    if reason is None:
        return choice._replace(one_pass=True)
    return choice._replace(reasons={**choice.reasons, "one-pass": reason})


def with_findings(
    choice: Explanation, q: Tensor, v: Tensor, families: tuple[str, ...], calls: str = ""
) -> Explanation:
    """Add to a choice the findings about its backend on this device.

    families: from `choices.families`. calls: see `options.Tags.registers`.
    """
    width = head_dim_class(max(q.shape[-1], v.shape[-1]))
    stored = choices.choices(q.device)
    findings = stored.verdicts(choice.backend, families, q.dtype, width)
    if choice.backend != "torch":
        findings += stored.tuned_tiles(choice.backend, q.element_size(), width, calls or "plain")
    return choice._replace(findings=findings)


def takes_kernel(task: str, backend: str | None, inputs: dict[str, Tensor], family: str) -> bool:
    """Whether the kernel does an auxiliary task; else torch does.

    Args:
        task: description, for the message.
        backend: the caller's argument.
        inputs: by name; the first has the call's device.
        family: its name in `fastattn verify`.

    Raises:
        ValueError: the backend is unknown, or is "triton" and cannot do it.
    """
    forced = requested_backend(backend)
    if forced == "torch":
        return False
    reason = why_no_kernel(inputs)
    if forced == "triton":
        if reason is not None:
            raise ValueError(f'backend "triton" cannot {task}: {reason}')
        return True
    # The interpreted kernel is opt-in: torch is much faster.
    x = next(iter(inputs.values()))
    fits = reason is None and not x.is_cpu
    return fits and choices.why_quarantined("triton", x, x, (family,)) is None


def quantizes(x: Tensor) -> bool:
    """Whether a kernel makes the e4m3 codes of x [..., D]."""
    narrow = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    fits = x.shape[-1] % 16 == 0 and x.shape[-1] <= MAX_HEAD_DIM and x.numel() > 0
    return call.TRITON_INSTALLED and x.is_cuda and narrow and fits


_warned: set[str] = set()


def log_once(
    name: str, choice: Explanation, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> None:
    """Log each kind of call to stderr if FASTATTN_LOG=1: shapes, backend, reasons, tile."""
    if not logs() or torch.compiler.is_compiling():
        return
    shapes = " ".join(f"{x}{list(y.shape)}" for x, y in (("q", q), ("k", k), ("v", v)))
    defaults = {**options._field_defaults, "scale": options.scale}
    used = [name for name, x in defaults.items() if _differs(getattr(options, name), x)]
    how = f"{shapes} {str(q.dtype).removeprefix('torch.')} {' '.join(used)}".rstrip()
    why = [f"not {one}: {reason}" for one, reason in choice.reasons.items()]
    if choice.backend == "triton" and name.startswith("attention"):
        why.append(_forward_tile(q, v, options))
    write_once(f"{name} {how} -> {'; '.join([choice.backend, *why])}")


def logs() -> bool:
    """Whether FASTATTN_LOG asks for lines."""
    return os.environ.get(LOG, "0") not in ("", "0")


@cache
def write_once(line: str) -> None:
    """Write a line to stderr, once in a process."""
    sys.stderr.write(f"fastattn: {line}\n")


def _forward_tile(q: Tensor, v: Tensor, options: Options) -> str:
    """Description of the portable forward kernel's tile."""
    of = kernels.arguments
    widths = (of.block_dim(q.shape[-1]), of.block_dim(v.shape[-1]))
    tile = of.tile_for("forward", options, q, *widths, streams_bias=True)
    rows, warps = f"{tile.BLOCK_M} x {tile.BLOCK_N}", f"{tile.num_warps} warps"
    return f"tile {rows}, {warps}, {tile.num_stages} stages"


def _differs(x: object, default: object) -> bool:
    return x is not None and (isinstance(x, Tensor) or callable(x) or x != default)


def warn_if_slow(explanation: Explanation, device: torch.device) -> None:
    """Warn once per reason if torch serves a GPU call unrequested, and once if the Hopper kernels
    are unverified.
    """
    if explanation.forced or explanation.measured:
        return
    if explanation.backend == "torch":
        warn_once(f"fastattn falls back to torch: {explanation.reasons['triton']}", device)
    elif explanation.reasons.get("hopper", "").startswith(choices.NEVER_RAN):
        message = "fastattn uses slower kernels, as no GPU has run the Hopper kernels (see explain)"
        warn_once(f"{message}: {choices.REMEDY}", device)


def warn_once(message: str, device: torch.device | None = None) -> None:
    """Warn about a call, once; not while tracing. device: if given, of calls on a GPU alone."""
    if torch.compiler.is_compiling() or (device is not None and device.type in ("cpu", "meta")):
        return
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=_depth_of_user())


def _depth_of_user() -> int:
    """Level of the caller of `warn_once`'s caller, outside of this package and of torch."""
    frame, depth = sys._getframe(2), 2
    ours = (f"{__package__}.", "torch.")
    while frame.f_back and f"{frame.f_globals['__name__']}.".startswith(ours):
        frame, depth = frame.f_back, depth + 1
    return depth
