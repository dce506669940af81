"""`Operator`: a torch.library operator if something traces, else a direct launch of a kernel.

torch.compile, export, vmap and other tracers need operators with fakes. The dispatcher costs the
host several times as much as the launch, so an `Operator` bypasses it if nothing traces. Kernels
are imported on first use, so that `import fastattn` works without triton.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from .. import checks, kernels, tracing
from ..options import CONTIGUOUS, TENSORS, Options
from . import schema
from .flops import NAMESPACE, Formula, register

TRITON_INSTALLED = find_spec("triton") is not None
# Triton reads this once, when kernels are imported.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter: TRITON_INTERPRET=1 at import."""
    return TRITON_INSTALLED and _INTERPRETING


def from_compiler(error: Exception) -> bool:
    """Whether an error means that a kernel failed to compile, so that nothing has run."""
    from triton import TritonError

    # MLIR's passes do not raise Triton's error types.
    return isinstance(error, TritonError | ImportError) or "PassManager::run" in str(error)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def by_shipped_shapes(launch: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
    """Launch a Hopper kernel; if a tuned shape does not compile, with the shipped shapes."""
    try:
        return launch(*arguments, **options)
    except Exception as error:
        if not from_compiler(error) or not kernels.tiles.take_back_hopper():
            raise
    return launch(*arguments, **options)


class Operator(Generic[_P, _R]):
    """A launcher of kernels, callable directly and as the operator fastattn::`name`.

    Kernels read raw memory, so other tensor state is handled here. A tensor with torch's negative
    bit (such as z.conj().imag) is copied without it, or refused if the kernel writes into it; for
    operators the dispatcher does so. A tensor with a tangent is refused.

    The first required tensor determines the device, and whether something traces. The last
    parameter may be `options`, each of which is an argument of the operator, see `schema`. Calls
    have no keywords. `flops`: a formula of that module.
    """

    op: CustomOpDef

    def __init__(
        self, launch: Callable[_P, _R], flops: Formula, mutates_args: tuple[str, ...] = ()
    ) -> None:
        signature = inspect.signature(launch)
        parameters = list(signature.parameters.values())
        self._launch: Callable[..., _R] = launch
        self._first = [parameter.annotation for parameter in parameters].index(Tensor)
        self._takes_options = parameters[-1].annotation is Options
        self._tensors = {
            index: parameter.name
            for index, parameter in enumerate(parameters)
            if parameter.annotation in (Tensor, Tensor | None)
        }
        self._written = mutates_args
        name = launch.__name__
        if self._takes_options:
            tensors, returns = _schema(signature.replace(parameters=parameters[:-1]))
            self.op = schema.operator(name, self.direct, tensors, returns, flops)
        else:
            self.op = torch.library.custom_op(
                f"{NAMESPACE}::{name}",
                self.direct,
                mutates_args=mutates_args,
                schema=torch.library.infer_schema(launch, mutates_args=mutates_args),
            )
            register(name, tuple(signature.parameters), flops)

    def __call__(self, *values: _P.args, **_: _P.kwargs) -> _R:
        """Call the operator if something traces, else the launcher. Options: any strides."""
        arguments: Any = values
        if self._takes_options:
            arguments = (*arguments[:-1], contiguous(arguments[-1]))
        x = arguments[self._first]
        if tracing.may_be_traced(x):
            return self.by_op(*arguments, **_)
        arguments = self._of_memory(arguments)
        # `direct` inlined, as its call would cost as much as the choice.
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            try:
                return self._launch(*arguments)
            except Exception as error:
                return self._in_smaller_tiles(error, arguments)

    def by_op(self, *values: _P.args, **_: _P.kwargs) -> _R:
        """Call the torch.library operator."""
        arguments: Any = values
        if self._takes_options:
            return self.op(*arguments[:-1], *schema.flat(arguments[-1]))
        return self.op(*arguments)

    def direct(self, *values: _P.args, **_: _P.kwargs) -> _R:
        """Call the launcher directly, for untraced calls."""
        arguments = self._of_memory(values)
        # Triton launches on the current device, not the tensors'.
        with torch.cuda.device_of(arguments[self._first]):  # type: ignore[no-untyped-call]
            try:
                return self._launch(*arguments)
            except Exception as error:
                return self._in_smaller_tiles(error, arguments)

    def _of_memory(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with resolved tensors."""
        if tracing.in_forward_mode():
            tensors = {name: arguments[index] for index, name in self._tensors.items()}
            refuse_tangents(tensors, arguments[-1] if self._takes_options else None)
        negated = None
        for index in self._tensors:
            x = arguments[index]
            if x is not None and x.is_neg():
                negated = negated or list(arguments)
                if self._tensors[index] in self._written:
                    raise ValueError(
                        f"{self._tensors[index]} is written in place, and must not have torch's "
                        "negative bit: pass its resolve_neg()"
                    )
                negated[index] = x.resolve_neg()
        if self._takes_options:
            options = _resolved(arguments[-1])
            if options is not arguments[-1]:
                negated = negated or list(arguments)
                negated[-1] = options
        return arguments if negated is None else tuple(negated)

    def _in_smaller_tiles(self, error: Exception, arguments: tuple[Any, ...]) -> _R:
        """After a compiler error, relaunch with smaller tiles until one compiles.

        The tables are tested with certain releases of Triton; others must not end a training run.
        """
        tiles = kernels.tiles
        while from_compiler(error):
            refused = getattr(error, "tile", None)
            if not isinstance(refused, tiles.TileConfig) or not tiles.make_smaller(refused):
                break
            message = " ".join(str(error).split())[:200]
            warnings.warn(
                f"fastattn uses smaller, slower tiles than {refused}: "
                f"{type(error).__name__}: {message}",
                UserWarning,
                stacklevel=3,
            )
            try:
                return self._launch(*arguments)
            except Exception as another:
                error = another
        raise error


def operator(
    flops: Formula, mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Decorator that makes an `Operator` of a function that launches kernels."""
    return lambda launch: Operator(launch, flops, mutates_args)


def refuse_tangents(tensors: Mapping[str, object], options: Options | None) -> None:
    """Raise NotImplementedError if an argument of a running operator has a tangent."""
    if not tracing.in_forward_mode():
        return
    values: list[tuple[str, object]] = list(tensors.items())
    if options is not None:
        values += zip(options._fields, options, strict=True)
        values += [("mod_tensors", x) for x in options.mod_tensors]
    # torch runs an operator below autograd, which alone sees tangents.
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        for name, x in values:
            if isinstance(x, Tensor):
                checks.refuse_tangent(name, x)


def _schema(signature: inspect.Signature) -> tuple[str, str]:
    """Arguments and results of a function in an operator's schema."""

    def prototype() -> None: ...

    prototype.__signature__ = signature  # type: ignore[attr-defined]
    tensors, returns = torch.library.infer_schema(prototype, mutates_args=()).split(" -> ")
    return tensors[1:-1], returns


def contiguous(options: Options) -> Options:
    """Options with copies of tensors whose layout kernels cannot read."""
    if options.plain:
        return options
    changed = {}
    for name in CONTIGUOUS:
        x = getattr(options, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    return options._replace(**changed) if changed else options


def may_be_kept(q: Tensor, options: Options) -> bool:
    """Whether a launch on the current device may be cached: no functions or copies of options."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return False
    return not options.launched_anew and contiguous(options) is options


def _resolved(options: Options) -> Options:
    """Options with copies of tensors that have torch's negative bit."""
    if options.plain:
        return options
    changed: dict[str, Any] = {}
    for name in TENSORS:
        x = getattr(options, name)
        if x is not None and x.is_neg():
            changed[name] = x.resolve_neg()
    if any(x.is_neg() for x in options.mod_tensors):
        changed["mod_tensors"] = tuple(x.resolve_neg() for x in options.mod_tensors)
    return options._replace(**changed) if changed else options


def fake_in_layout(like: Tensor, heads: int, rows: int, cols: int, *, fp32: bool = False) -> Tensor:
    """Empty as in `kernels.launch.arguments.empty_in_layout`, which a fake may not import."""
    B, dtype = like.shape[0], torch.float32 if fp32 else like.dtype
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, rows, heads, cols, dtype=dtype).transpose(1, 2)
    return like.new_empty(B, heads, rows, cols, dtype=dtype)


def fake_output(q: Tensor, width: int, *, fp32: bool = False) -> tuple[Tensor, Tensor]:
    """Empty o [B, H_q, T_q, width] in the layout of q [B, H_q, T_q, D], and lse."""
    B, H_q, T_q, _D = q.shape
    lse = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    return fake_in_layout(q, H_q, T_q, width, fp32=fp32), lse
