"""Verification cases by backend, family, dtype and head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from . import attention, caches, others
from .case import Case, Subject

# Cases of each family; families of options are named as `options.Tags.registers`.
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "forward": attention.forward,
    "backward": attention.backward,
    "one-pass": attention.one_pass,
    "packed": attention.packed,
    "masked": partial(attention.options, "masked"),
    "bias": partial(attention.options, "bias"),
    "scores": partial(attention.options, "scores"),
    "heavy": partial(attention.options, "heavy"),
    "relative": partial(attention.options, "relative"),
    "decode": caches.decode,
    "append": caches.append,
    "merge": caches.merge,
    "statistics": others.statistics,
    "additive": others.additive,
    "selected": others.selected,
    "fp8": others.fp8,
}
BACKENDS = ("triton", "hopper")
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256, 512)
_OF_HOPPER = ("forward", "backward", "one-pass", "packed", "masked", "fp8")
# Subsets: every family in one dtype and head dim, and a few families in others.
_ELSEWHERE = ("forward", "backward", "decode")
_QUICK = (("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 256), ("float16", 128), ("float32", 64))
# The interpreter's time is proportional to the size.
_INTERPRETED = (("bfloat16", 64), ("float16", 64), ("float32", 64), ("bfloat16", 128))


class Scope(NamedTuple):
    """Filters of cases; None: all.

    quick: the most important ones. interpreted: those of portable kernels that are fast in the
    interpreter.
    """

    backends: tuple[str, ...] | None = None
    families: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    quick: bool = False
    interpreted: bool = False

    def subjects(self) -> list[Subject]:
        """Subjects that have cases, the most important first."""
        every = (
            Subject(backend, family, dtype, head_dim)
            for family in FAMILIES
            for dtype in DTYPES
            for head_dim in HEAD_DIMS
            for backend in BACKENDS
        )
        filters = (self.backends, self.families, self.dtypes, self.head_dims)
        return [
            subject
            for subject in every
            if all(some is None or x in some for some, x in zip(filters, subject, strict=True))
            and self._has(subject)
        ]

    def cases(self, subject: Subject) -> list[Case]:
        """The cases of a subject."""
        cases = FAMILIES[subject.family]()
        if self.interpreted:
            return [case for case in cases if case.interpreted]
        return [case for case in cases if case.quick or not self.quick]

    def _has(self, subject: Subject) -> bool:
        backend, family, dtype, head_dim = subject
        if backend == "hopper" and (family not in _OF_HOPPER or dtype == "float32"):
            return False
        # Only portable kernels of 16-bit dtypes, and few calls, have this width.
        wide = head_dim == 512
        if wide and (backend == "hopper" or dtype == "float32" or family not in _ELSEWHERE):
            return False
        if self.interpreted and backend == "hopper":
            return False
        if not (self.interpreted or self.quick):
            return True
        whole, *others = _INTERPRETED if self.interpreted else _QUICK
        here = (dtype, head_dim)
        return here == whole or (here in others and family in _ELSEWHERE)
