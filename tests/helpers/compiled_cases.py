"""Rows of tests/kernels/compiled.txt: launches to compile, and limits of what becomes of them."""

import gc
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import meta_launches
from triton.runtime import JITFunction

from fastattn.kernels.launch import launches as launch_memo
from fastattn.testing.compiling.cross_compile import RELEASE, count_compilations

LIMITS = {"spill", "full", "masked", "pair", "moved", "moved_masked", "selects", "once", "mma"}
LIMITS |= {"width"}


class Case(NamedTuple):
    """A GPU, a function of `meta_launches` with its arguments, and limits by their names."""

    target: str
    launch: str
    arguments: tuple[Any, ...]
    limits: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join(map(str, (self.target, self.launch, *self.arguments))).replace("None", "-")

    def limit(self, name: str, kernel: int, default: Any = None) -> Any:
        """The limit of one of the launch's kernels; of those past the last one it is the last."""
        actual = self.limits.get(f"{name}@{RELEASE}", self.limits.get(name, default))
        return actual[min(kernel, len(actual) - 1)] if isinstance(actual, list) else actual


def run(launch: str, arguments: tuple[Any, ...], **sizes: int) -> None:
    """Launch, in a process that compiles."""
    meta_launches.LAUNCHES[launch](*arguments, **sizes)


def compilations(launches: list[str], sizes: list[dict[str, int]]) -> list[int]:
    """How many kernels the launches compile, or load from disk: first, then with other sizes."""
    for kernel in gc.get_objects():
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()
    launch_memo.forget()

    def every(options: dict[str, int]) -> None:
        for name, *arguments in map(words, launches):
            run(name, arguments, **options)

    return [count_compilations(partial(every, options)) for options in sizes]


def read(path: Path) -> tuple[list[Case], list[Case]]:
    """The cases of the day, and those of the night."""
    by_day, by_night = path.read_text(encoding="utf-8").split("[day]")[1].split("[night]")
    return list(_rows(by_day)), list(_rows(by_night))


def words(text: str) -> list[Any]:
    """Words of a row: numbers, "-" for None, and names."""
    return [None if x == "-" else int(x) if x.isdigit() else x for x in text.split()]


def _rows(text: str) -> Iterator[Case]:
    for line in filter(None, text.splitlines()):
        if line.startswith("#"):
            continue
        given, _, after = line.partition(":")
        limits = dict(_limit(*x.partition("=")[::2]) for x in after.split())
        for choice in itertools.product(*(x.split(",") for x in given.split())):
            target, launch, *arguments = words(" ".join(choice))
            yield Case(target, launch, tuple(arguments), limits)


def _limit(name: str, text: str) -> tuple[str, Any]:
    if name.split("@")[0] not in LIMITS:
        raise ValueError(f"no limit has the name {name}")
    if not text:
        return name, True
    if not text[0].isdigit():
        return name, text
    return name, [float(x) for x in text.split(",")]
