"""From a case that fails to the smallest one that is found to fail too."""

import contextlib

from .cases import Case, smaller
from .judges import check


def smallest(case: Case, tries: int = 60) -> Case:
    """A case that fails, from which nothing more can be taken within so many tries.

    Any error counts, so that what is reported may be another one: of two faults the simpler.
    """
    while tries > 0:
        for candidate in smaller(case):
            tries -= 1
            if candidate != case and _fails(candidate):
                case = candidate
                break
            if tries <= 0:
                break
        else:
            break
    return case


def _fails(case: Case) -> bool:
    with contextlib.suppress(TypeError, ValueError, NotImplementedError):
        try:
            check(case)
        except (AssertionError, RuntimeError, IndexError):
            return True
    return False
