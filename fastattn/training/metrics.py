"""Reports of a training run: progress on the terminal, metrics.jsonl, and the curve loss.png."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..files.replace import remove_partial, replacing
from .extras import find_extra, import_extra

METRICS_FILE, CURVE_FILE = "metrics.jsonl", "loss.png"
# Seconds between two lines where there is no terminal to draw a bar on.
_LINE_INTERVAL = 10.0


def append_metrics(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Append a record, which has a "step", to a run's metrics.jsonl."""
    path = run_dir / METRICS_FILE
    with _explained(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl, without an incomplete last line that a kill has left.

    Raises:
        OSError: another line is damaged; the message names it.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    # After the last line break: nothing, or an incomplete line.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _record(line: bytes, source: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        if isinstance(record["step"], int):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise OSError(f"{source} is damaged, no record with a step: remove the line to go on")


def truncate_metrics(run_dir: Path, step: int) -> None:
    """Drops the records after a step, and starts the file if there is none."""
    path = run_dir / METRICS_FILE
    with _explained(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)  # a first checkpoint may still be written
        for name in (METRICS_FILE, CURVE_FILE):
            remove_partial(run_dir / name)
    records = [record for record in read_metrics(run_dir) if record["step"] <= step]
    text = "".join(json.dumps(record) + "\n" for record in records)
    with _explained(path), replacing(path) as file:
        file.write(text)


def draw_loss_curve(records: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draws training and validation loss of metrics.jsonl over steps into a PNG file.

    It is replaced in one step. The name of its folder, the run's, is in the title.
    """
    figure_module = import_extra("matplotlib.figure", "the loss curve")
    records = list(records)
    figure = figure_module.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training", {"linewidth": 0.8, "alpha": 0.7}),
        ("validation_loss", "validation", {"marker": "o", "markersize": 3}),
    ):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)")
    # A dollar sign in a name is no formula.
    axes.set_title(f"Loss of the run {Path(path).resolve().parent.name}", parse_math=False)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with _explained(Path(path)), replacing(Path(path), "wb") as file:
        figure.savefig(file, format="png", dpi=120)


class Progress:
    """Interface of a progress display; this one shows nothing."""

    def advance(self, step: int, *, loss: float, **figures: float) -> None:
        """Report that `step` steps of the run are done.

        loss: the mean since the last call, in nats. figures: of `usage.Usage`.
        """

    def note(self, text: str) -> None:
        """Shows a line that stays."""

    def close(self) -> None:
        """Ends the display."""


class ProgressBar(Progress):
    """A tqdm bar with loss, speed, memory and time left; plain lines where stream is no terminal
    or tqdm is not installed.

    The time left is estimated from the steps after the first `advance`, as the earlier ones include
    one-time work such as compilation. `first` of the `total` steps were done before.
    """

    def __init__(self, total: int, first: int = 0, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._last_line = time.monotonic()
        self._warm: tuple[int, float] | None = None  # the first `advance`: its step and time
        self._bar: Any = None
        if self._stream.isatty() and (tqdm := find_extra("tqdm")) is not None:
            self._bar = tqdm.tqdm(
                total=total,
                initial=first,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n}/{total} {elapsed}{postfix}",
            )

    def advance(self, step: int, *, loss: float, **figures: float) -> None:
        now = time.monotonic()
        text = f"loss {loss:.4f}{_told(figures)}"
        if self._warm is None:
            self._warm = step, now
        elif step > self._warm[0]:
            left = (now - self._warm[1]) / (step - self._warm[0]) * (self._total - step)
            text += f", {_clock(left)} left"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        if now - self._last_line >= _LINE_INTERVAL or step == self._total:
            self._last_line = now
            self.note(f"step {step}/{self._total}: {text}")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Speed:
    """Tokens a second over training steps, without pauses."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()
        self._tokens = self._lap_tokens = 0
        self._lap_seconds = 0.0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def mean(self) -> float:
        """Over everything since the start."""
        return self._tokens / max(self._seconds(), 1e-9)

    def lap(self) -> float:
        """Since the last lap."""
        seconds = self._seconds()
        tokens, lap_seconds = self._tokens - self._lap_tokens, seconds - self._lap_seconds
        self._lap_tokens, self._lap_seconds = self._tokens, seconds
        return tokens / max(lap_seconds, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        stopped = time.perf_counter()
        yield
        self._started += time.perf_counter() - stopped

    def _seconds(self) -> float:
        return time.perf_counter() - self._started


_FIGURES: Mapping[str, Callable[[float], str]] = {
    "tokens_per_second": ", {:,.0f} tokens/s".format,
    "tokens_per_second_per_rank": " ({:,.0f} a rank)".format,
    "peak_mib": ", {:,.0f} MiB".format,
    "mfu": lambda share: f", MFU {100 * share:.1f} %",
}


def _told(figures: Mapping[str, float]) -> str:
    return "".join(show(figures[name]) for name, show in _FIGURES.items() if name in figures)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Add to an error of the file system that the run's checkpoints are kept."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        raise OSError(f"cannot write {path}: {cause}; the run's checkpoints are kept") from None
