"""Find attention in eager code by capture with torch.compile, which guards on the code's inputs.

`backend` is for whole models: `torch.compile(model, backend="fastattn")`. `CapturedForward` is for
the modules of `swap(model, eager=True)`.
"""

import itertools
import threading
import time
import warnings
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as torch_module

from ... import dispatch
from ...tracing import transforming
from ..calls import Calls, running, traced_modules
from ..sdpa import Arguments, by_torch, served_attention, torch_attention
from .adapted import CAPTURES, PARTS, REASON, REFUSED, UNSERVED
from .form import form_of
from .graph import rewrite
from .nodes import Unmatched
from .scope import is_of_swap
from .source import untraced

_OFF = "torch.compile is switched off"
_NONE = "no softmax is in its graph"
# Captures by one module for one form of call, and seconds of all captures of a class: a sixth while
# none is of use.
LIMIT, CEILING = 6, 60.0
_numbers = itertools.count()
_FUNCTIONS = (FunctionType, staticmethod, classmethod)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def backend(
    graph: fx.GraphModule,
    example_inputs: list[Tensor],
    *,
    options: dict[str, Any] | None = None,
    **rest: Any,
) -> Any:
    """Replace attention in a graph by `fastattn.attention`: a backend of torch.compile.

    Matches product, softmax and product, or torch's scaled_dot_product_attention. Another backend
    compiles the rest of the graph. What follows a context manager that torch.compile cannot trace
    is in no graph.

    Args:
        graph, example_inputs: as for any backend.
        options: {"inner": name of the other backend}; default "inductor".
        rest: for the other backend.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is no inner backend of this name.
    Warns:
        UserWarning: attention follows such a context manager, in a function where a graph ends.
    """
    import torch._dynamo

    _, left = _serve(graph)
    if left and dispatch.logs():
        dispatch.write_once(f'torch.compile(backend="fastattn") left a softmax: {left}')
    _warn_of_rest(graph)
    inner = torch._dynamo.lookup_backend((options or {}).get("inner", "inductor"))
    return inner(graph, example_inputs, **rest)


def _warn_of_rest(graph: fx.GraphModule) -> None:
    """Warn about a context manager that broke the graph, if attention follows it."""
    why = getattr(graph, "compile_subgraph_reason", None)
    place = untraced(why.user_stack) if why is not None and why.graph_break else None
    if place is not None:
        warnings.warn(
            f"torch.compile cannot trace the context manager at {place}: the rest of its function, "
            "with attention in it, runs without fastattn. Call fastattn.swap(model) before "
            "torch.compile to replace scaled_dot_product_attention there",
            UserWarning,
            stacklevel=2,
        )


def _serve(graph: fx.GraphModule) -> tuple[int, str]:
    """Rewrite attention in a graph; returns how many, and why other softmaxes are left."""
    count, left = rewrite(graph)
    for part in [x for x in graph.modules() if isinstance(x, fx.GraphModule)]:
        for node in part.graph.find_nodes(op="call_function", target=torch_attention):
            node.target = _attention_in_graph
            count += 1
        part.recompile()
    _count_traced(count, left)
    return count, "; ".join(dict.fromkeys(why for _, why in left))


def _count_traced(count: int, left: list[tuple[fx.Node, str]]) -> None:
    """Count the modules that a graph was traced from, by the classes whose softmax is left."""
    reasons: dict[Any, str] = {}
    for node, why in left:
        stack = [*(node.meta.get("nn_module_stack") or {}).values()]
        reasons[stack[-1][1] if stack else None] = why
    for calls, kind in traced_modules(bool(count or left)):
        unknown = "" if kind is object else reasons.get(None)  # object: by torch's function
        why = reasons.get(kind, unknown) or ("" if count else _NONE)
        calls.compiled = True
        calls.count_passed(why) if why else calls.count_served()


def _attention_in_graph(*args: Any, **kwargs: Any) -> Tensor:
    """torch's function, where code holds it by a name of its own."""
    call = Arguments.of_call(*args, **kwargs)
    served = served_attention(call)
    if isinstance(served, str):
        running.refused = served
        return by_torch(call)
    running.fused = True
    return served


