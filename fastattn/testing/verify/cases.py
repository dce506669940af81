"""Verification cases by backend, family, dtype and head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ...tuned.families import HEAD_DIMS as HEAD_DIMS
from . import attention, caches, hopper, others
from .case import Case, Subject

# Cases of each family by backend, of Hopper the most used first; families of options are named as
# `options.Tags.registers`, of Hopper's kernels as `tuned.families.of_call` does.
FAMILIES: dict[str, dict[str, Callable[[], Iterator[Case]]]] = {
    "triton": {
        "forward": attention.forward,
        "backward": attention.backward,
        "one-pass": attention.one_pass,
        "packed": attention.packed_in_any_pass,
        "masked": partial(attention.with_options, "masked"),
        "bias": partial(attention.with_options, "bias"),
        "scores": partial(attention.with_options, "scores"),
        "heavy": partial(attention.with_options, "heavy"),
        "relative": partial(attention.with_options, "relative"),
        "decode": caches.decode,
        "append": caches.append,
        "merge": caches.merge,
        "statistics": others.statistics,
        "selected": others.selected,
        "fp8": others.fp8,
    },
    "hopper": hopper.FAMILIES,
}
BACKENDS = tuple(FAMILIES)
DTYPES = ("bfloat16", "float16", "float32")
# Subsets: every family in one dtype and head dim, and a few families in others.
_ELSEWHERE = ("forward", "backward", "decode")
_QUICK = (("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 256), ("float16", 128), ("float32", 64))
# Hopper's kernels in one pass with options, which few calls ask for.
_SELDOM = "one-pass+"
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
            for backend, family in self._by_importance()
            for dtype in DTYPES
            for head_dim in HEAD_DIMS
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
        cases = FAMILIES[subject.backend][subject.family]()
        if self.interpreted:
            return [case for case in cases if case.interpreted]
        return [case for case in cases if case.quick or not self.quick]

    def _by_importance(self) -> Iterator[tuple[str, str]]:
        """Backends and families: all of Hopper's, then decoding and appending, which it leaves."""
        portable = list(FAMILIES["triton"])
        if self.backends is None or "hopper" in self.backends:
            yield from (("hopper", family) for family in FAMILIES["hopper"])
            portable.sort(key=lambda family: family not in ("decode", "append"))
        yield from (("triton", family) for family in portable)

    def _has(self, subject: Subject) -> bool:
        backend, family, dtype, head_dim = subject
        # Only portable kernels of 16-bit dtypes, and few calls, have this width.
        wide = head_dim == 512
        if backend == "hopper":
            seldom = self.quick and (dtype == "float16" or family.startswith(_SELDOM))
            return not (self.interpreted or wide or dtype == "float32" or seldom)
        if wide and (dtype == "float32" or family not in _ELSEWHERE):
            return False
        if not (self.interpreted or self.quick):
            return True
        whole, *others = _INTERPRETED if self.interpreted else _QUICK
        here = (dtype, head_dim)
        return here == whole or (here in others and family in _ELSEWHERE)
