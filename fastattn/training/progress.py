"""Progress of a training run, as a bar or as lines."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from .extras import import_extra

# Seconds between two lines where there is no terminal to draw a bar on.
_LINE_INTERVAL = 10.0


class Progress(Protocol):
    """Where a trainer reports to."""

    def advance(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Says that `step` steps are done; loss is the mean since the last call, in nats."""

    def note(self, text: str) -> None:
        """Shows a line that stays."""

    def close(self) -> None:
        """Ends the display."""


class SilentProgress:
    """Shows nothing."""

    def advance(self, step: int, *, loss: float, tokens_per_second: float) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class ProgressBar:
    """A tqdm bar with loss, tokens/s and time left; plain lines where stream is no terminal.

    The time left follows from the steps after the first `advance`: those before it hold what is
    done once, such as compilation.

    Args:
        total: steps of the whole run.
        first: steps done before.
        stream: where to write.
    """

    def __init__(self, total: int, first: int = 0, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._last_line = time.monotonic()
        self._warm: tuple[int, float] | None = None  # the first `advance`: its step and time
        tqdm = import_extra("tqdm", "the progress bar")
        self._bar = tqdm.tqdm(
            total=total,
            initial=first,
            unit="step",
            file=self._stream,
            dynamic_ncols=True,
            disable=not self._stream.isatty(),
            bar_format="{percentage:3.0f}%|{bar}| {n}/{total} {elapsed}{postfix}",
        )

    def advance(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        text = f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s"
        if self._warm is None:
            self._warm = step, now
        elif step > self._warm[0]:
            left = (now - self._warm[1]) / (step - self._warm[0]) * (self._total - step)
            text += f", {_clock(left)} left"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        if now - self._last_line >= _LINE_INTERVAL or step == self._total:
            self._last_line = now
            self.note(f"step {step}/{self._total}: {text}")

    def note(self, text: str) -> None:
        self._bar.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