def _attention_alone(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    from torch._dynamo.utils import get_traced_code

    running.captures += 1
    if any({"environ", "getenv"} & {*code.co_names} for code in get_traced_code() or ()):
        raise Unmatched("it reads the environment, on which torch.compile does not guard")
    count, reasons = _serve(graph)
    if not count:
        raise Unmatched(reasons or _NONE)
    return graph.forward


class _Variables:
    """While a capture is possible, numbers and growing tensors of modules are variables.

    One setting for all threads, as torch.compile has it; the last to leave restores it.
    """

    settings: ClassVar[dict[str, Any]] = {
        "allow_unspec_int_on_nn_module": True,
        "force_nn_module_property_static_shapes": False,
        # Captures are counted here.
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
    }

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, dict[str, Any]()

    def __enter__(self) -> None:
        config = torch._dynamo.config
        with self.lock:
            if not self.inside:
                self.before = {name: getattr(config, name) for name in self.settings}
                for name, x in self.settings.items():
                    setattr(config, name, x)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                for name, x in self.before.items():
                    setattr(torch._dynamo.config, name, x)


_variables = _Variables()


class CapturedForward:
    """Adapter that runs a class's captured forward with its attention served.

    All modules of a class share captures, as far as torch.compile's guards hold.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.seconds, self.useful = 0.0, False
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._refused: dict[Any, str] = {}
        self._captured = Calls()

    def __reduce__(self) -> Any:
        return CapturedForward, (self.kind,)

    def __deepcopy__(self, memo: Any) -> "CapturedForward":
        return self

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        import torch._dynamo.config

        if torch.compiler.is_compiling():
            return NotImplemented
        functions = _functions(module)
        reason = _why_later(module) or _why_not(module)
        if reason is None and self._refused:
            reason = self._refused.get((functions, *form_of(module, args, kwargs)))
        if reason is not None:
            setattr(module, REASON, reason)
            return NotImplemented
        capture, known = self._compiled.get(functions) or self._compile(functions)
        over = self._why_no_more(module, args, kwargs)
        if over is None:
            with _variables:
                return self._run(capture, _OFF, functions, module, args, kwargs)
        return self._run(known, over, functions, module, args, kwargs)

    def _compile(self, functions: tuple[Any, ...]) -> tuple[Any, Any]:
        """The forward that is captured where no capture fits, and that which then runs as it is."""
        forward = self.kind.forward
        if isinstance(forward, FunctionType):
            # torch.compile keeps captures with the code: not with those that others made.
            named = (forward.__name__, forward.__defaults__, forward.__closure__)
            # It keeps what it saw to vary by the code's name.
            code = forward.__code__.replace(co_name=f"{forward.__name__} {next(_numbers)}")
            copied = FunctionType(code, forward.__globals__, *named)
            copied.__kwdefaults__ = forward.__kwdefaults__
            copied.__dict__.update(vars(forward))
            forward = copied
        # A new backend object, so that torch.compile does not reuse old captures.
        capture = torch.compile(forward, backend=partial(_attention_alone), fullgraph=True)
        self._compiled[functions] = capture, torch._dynamo.run(forward)
        return self._compiled[functions]

    def _why_no_more(self, module: nn.Module, args: Any, kwargs: Any) -> str | None:
        """Reason that no further capture is made for a call, or None."""
        ceiling = CEILING if self.useful else CEILING / 6
        if self.seconds > ceiling:
            why = "".join(f"; {reason}" for reason in [*self._refused.values()][-1:])
            return (
                f"captures of its class took {self.seconds:.0f} s, the limit is {ceiling:.0f}{why}"
            )
        captures = vars(module).get(CAPTURES, {})
        if max(map(len, captures.values()), default=0) < LIMIT:
            return None
        reasons = captures.get(form_of(module, args, kwargs)[0], [])
        if len(reasons) < LIMIT:
            return None
        why = reasons[-1] or "its forward reads numbers, lists or other state that changes"
        return f"none of {LIMIT} captures of such calls fits; {why}"

    def _run(
        self, call: Any, why: str, functions: Any, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a captured forward, and count a capture; why: the reason if none has run."""
        import torch._dynamo.exc as errors

        # Count calls of torch's function when the forward runs, not during its capture.
        outer, begin = running.begin_capture(self._captured), time.perf_counter()
        captured = False
        try:
            output = call(module, *args, **kwargs)
            captured = True
            # Where no capture fits, the forward's calls of torch's function may still be served.
            known = not running.captures and running.serves(self._captured)
            if not running.fused and not known:
                setattr(module, UNSERVED, running.refused or why)
            if running.captures:
                self._count(module, args, kwargs, begin, "")
            return output
        except Exception as error:
            # Its tracer may also fail an assertion, and marks every error.
            own = isinstance(error, (errors.TorchDynamoException, errors.FailOnRecompileLimitHit))
            if not own and not hasattr(error, "innermost_user_frame_summary"):
                raise
            # Nothing has run yet, as the whole forward is one graph or none.
            reason = _why(error)
            key = (functions, *self._count(module, args, kwargs, begin, reason))
            self._refused[key] = reason
            setattr(module, REASON, reason)
            setattr(module, REFUSED, (self._refused, key))
            return NotImplemented
        finally:
            running.end_capture(self._captured, outer, captured=captured)

    def _count(
        self, module: nn.Module, args: Any, kwargs: Any, begin: float, reason: str
    ) -> tuple[Any, Any]:
        """Count a capture, or why it failed; returns the form of the call."""
        self.seconds += time.perf_counter() - begin
        self.useful |= not reason
        form = form_of(module, args, kwargs)
        vars(module).setdefault(CAPTURES, {}).setdefault(form[0], []).append(reason)
        return form


def _functions(module: nn.Module) -> tuple[Any, ...]:
    """Functions of the classes of a module and its parts, which torch.compile does not guard.

    With sizes of parameters: numbers of layers of one width are no variables for another's.
    """
    parts = [*module.modules()]
    kinds = {type(x): None for x in (*parts, *vars(module).values())}
    kinds = {kind: None for kind in kinds if kind.__module__ != "builtins"}
    functions: list[Any] = [
        x.shape for part in parts for x in part._parameters.values() if x is not None
    ]
    for base in {base: None for kind in kinds for base in kind.__mro__[:-1]}:
        if base.__module__.startswith("torch."):
            functions.append(vars(base).get("forward"))
        else:
            functions += [x for x in vars(base).values() if isinstance(x, _FUNCTIONS)]
    return tuple(functions)


def _why(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, Unmatched):
        return str(inner)
    reason = str(inner).strip().partition("\n")[0]
    if "data-dependent" in reason.lower():
        reason = "it branches on values of tensors"
    stack = getattr(inner, "real_stack", None)
    line = f" at {stack[-1].line.strip()!r}" if stack and stack[-1].line else ""
    return f"torch.compile cannot capture its forward{line}: {reason}"


def _why_later(module: nn.Module) -> str | None:
    """Reason that a forward is not captured with all its parts' while they may serve, or None."""
    parts = vars(module).get(PARTS, ())
    if any(calls.served for calls in parts):
        return "only its parts do"
    seen = not parts or REASON in vars(module)  # it has run as it is, perhaps without them
    return None if seen else "its parts are tried first"


def _why_not(module: nn.Module) -> str | None:
    """Reason that a module's forward cannot be captured, or None."""
    if torch._C._get_tracing_state() is not None or is_fx_symbolic_tracing():
        return "torch.jit or torch.fx traces the call"
    if transforming():
        return "torch.func transforms the call; tangents of forward_ad are served"
    if torch._dynamo.config.disable:  # an error with fullgraph=True
        return _OFF
    parts = [part for part in module.modules() if part is not module]
    hooks = (hook for x in parts for name in _HOOKS for hook in vars(x)[name].values())
    changed = any("forward" in vars(part) for part in parts) or not all(map(is_of_swap, hooks))
    if changed or torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook, or a forward of its own, is on a part of it"
    return None
