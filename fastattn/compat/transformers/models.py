"""Detect which models and modules of transformers call a registered attention function.

transformers registers attention functions in an `AttentionInterface`. Some families look their
function up there, others compute attention in their own code, whatever `attn_implementation` is,
and some do both in different modules. A class that looks the function up names an
`AttentionInterface` among its functions' globals.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_SDPA = "scaled_dot_product_attention"


def unserved(model: nn.Module, implementation: str) -> tuple[int, dict[str, str]]:
    """Find attention modules that ignore the registered attention function.

    Args:
        model: of transformers, or any module that contains one.
        implementation: attn_implementation of the configs of served modules.

    Returns:
        Number of served modules, and names of unserved attention modules with the reason. A module
        is attention by its class's name; of nested ones the outermost is named.
        `torch.nn.MultiheadAttention` and modules that contain one are excluded.
    """
    left: dict[str, str] = {}
    return _visit(model, "", implementation, left), left


def _visit(module: nn.Module, name: str, implementation: str, left: dict[str, str]) -> int:
    """Number of served modules in this one; adds the others to `left`."""
    if looks_up(type(module)):
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", implementation)
        if chosen == implementation:
            return 1
        left[name] = f"its config keeps attn_implementation={chosen!r} on a model that is built"
        return 0
    inner: dict[str, str] = {}
    served = 0
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        served += _visit(child, full, implementation, inner)
    by_torch = any(type(part) is nn.MultiheadAttention for part in module.modules())
    if is_attention(type(module)) and not served and not by_torch:
        kind = type(module).__name__
        reason = f"{kind} computes attention by itself, not by transformers' AttentionInterface"
        functions = (f for inner in module.modules() for f in _functions(type(inner)))
        if any(_SDPA in _named(f) for f in functions):
            reason += f"; it calls torch's {_SDPA}, which fastattn.patch_sdpa serves"
        left[name] = reason
    else:
        left.update(inner)
    return served


def restorer(model: nn.Module, name: str) -> Callable[[], None]:
    """A function that restores the current implementation of every config of a model, but `name`.

    Parts of a model, such as image and text towers, have their own configs with possibly different
    implementations; `set_attn_implementation` with one name sets all.
    """
    before: dict[int, tuple[Any, str | None]] = {}
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in configs:
        if id(config) not in before and hasattr(config, "_attn_implementation_internal"):
            before[id(config)] = (config, config._attn_implementation_internal)
            configs += [getattr(config, name, None) for name in config.sub_configs]

    def restore() -> None:
        for config, implementation in before.values():
            # The property without `_internal` also sets nested configs.
            if implementation != name:
                config._attn_implementation_internal = implementation

    return restore


def is_attention(kind: type) -> bool:
    """Whether a class's name means attention."""
    name = kind.__name__.lower()
    return "attention" in name or "attn" in name


def looks_up(kind: type) -> bool:
    """Whether a module class takes its attention function from an `AttentionInterface`."""
    return _looks_up(kind)


@cache
def _looks_up(kind: type) -> bool:
    from transformers import AttentionInterface

    return any(
        isinstance(function.__globals__.get(name), AttentionInterface)
        for function in _functions(kind)
        for name in _named(function)
    )


def _functions(kind: type) -> Iterator[FunctionType]:
    """Functions of a class and its bases, without the base classes of all models."""
    from transformers import PreTrainedModel

    for base in kind.__mro__:
        if base in PreTrainedModel.__mro__:
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                yield function


def _named(function: FunctionType) -> set[str]:
    """Globals and attributes named by a function and its inner functions."""
    codes = [function.__code__]
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return {name for code in codes for name in code.co_names}


@torch.compiler.assume_constant_result
def takes_rules(config: type) -> bool:
    """Whether models of a config class take the masks of "sdpa" and "flash_attention_2".

    Others get the float mask of "eager", which they may add to scores. ValueError: the family never
    calls a registered function.
    """
    return _takes_rules(config)


@cache
def _takes_rules(config: type) -> bool:
    from transformers import AttentionInterface

    models = _models_of(config)
    modules = {sys.modules[model.__module__] for model in models}
    named = [x for module in modules for x in vars(module).values()]
    looked_up = any(isinstance(x, AttentionInterface) for x in named)
    kinds = [x for x in named if isinstance(x, type) and issubclass(x, nn.Module)]
    own = [kind.__name__ for kind in kinds if is_attention(kind)]
    if own and not looked_up:
        raise ValueError(
            f'attn_implementation="fastattn" cannot serve models of {config.__name__}: {own[0]} '
            "computes attention by itself, not by transformers' AttentionInterface. Load them with "
            'attn_implementation="eager"; fastattn.swap tells what can be served of a model'
        )
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    return any(getattr(model, flag, False) for model in models for flag in flags)


def _models_of(config: type) -> list[type]:
    """Model classes of a config class; without any, its family's, or AutoModel's for it."""
    from transformers import MODEL_MAPPING

    names = [base.__module__ for base in config.__mro__ if ".configuration_" in base.__module__]
    families = [name.replace(".configuration_", ".modeling_") for name in names]
    for family in families:
        with suppress(ImportError):
            import_module(family)
    models = _models()
    of_bases = ([x for x in models if x.config_class is base] for base in config.__mro__)
    of_family = [x for x in models if x.__module__ in families[:1]]
    own = next(filter(None, (*of_bases, of_family)), None)
    return own or ([MODEL_MAPPING[config]] if config in MODEL_MAPPING else [])


def _models() -> list[Any]:
    """Loaded model classes."""
    from transformers import PreTrainedModel

    kinds: list[Any] = [PreTrainedModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds
