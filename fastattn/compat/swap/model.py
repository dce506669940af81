"""`fastattn.swap`: serve a model's attention modules by this library, in place and undoable."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...modules.layer import AttentionLayer
from ..fused_block import Calls, FusedForward
from ..multihead import MultiheadAttention, stay_on_path
from . import blocks


class Swap:
    """What `swap` did to a model.

    Attributes:
        replaced: names of modules ("" is the model itself), and what they are served as.
        left: names of modules that look like attention and were not replaced, and why.
        calls: of each replaced module, how many of its calls this library has served, and how many
            went to its own forward; see `Calls`. A model of transformers has no count.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.calls: dict[str, Calls] = {}
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Make every module what it was. The objects, their weights and hooks are the same."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = []
        for name, what in self.replaced.items():
            calls = self.calls.get(name)
            counted = "" if calls is None else f" ({calls.served} calls served, {calls.passed} not)"
            lines.append(f"replaced {_shown(name)}: {what}{counted}")
        return "\n".join(lines + [f"left {_shown(name)}: {why}" for name, why in self.left.items()])


def _shown(name: str) -> str:
    return name or "the model"


def swap(model: nn.Module) -> Swap:
    """Serve the attention modules of a model by `fastattn`, as far as they are known.

    No module is exchanged for another one: `torch.nn.MultiheadAttention` objects get the class
    `fastattn.MultiheadAttention`, blocks of the kinds below another `forward`. Weights, hooks,
    training mode, device and dtype stay as they are, and so does whatever refers to the modules.
    Known are

    - `torch.nn.MultiheadAttention` itself; a subclass may do anything and is left;
    - blocks with one projection for queries, keys and values, such as nanoGPT's CausalSelfAttention
      and vision transformers', and blocks with three, such as Llama's, causal or not, with grouped
      heads or not, whose `forward` takes x alone or x and rotary tables. A block has to give, in a
      trial on random weights and inputs, what attention over its projections gives, in training
      too; where a trial cannot tell, it is left;
    - models of Hugging Face transformers, by `set_attn_implementation`.

    A block that is called with more, such as a mask or a cache, computes that call by itself; an
    argument that is its default is no more. `Swap.calls` counts both. What is left has its reason
    in `Swap.left`; `fastattn.patch_sdpa` serves it if it calls torch's own attention function.

    Args:
        model: any module. Swap before torch.compile, FSDP and other wrappers.

    Returns:
        A `Swap`: what was done, and how to undo it.

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    done = Swap()
    tried: blocks.Tried = []
    for name, module in list(_candidates(model, "", done, set())):
        if type(module) is nn.MultiheadAttention:
            _swap_multihead(name, module, done)
        else:
            _swap_block(name, module, done, tried)
    return done


def _candidates(
    module: nn.Module, name: str, done: Swap, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may be attention, each once, under its first name; parts of them not."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, (MultiheadAttention, AttentionLayer)):
        done.left[name] = "it is fastattn's already"
        return
    if hasattr(module, "set_attn_implementation"):
        _swap_transformers(name, module, done)
        return
    if type(module) is nn.MultiheadAttention or not isinstance(blocks.parts(module), str):
        yield name, module
        return
    if _looks_like_attention(module):
        _leave(name, module, _why_left(module), done)
    for child_name, child in module.named_children():
        yield from _candidates(child, f"{name}.{child_name}" if name else child_name, done, seen)


def _looks_like_attention(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return isinstance(module, nn.MultiheadAttention) or "attention" in kind or "attn" in kind


def _why_left(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return f"{type(module).__name__} is a subclass of nn.MultiheadAttention"
    reason = blocks.parts(module)
    assert isinstance(reason, str), "blocks with known parts are candidates"
    return reason


def _leave(name: str, module: nn.Module, reason: str, done: Swap) -> None:
    kind = type(module)
    done.left[name] = (
        f"{kind.__module__}.{kind.__qualname__}: {reason}. If it calls torch's "
        "scaled_dot_product_attention, fastattn.patch_sdpa serves that"
    )


def _swap_multihead(name: str, module: nn.MultiheadAttention, done: Swap) -> None:
    if "forward" in vars(module):
        _leave(name, module, "its forward was replaced on the object", done)
        return
    module.__class__ = MultiheadAttention
    served = module
    assert isinstance(served, MultiheadAttention)
    done.calls[name] = served.calls = Calls()
    hook = stay_on_path(served)

    def undo() -> None:
        hook.remove()
        del served.calls
        module.__class__ = nn.MultiheadAttention

    done.replaced[name] = "fastattn.MultiheadAttention"
    done._undo.append(undo)


def _swap_block(name: str, module: nn.Module, done: Swap, tried: blocks.Tried) -> None:
    plan = blocks.recognise(module, tried)
    if isinstance(plan, str):
        _leave(name, module, plan, done)
        return
    forward = FusedForward(module, plan)
    module.forward = forward
    done.calls[name] = forward.calls
    done.replaced[name] = str(plan)
    done._undo.append(lambda: delattr(module, "forward"))


def _swap_transformers(name: str, model: Any, done: Swap) -> None:
    """A model of transformers takes its attention by name, of all its layers at once."""
    try:
        from ..transformers.attend import NAME, register
        from ..transformers.models import looks_up, restorer, unserved
    except ImportError as error:
        done.left[name] = f"fastattn cannot be registered with transformers: {error}"
        return
    register()
    if any(looks_up(type(module)) for module in model.modules()):
        done._undo.append(restorer(model))
        model.set_attn_implementation(NAME)
    served, left = unserved(model, NAME)
    if served:
        done.replaced[name] = f'attn_implementation="{NAME}"'
    elif not left:
        left[""] = "no module of it is attention by transformers' AttentionInterface"
    for inner, reason in left.items():
        done.left[".".join(filter(None, (name, inner)))] = reason
    for inner, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            _swap_multihead(".".join(filter(None, (name, inner))), module, done)
