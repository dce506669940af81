"""Printed report of a verification: progress, a table of families, and conclusions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch

from .cases import BACKENDS, DTYPES, FAMILIES, HEAD_DIMS
from .verdicts import RIGHT, Finding, worst_of
from .verification import families

_HEAD = ("backend", "family", "dtypes", "head dims", "cases", "error / budget", "verdict")


class Steps:
    """Progress display: a line per finished step, and a tqdm bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(
        self,
        number: int,
        of: int,
        text: str,
        *,
        prefix: str = "",
        done: bool = True,
        kept: bool = True,
    ) -> None:
        """Show a step's text; kept: also as a line above the bar."""
        if self._bar is None and self._stream.isatty():
            with contextlib.suppress(ModuleNotFoundError):
                tqdm = importlib.import_module("tqdm")
                self._bar = tqdm.tqdm(total=of, file=self._stream, dynamic_ncols=True)
        if self._bar is not None:
            self._bar.set_postfix_str(text[:80], refresh=not done)
        if done and (kept or self._bar is None):
            if self._bar is not None:
                self._bar.clear()
            self._stream.write(f"{number:3}/{of} {prefix}{text}\n")
            self._stream.flush()
        if done and self._bar is not None:
            self._bar.update()

    def advance(self, count: int, total: int, finding: Finding | None) -> None:
        """See `verification.Progress`."""
        text = "no kernel serves it, or memory is short" if finding is None else str(finding)
        self.show(count, total, text, kept=finding is not None and finding.verdict != RIGHT)


def name_of(device: torch.device) -> str:
    """Name the GPU, or the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU, interpreted: no kernel is compiled"


def table(results: Sequence[Finding]) -> list[str]:
    """Format a line per backend and family, with its worst case; then one per failure."""
    rows = [_HEAD, *_rows(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, *(str(x) for x in results if x.verdict != RIGHT)]


def _rows(results: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    listed = [(x, y) for x in BACKENDS for y in FAMILIES[x]]
    for backend, family in sorted({(x.backend, x.family) for x in results}, key=listed.index):
        of_family = [x for x in results if (x.backend, x.family) == (backend, family)]
        worst = worst_of(of_family)
        yield (
            backend,
            family,
            " ".join(x for x in DTYPES if any(x == y.dtype for y in of_family)),
            " ".join(str(x) for x in HEAD_DIMS if any(x == y.head_dim for y in of_family)),
            str(sum(x.cases for x in of_family)),
            "none" if worst.share is None else f"{worst.share:.2f}",
            worst.verdict,
        )


def conclusions(results: Sequence[Finding], device: torch.device) -> list[str]:
    """Summarise: numbers of correct cases, skipped kernels, and missing checks."""
    cases, wrong = sum(x.cases for x in results), [x for x in results if x.verdict != RIGHT]
    if not results:
        return ["no case matches the options"]
    kinds = f"{len(results)} kind{'s' * (len(results) > 1)} of kernels"
    verdict = f"{len(wrong)} not right" if wrong else "all are within their budgets"
    lines = [f"{cases} cases of {kinds}: {verdict}"]
    if wrong and device.type == "cuda":
        lines.append("Calls of wrong kernels use another backend, until `fastattn verify --clear`.")
    if device.type == "cpu":
        lines.append(
            "Not checked without a GPU: compiled kernels, the Hopper kernels, repeated bits, "
            "more tiles than multiprocessors."
        )
    if left := _left_out(results):
        lines.append(f"Not among these cases: {left}.")
    return lines


def _left_out(results: Sequence[Finding]) -> str:
    """Name families, dtypes and head dims without results."""
    seen = {x for one in results for x in one[1:4]}
    backends = [x for x in BACKENDS if any(x == one.backend for one in results)]
    columns: tuple[tuple[str, Sequence[Any]], ...] = (
        ("family", families(backends)),
        ("dtype", DTYPES),
        ("head dim", HEAD_DIMS),
    )
    parts = (
        f"{name} {' '.join(str(x) for x in every if x not in seen)}"
        for name, every in columns
        if not seen.issuperset(every)
    )
    return ", ".join(parts)
