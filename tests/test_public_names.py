"""Public names, their parameters and defaults, and the CLI's options, a line each in a list.

Keyword-only parameters are in alphabetical order. After an intended change,
`python tests/test_public_names.py` writes `public_names.txt` again.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattn.cli.main import build_parser
from fastattn.missing import REMOVED

LISTED = Path(__file__).with_name("public_names.txt")
MODULES = (
    "fastattn", "fastattn.cache", "fastattn.compat.diffusers", "fastattn.compat.flash_attn",
    "fastattn.compat.flex_attention", "fastattn.compat.llama", "fastattn.compat.multihead",
    "fastattn.compat.patch", "fastattn.compat.sdpa", "fastattn.compat.swap",
    "fastattn.compat.transformers",
    "fastattn.compat.xformers", "fastattn.functional", "fastattn.generation",
    "fastattn.models.encoder", "fastattn.models.gpt",
    "fastattn.models.layers", "fastattn.models.positions", "fastattn.models.seq2seq",
    "fastattn.mods", "fastattn.modules", "fastattn.parallel", "fastattn.reference",
    "fastattn.rotary", "fastattn.rotary_scaling", "fastattn.testing",
    "fastattn.training.checkpoint", "fastattn.training.convert", "fastattn.training.tokenizers",
    "fastattn.training.train_config", "fastattn.training.trainer",
)  # fmt: skip


def test_public_names_and_parameters_are_those_listed():
    listed = LISTED.read_text().splitlines()
    if importlib.util.find_spec("transformers") is None:
        listed = [line for line in listed if not line.startswith("fastattn.compat.transformers.")]
    actual = promised()
    assert sorted(set(listed) - set(actual)) == [], "lost"
    assert sorted(set(actual) - set(listed)) == [], "not listed"


def test_a_removed_name_says_what_took_its_place():
    names = [name for name in REMOVED if " " not in name]
    assert "generation.Engine" in names
    for name in names:
        module, _, attribute = f"fastattn.{name}".rpartition(".")
        with pytest.raises(ImportError, match=f"was removed: {re.escape(REMOVED[name])}"):
            getattr(importlib.import_module(module), attribute)


def promised() -> list[str]:
    """List the public names, without unlisted methods: some are for other files of the package."""
    known = {_name(line) for line in LISTED.read_text().splitlines()}
    return sorted(
        line
        for line in public_names()
        if line[0] == "$" or _name(line) in known or _name(line).rpartition(".")[0] in MODULES
    )


def _name(line: str) -> str:
    return re.split(r"[( :]", line)[0]


def public_names() -> Iterator[str]:
    known: dict[object, str] = {}
    for name in MODULES:
        if name != "fastattn.compat.transformers" or importlib.util.find_spec("transformers"):
            yield from _of_module(importlib.import_module(name), known)
    yield from _of_commands(build_parser())


def _of_module(module: types.ModuleType, known: dict[object, str]) -> Iterator[str]:
    """Its names; one that is `known` by another module's is said to be the same."""
    for name in _exported(module):
        full = f"{module.__name__}.{name}"
        x = _python(getattr(module, name))
        if callable(x) and known.setdefault(x, full) != full:
            yield f"{full} is {known[x]}"
        elif inspect.isclass(x):
            yield from _of_class(full, x)
        elif callable(x):
            yield full + _parameters(x)
        else:
            yield f"{full}: {type(x).__name__}"


def _exported(module: types.ModuleType) -> list[str]:
    """`__all__`, or else what is listed and what the module and its folder define publicly."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    listed = {_name(line) for line in LISTED.read_text().splitlines()}
    return [
        name
        for name, x in zip(vars(module), map(_python, vars(module).values()), strict=True)
        if not name.startswith("_")
        and (inspect.isclass(x) or inspect.isroutine(x))
        and (
            (x.__module__ + ".").startswith(module.__name__ + ".")
            or f"{module.__name__}.{name}" in listed
        )
    ]


def _python(x: Any) -> Any:
    """The Python function of one of Triton's, compiled or interpreted."""
    return x.fn if type(x).__module__.startswith("triton.runtime") else x


def _of_class(full: str, x: type) -> Iterator[str]:
    yield full + _parameters(x)
    for name in sorted(set(dir(x))):
        member = inspect.getattr_static(x, name)
        if name.startswith("_") or not _is_ours(x, name):
            continue
        if isinstance(member, property):
            yield f"{full}.{name}: property"
        elif callable(getattr(x, name)):
            yield f"{full}.{name}" + _parameters(getattr(x, name))
        else:
            yield f"{full}.{name}"


def _is_ours(x: type, name: str) -> bool:
    owner = next(base for base in x.__mro__ if name in vars(base))
    return owner.__module__.startswith("fastattn")


def _parameters(x: Callable[..., Any]) -> str:
    if inspect.isclass(x) and issubclass(x, Exception):
        return ""
    parameters = list(inspect.signature(x).parameters.values())
    ordered = [p for p in parameters if p.kind <= p.VAR_POSITIONAL]
    by_name = sorted((p for p in parameters if p.kind == p.KEYWORD_ONLY), key=lambda p: p.name)
    rest = [p for p in parameters if p.kind == p.VAR_KEYWORD]
    plain = [p.replace(annotation=p.empty, default=_default(p)) for p in ordered + by_name + rest]
    return str(inspect.Signature(plain))


class _Shown(str):
    """A default as the list shows it."""

    def __repr__(self) -> str:
        return str(self)


def _default(parameter: inspect.Parameter) -> object:
    """Defaults by their text; of functions and classes the name, for their text has an address."""
    x = parameter.default
    if x is parameter.empty:
        return x
    return _Shown(getattr(x, "__qualname__", None) or repr(x))


def _of_commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _of_commands(command)
            continue
        if "--print-completion" in action.option_strings:
            continue  # shtab's, where it is installed
        facts = {"nargs": action.nargs, "choices": action.choices, "required": action.required}
        facts |= {"const": action.const, "default": action.default}
        said = [f"{name}={x!r}" for name, x in facts.items() if x not in (None, False)]
        shown = "/".join(action.option_strings) or action.dest
        yield " ".join([f"$ {parser.prog}", shown, *said])


if __name__ == "__main__":
    LISTED.write_text("\n".join(promised()) + "\n")
