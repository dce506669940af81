"""Imports of optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, purpose: str) -> Any:
    """Returns a module of the `gpt` extra, by its dotted name.

    purpose: what needs it, as the subject of the message: "a checkpoint".

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed: "
            'pip install "fastattn[gpt]"',
            name=error.name,
        ) from error


def find_extra(module: str) -> Any:
    """Return an optional module, or None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
