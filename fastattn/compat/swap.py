"""`fastattn.swap`: a model's attention modules served by this library, in place and undoable."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..attention_layer import AttentionLayer
from . import blocks
from .multihead import MultiheadAttention, stay_on_path


class Swap:
    """What `swap` did to a model.

    Attributes:
        replaced: names of modules ("" is the model itself), and what they are served as.
        left: names of modules that look like attention and were not replaced, and why.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Make every module what it was. The objects, their weights and hooks are the same."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"replaced {_shown(name)}: {what}" for name, what in self.replaced.items()]
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
      trial on a random input, what attention over its projections gives;
    - models of Hugging Face transformers, by `set_attn_implementation`.

    A block that is called with more, such as a mask or a cache, computes that call by itself. For
    what is left, `fastattn.patch_sdpa` may do.

    Args:
        model: any module. Swap before torch.compile, FSDP and other wrappers.

    Returns:
        A `Swap`, which tells what was done and can undo it.

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    done = Swap()
    for name, module in list(_candidates(model, "", done, set())):
        if type(module) is nn.MultiheadAttention:
            _swap_multihead(name, module, done)
        else:
            _swap_block(name, module, done)
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
        done.left[name] = _why_left(module)
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


def _swap_multihead(name: str, module: nn.MultiheadAttention, done: Swap) -> None:
    if "forward" in vars(module):
        done.left[name] = "its forward was replaced on the object"
        return
    module.__class__ = MultiheadAttention
    hook = module.register_forward_pre_hook(stay_on_path)

    def undo() -> None:
        hook.remove()
        module.__class__ = nn.MultiheadAttention

    done.replaced[name] = "fastattn.MultiheadAttention"
    done._undo.append(undo)


def _swap_block(name: str, module: nn.Module, done: Swap) -> None:
    plan = blocks.recognise(module)
    if isinstance(plan, str):
        done.left[name] = plan
        return
    module.forward = blocks.FusedForward(module, plan)
    kind = "causal" if plan.causal else "bidirectional"
    heads = f"{plan.num_heads} query and {plan.num_kv_heads} key/value heads"
    turned = "" if plan.rotary is None else f", rotary positions ({plan.rotary.style})"
    done.replaced[name] = f"{kind} attention, {heads}{turned}"
    done._undo.append(lambda: delattr(module, "forward"))


def _swap_transformers(name: str, model: Any, done: Swap) -> None:
    """A model of transformers takes its attention by name, of all its layers at once."""
    try:
        from .transformers import register
    except ImportError as error:
        done.left[name] = f"fastattn cannot be registered with transformers: {error}"
        return
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation("fastattn")
    done.replaced[name] = 'attn_implementation="fastattn"'
    done._undo.append(lambda: model.set_attn_implementation(before))
