"""Find attention in eager code by capture with torch.compile, which guards on the code's inputs.

`backend` is for whole models: `torch.compile(model, backend="fastattn")`. `CapturedForward` is for
the modules of `swap(model, eager=True)`.
"""

import inspect
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as torch_module

from ..calls import Calls, running
from ..sdpa import scaled_dot_product_attention, torch_attention
from .adapted import REASON, REFUSED, UNSERVED
from .graph import rewrite
from .nodes import Unmatched
from .scope import is_of_swap

_OFF = "torch.compile is switched off"
# One graph per module, where torch.compile supports it.
_KNOWN = inspect.signature(torch.compile).parameters
_LIMIT: Any = {"recompile_limit": 64} if "recompile_limit" in _KNOWN else {}
_FUNCTIONS = (FunctionType, staticmethod, classmethod)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def backend(
    graph: fx.GraphModule,
    example_inputs: list[Tensor],
    *,
    options: dict[str, Any] | None = None,
    **rest: Any,
) -> Any:
    """Backend of torch.compile that replaces attention in a graph by `fastattn.attention`.

    Matches product, softmax and product, or torch's scaled_dot_product_attention. Another backend
    compiles the rest of the graph.

    Args:
        graph, example_inputs: as for any backend.
        options: {"inner": name of the other backend}; default "inductor".
        rest: for the other backend.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is no inner backend of this name.
    """
    import torch._dynamo

    rewrite(graph)
    for part in [x for x in graph.modules() if isinstance(x, fx.GraphModule)]:
        for node in part.graph.nodes:
            if node.op == "call_function" and node.target is torch_attention:
                node.target = scaled_dot_product_attention
        part.recompile()
    inner = torch._dynamo.lookup_backend((options or {}).get("inner", "inductor"))
    return inner(graph, example_inputs, **rest)


def _attention_alone(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    from torch._dynamo.utils import get_traced_code

    if any({"environ", "getenv"} & {*code.co_names} for code in get_traced_code() or ()):
        raise Unmatched("it reads the environment, on which torch.compile does not guard")
    count, reasons = rewrite(graph)
    if not count:
        raise Unmatched(
            "; ".join(dict.fromkeys(x for _, x in reasons)) or "no softmax is in its graph"
        )
    return graph.forward


class CapturedForward:
    """Adapter that runs a class's captured forward with its attention served."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._captured = Calls()

    def __reduce__(self) -> Any:
        return CapturedForward, (self.kind,)

    def __deepcopy__(self, memo: Any) -> "CapturedForward":
        return self

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        import torch._dynamo.config
        import torch._dynamo.exc as errors

        if torch.compiler.is_compiling() or REFUSED in vars(module):
            return NotImplemented
        if (reason := _why_not(module)) is not None:
            setattr(module, REASON, reason)
            return NotImplemented
        functions = _functions(module)
        if functions not in self._compiled:
            # A new backend object, so that torch.compile does not reuse old captures.
            self._compiled[functions] = torch.compile(
                self.kind.forward, backend=partial(_attention_alone), fullgraph=True, **_LIMIT
            )
        # Count calls of torch's function when the forward runs, not during its capture.
        running.begin_capture(self._captured)
        captured = False
        try:
            output = self._compiled[functions](module, *args, **kwargs)
            captured = True
            if not running.fused:
                setattr(module, UNSERVED, _OFF)
            return output
        except (errors.TorchDynamoException, errors.FailOnRecompileLimitHit) as error:
            # Nothing has run yet, as the whole forward is one graph or none.
            setattr(module, REASON, _why(error))
            setattr(module, REFUSED, True)
            return NotImplemented
        finally:
            running.end_capture(self._captured, captured=captured)


def _functions(module: nn.Module) -> tuple[Any, ...]:
    """Functions of the classes of a module and its parts, which torch.compile does not guard."""
    kinds = {type(x): None for x in (*module.modules(), *vars(module).values())}
    kinds = {kind: None for kind in kinds if kind.__module__ != "builtins"}
    functions: list[Any] = []
    for base in {base: None for kind in kinds for base in kind.__mro__[:-1]}:
        if base.__module__.startswith("torch."):
            functions.append(vars(base).get("forward"))
        else:
            functions += [x for x in vars(base).values() if isinstance(x, _FUNCTIONS)]
    return tuple(functions)


def _why(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    reason = str(inner).strip().partition("\n")[0]
    return reason if isinstance(inner, Unmatched) else f"{type(inner).__name__}: {reason}"


def _why_not(module: nn.Module) -> str | None:
    """Reason that a module's forward cannot be captured, or None."""
    if torch._C._get_tracing_state() is not None or is_fx_symbolic_tracing():
        return "torch.jit or torch.fx traces the call"
    if torch._dynamo.config.disable:  # an error with fullgraph=True
        return _OFF
    parts = [part for part in module.modules() if part is not module]
    hooks = (hook for x in parts for name in _HOOKS for hook in vars(x)[name].values())
    changed = any("forward" in vars(part) for part in parts) or not all(map(is_of_swap, hooks))
    if changed or torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook, or a forward of its own, is on a part of it"
    return None
