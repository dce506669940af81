"""Names that were removed, and what a user does in their place."""

from __future__ import annotations

from typing import NoReturn

_ENGINE = (
    "serve requests by examples/engine.py, over PagedKVCache, append_paged and attention_paged, or "
    "by vLLM or SGLang (docs/doors)"
)
_SPECULATIVE = "see examples/speculative.py, over attention_paged(tree_mask=)"

# By the name after "fastattn.", or the option of the command.
REMOVED: dict[str, str] = {
    "generate --draft": _SPECULATIVE,
    "generate --draft-tokens": _SPECULATIVE,
    "generation.Engine": _ENGINE,
    "generation.speculative_text": _SPECULATIVE,
    "generation.speculative_tokens": _SPECULATIVE,
}


def raise_missing(module: str, name: str) -> NoReturn:
    """Raise the error of a module's missing name, the end of its `__getattr__`.

    Raises:
        ImportError: the name was removed. `from module import name` hides an AttributeError's text.
        AttributeError: there was never such a name.
    """
    full = f"{module}.{name}"
    if instead := REMOVED.get(full.removeprefix("fastattn.")):
        raise ImportError(f"{full} was removed: {instead}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
