"""From a case that fails to the smallest one that is found to fail too."""

import contextlib
from typing import TypeVar

from .cases import Case, smaller
from .judges import check
from .layer_judges import check_layer
from .layers import LayerCase, smaller_layer

_Case = TypeVar("_Case", Case, LayerCase)


def check_any(case: Case | LayerCase) -> None:
    """Check a call of a function, or a layer."""
    check_layer(case) if isinstance(case, LayerCase) else check(case)


def smallest(case: _Case, tries: int = 60) -> _Case:
    """A case that fails, from which nothing more can be taken within so many tries.

    Any error counts, so that what is reported may be another one: of two faults the simpler.
    """
    while tries > 0:
        layer = isinstance(case, LayerCase)
        for candidate in smaller_layer(case) if layer else smaller(case):
            tries -= 1
            if candidate != case and _fails(candidate):
                case = candidate
                break
            if tries <= 0:
                break
        else:
            break
    return case


def _fails(case: Case | LayerCase) -> bool:
    with contextlib.suppress(TypeError, ValueError, NotImplementedError):
        try:
            check_any(case)
        except (AssertionError, RuntimeError, IndexError):
            return True
    return False
