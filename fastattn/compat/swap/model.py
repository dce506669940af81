"""`fastattn.swap`: replace a model's attention by fastattn's, in place, with undo."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import fx, nn

from ...modules.layer import AttentionLayer
from ..calls import Calls
from ..multihead import MultiheadAttention, leave_path, stay_on_path
from .adapted import PARTS, Adapter, adapt, end_adapter, exchanged
from .eager import CapturedForward
from .scope import Serving, unwatch, watch
from .source import SDPA, SOFTMAX, names_in, softmax_parts

_BY_TORCHS_FUNCTION = f"calls to F.{SDPA} use fastattn"
_EAGER = "try fastattn.swap(model, eager=True) or adapters="
_UNNAMED = f"its code names neither {SDPA} nor softmax, and no call of either was seen"
_COMPILED = 'torch.compile traced its forward for another backend; use backend="fastattn"'
_BY_CAPTURE = "attention in its forward, captured by torch.compile, uses fastattn"
_REGISTERED = 'attn_implementation="fastattn"'


class Swap:
    """Result of `swap`; `print` it to see which modules use fastattn, which do not, and why.

    Attributes:
        calls: call counts (`Calls`) of each swapped module ("" is the model itself). A module
            without attention of its own has 0 calls.
    """

    def __init__(self) -> None:
        self.calls: dict[str, Calls] = {}
        # How modules use fastattn: by their new class, adapter or the registered function.
        self._ways: dict[str, str] = {}
        self._watched: dict[str, type[nn.Module]] = {}
        self._names: dict[str, frozenset[str]] = {}
        # For models of transformers, `left` lists modules that ignore the registered function.
        self._of_transformers: set[str] = set()
        self._left: dict[str, str] = {}
        self._changed: weakref.WeakKeyDictionary[nn.Module, Calls] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    @property
    def replaced(self) -> dict[str, str]:
        """Names of modules of which a call used fastattn, and how."""
        return {x: way for x, way in self._served().items() if self.calls[x].served}

    @property
    def unseen(self) -> dict[str, str]:
        """Names of modules that have not run yet, and how their calls will use fastattn."""
        return {name: way for name, way in self._served().items() if self._is_unseen(name)}

    @property
    def left(self) -> dict[str, str]:
        """Names of possible attention modules of which no call used fastattn, and why."""
        served = self._served()
        left = {}
        for name, kind in self._watched.items():
            called = any(word in kind.__name__.lower() for word in ("attention", "attn"))
            softmax = not SOFTMAX.isdisjoint(self._names[name])
            if (softmax or called) and name not in served and name not in self._of_transformers:
                left[name] = f"its code names softmax: {_EAGER}" if softmax else _UNNAMED
        # A class named as attention may only contain attention.
        listed = served | left | self._left
        left = {
            name: why
            for name, why in left.items()
            if not SOFTMAX.isdisjoint(self._names[name])
            or not any(x != name and x.startswith(name and f"{name}.") for x in listed)
        }
        for name, why in self._left.items():
            if not any(x == name or (name and x.startswith(f"{name}.")) for x in served):
                left[name] = why
        idle = (x for x in served if x not in self.replaced and not self._is_unseen(x))
        return left | {name: f"no call used fastattn: {self._why(name)}" for name in idle}

    def _served(self) -> dict[str, str]:
        watched = {
            name: _BY_CAPTURE if self.calls[name].compiled else _BY_TORCHS_FUNCTION
            for name, kind in self._watched.items()
            if self.calls[name].counted
            or SDPA in self._names[name]
            or issubclass(kind, nn.MultiheadAttention)
        }
        return watched | self._ways

    def _is_unseen(self, name: str) -> bool:
        calls = self.calls[name]
        return not (calls.counted or calls.unseen or self._is_compiled(name))

    def _is_compiled(self, name: str) -> bool:
        """Whether torch.compile traced the forward, perhaps as another layer's of the class."""
        kinds = self._watched.items()
        return any(self.calls[x].compiled for x, kind in kinds if kind is self._watched.get(name))

    def _why(self, name: str) -> str:
        calls, kind = self.calls[name], self._watched.get(name)
        if calls.passed or kind is None:
            return calls.reason
        if self._ways.get(name) == _REGISTERED:
            return "its forward ran without a call to the function registered with transformers"
        softmax = not SOFTMAX.isdisjoint(self._names[name])
        if softmax and self._is_compiled(name):
            return _COMPILED
        why = f"its forward ran without a call to F.{SDPA}"
        if softmax and name not in self._ways:
            return f"{why}, as its code has a softmax of its own: {_EAGER}"
        return f"{why}: by another branch, or by a reference in an attribute or closure"

    def undo(self) -> None:
        """Restore every module. The objects, weights and hooks are unchanged."""
        for module, calls in [*self._changed.items()]:
            _release(module, calls)
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        used = self.replaced | self.unseen
        lines = [f"{self._label(name)}: {how}{self._counted(name)}" for name, how in used.items()]
        lines += [f"{self._label(name)}: unchanged: {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no attention was found in the code of the model's modules"

    def _label(self, name: str) -> str:
        kind = self._watched.get(name)
        label = name or "the model"
        return label if kind is None else f"{label} ({kind.__module__}.{kind.__qualname__})"

    def _counted(self, name: str) -> str:
        if (calls := self.calls.get(name)) is None:
            return ""
        why = f", {calls.passed} without fastattn: {calls.reason}" if calls.passed else ""
        count = "1 call" if calls.served == 1 else f"{calls.served} calls"
        return f" [{count} so far{why}]"


def swap(
    model: nn.Module,
    *,
    eager: bool = False,
    adapters: Mapping[type[nn.Module], Adapter] | None = None,
) -> Swap:
    """Make the attention of a model use `fastattn`, in place.

    No module is replaced or copied: weights, hooks, training mode, device and dtype stay, and later
    changes take effect. An earlier swap of the model ends.

    - `torch.nn.MultiheadAttention` objects get the class `fastattn.MultiheadAttention`. Subclasses
      keep their forward.
    - Models of Hugging Face transformers get `set_attn_implementation("fastattn")`.
    - Every other module keeps its forward. While it runs, torch's `scaled_dot_product_attention` is
      `fastattn.compat.sdpa`'s, which passes on calls that the kernels cannot serve; so is what
      modules imported from torch by name. Attributes and closures that hold it keep torch's.

    `Swap.calls` counts calls; `print(swap(model))` shows which modules use fastattn, and why not.

    Args:
        model: any module. Swap before torch.compile, FSDP and other wrappers.
        eager: also serve modules that compute product, softmax and product themselves:
            torch.compile captures their forward, with guards on its inputs, and attention in the
            graph is replaced. A call that cannot be captured, finds a hook inside or has no
            attention in its graph runs unchanged; other forms of call are tried.
        adapters: by exact class of module, functions `adapter(module, *args, **kwargs)` that return
            the output of a call, or NotImplemented to use the module's own forward.

    Returns:
        A `Swap`, with a report and `undo`.

    Raises:
        TypeError: model is no torch.nn.Module, adapters are no dict from classes of modules to
            functions.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    adapters = _checked_adapters(adapters)
    for module in model.modules():
        _release(module)
    done = Swap()
    captured = cache(CapturedForward)  # one for all modules of a class
    serving: Serving | None = None
    eager_modules: dict[str, nn.Module] = {}
    within = set[nn.Module]()  # softmaxes that the module around them has in its capture
    for name, module in list(_matches(model, "", done, set(), adapters)):
        kind = type(module)
        if _is_torchs(kind) and kind not in adapters and "forward" not in vars(module):
            _swap_multihead(name, module, done)  # type: ignore[arg-type]
            continue
        if kind.__module__.startswith("torch.nn.") and not (kind in adapters or _is_torchs(kind)):
            continue
        done.calls[name], done._watched[name] = Calls(), kind
        names = names_in(module)
        if eager and (parts := softmax_parts(module, names)):
            names |= SOFTMAX
            within.update(parts)
        done._names[name] = frozenset() if module in within else names
        if serving is None:
            serving = Serving()
            done._undo.append(serving.end)
        watch(module, done.calls[name], serving)
        done._changed[module] = done.calls[name]
        if kind in adapters:
            _adapt(name, module, adapters[kind], "its adapter computes its calls", done)
        elif name in done._ways or SOFTMAX.isdisjoint(done._names[name]):
            continue
        elif eager:
            _adapt(name, module, captured(cast(Any, kind)), _BY_CAPTURE, done)
            eager_modules[name] = module
        elif name not in done._of_transformers:
            done.calls[name].kind = kind
    served = done._served()
    for name, module in eager_modules.items():
        inside = [x for x in served if x != name and x.startswith(name and f"{name}.")]
        setattr(module, PARTS, [done.calls[x] for x in inside if x in done.calls])
    return done


def _checked_adapters(adapters: Any) -> Mapping[type[nn.Module], Adapter]:
    adapters = {} if adapters is None else adapters
    expected = "adapters must map classes of torch.nn.Module to functions"
    if not isinstance(adapters, Mapping):
        raise TypeError(f"{expected}, got {type(adapters).__name__}")
    for kind, adapter in adapters.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and callable(adapter)):
            raise TypeError(f"{expected}, got {kind!r}: {adapter!r}")
    return adapters


def _matches(
    module: nn.Module,
    name: str,
    done: Swap,
    seen: set[int],
    adapters: Any,
    looks_up: Callable[[type], bool] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are or may contain attention, each once, under its first name.

    looks_up: inside a model of transformers: whether a class calls the registered function.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, (MultiheadAttention, AttentionLayer)):
        done._left[name] = "it is fastattn's already"
        return
    if isinstance(module, torch.jit.ScriptModule):
        done._left[name] = "torch.jit has compiled it"
        return
    graph = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    if any(SDPA in str(node.target) for node in graph):
        done._left[name] = f"its graph, from torch.fx or torch.export, has torch's {SDPA} itself"
    if hasattr(module, "set_attn_implementation") and not looks_up:
        looks_up = _swap_transformers(name, module, done)
    registered = looks_up is not None and looks_up(type(module))
    if looks_up:
        done._of_transformers.add(name)
    if registered and name not in done._left:
        done._ways[name] = _REGISTERED
    yield name, module
    if registered or type(module) in adapters or _is_torchs(type(module)):
        return
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        yield from _matches(child, full, done, seen, adapters, looks_up)


def _adapt(name: str, module: nn.Module, adapter: Adapter, way: str, done: Swap) -> None:
    if "forward" in vars(module):
        done._left[name] = "a forward that was set on the object replaces that of its class"
        return
    done._ways[name] = way
    adapt(module, adapter, done.calls[name])


def _is_torchs(kind: type) -> bool:
    """Whether a class is torch's multihead attention, or one that torch's wrappers made of it."""
    own = kind.__module__.startswith("torch.") and issubclass(kind, nn.MultiheadAttention)
    return own and cast(Any, kind).forward is nn.MultiheadAttention.forward


def _swap_multihead(name: str, module: nn.MultiheadAttention, done: Swap) -> None:
    module.__class__ = exchanged(type(module), nn.MultiheadAttention, MultiheadAttention)
    served = cast(MultiheadAttention, module)
    done.calls[name] = served.calls = Calls()
    stay_on_path(served)
    done._ways[name] = "fastattn.MultiheadAttention"
    done._changed[module] = served.calls


def _release(module: nn.Module, calls: Calls | None = None) -> None:
    """End the swap of a module that counts in `calls`, or any; the module may be a copy."""
    unwatch(module, calls)
    end_adapter(module, calls)
    if not isinstance(module, MultiheadAttention) or module.calls is None:
        return
    if calls in (None, module.calls):
        leave_path(module)
        del module.calls
        module.__class__ = exchanged(type(module), MultiheadAttention, nn.MultiheadAttention)


def _swap_transformers(name: str, model: Any, done: Swap) -> Callable[[type], bool] | None:
    """Set the attention implementation of a model of transformers, for all layers.

    Returns whether a class calls the registered function; other modules are swapped as usual.
    """
    try:
        from ..transformers.hf_attention import NAME, register
        from ..transformers.models import looks_up, restorer, unserved

        register()
    except ImportError as error:
        done._left[name] = f"fastattn cannot be registered with transformers: {error}"
        return None
    if any(looks_up(type(module)) for module in model.modules()):
        done._undo.append(restorer(model, NAME))
        model.set_attn_implementation(NAME)
    served, left = unserved(model, NAME)
    if not served and not left:
        left[""] = "no module of it uses transformers' AttentionInterface"
    for inner, reason in left.items():
        done._left[".".join(filter(None, (name, inner)))] = reason
    return looks_up
