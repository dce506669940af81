"""Scores that the torch backend holds at once."""

from typing import Any

import pytest

from fastattn.functional import call_memo
from fastattn.torch_backend import formula, masks, torch_attention


def in_chunks(patch: pytest.MonkeyPatch, at_once: int) -> list[int]:
    """Have calls of more scores than `at_once`, and those in narrow windows, run in chunks.

    Returns the sizes of what is made of scores and masks.
    """
    made: list[int] = []

    def noting(function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            parts = result if isinstance(result, tuple) else (result,)
            made.extend(x.untyped_storage().size() // x.itemsize for x in parts if x is not None)
            return result

        return noted

    for name in ("_MOST", "_AT_ONCE"):
        patch.setattr(torch_attention, name, at_once)
    patch.setattr(torch_attention, "_QUERIES", 2)
    patch.setattr(call_memo, "key_of", lambda *_: None)  # no later call is run so
    patch.setattr(formula, "scores", noting(formula.scores))
    for name in ("quickly", "exactly"):
        patch.setattr(masks.AddedScores, name, noting(getattr(masks.AddedScores, name)))
    return made
