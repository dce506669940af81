"""Reports of a run: progress on the terminal, metrics.jsonl, and the curve loss.png."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..files.replace import remove_partial, replacing
from ..missing import find_extra, import_extra

METRICS_FILE, CURVE_FILE = "metrics.jsonl", "loss.png"
# Seconds between two lines where there is no terminal for a bar.
LINE_INTERVAL = 10.0


def append_metrics(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Append a record, which has a "step", to a run's metrics.jsonl."""
    path = run_dir / METRICS_FILE
    with _explained(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read a run's metrics.jsonl, without an incomplete last line of a killed run.

    Raises:
        OSError: another line is damaged; the message names it.
    """
    path = run_dir / METRICS_FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _record(line: bytes, source: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        if isinstance(record["step"], int):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise OSError(f"{source} is damaged, no record with a step: remove the line to continue")


def truncate_metrics(run_dir: Path, step: int) -> None:
    """Drop the records after a step, and start the file if there is none."""
    path = run_dir / METRICS_FILE
    for name in (METRICS_FILE, CURVE_FILE):
        remove_partial(run_dir / name)
    records = [record for record in read_metrics(run_dir) if record["step"] <= step]
    with _explained(path), replacing(path) as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def draw_loss_curve(run_dir: Path) -> None:
    """Draw the losses of metrics.jsonl over steps into loss.png, atomically."""
    figure_module = import_extra("matplotlib.figure", "the loss curve")
    records, path = read_metrics(run_dir), run_dir / CURVE_FILE
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
    axes.set_title(f"Loss of the run {run_dir.resolve().name}", parse_math=False)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with _explained(path), replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


class Progress:
    """Interface of a progress display; this one shows nothing."""

    def advance(self, step: int, *, loss: float, **figures: float) -> None:
        """Report that `step` steps of the run are done.

        loss: the mean since the last call, in nats. figures: of `usage.Usage`.
        """

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """End the display."""


class Bar:
    """A tqdm bar, or lines where stream is no terminal or tqdm is missing.

    options: of tqdm.
    """

    def __init__(self, stream: TextIO | None = None, **options: Any) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._last_line = time.monotonic()
        tqdm = find_extra("tqdm") if self._stream.isatty() else None
        self._bar = tqdm and tqdm.tqdm(file=self._stream, dynamic_ncols=True, **options)

    def move(self, done: int, total: int, line: str, after: str = "", last: bool = False) -> None:
        """Move the bar, with a text after it; or show a line, if it is the last or one is due."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(after, refresh=False)
            self._bar.update(done - self._bar.n)
        elif last or now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            self.note(line)

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class ProgressBar(Bar, Progress):
    """Progress by a bar or lines; `first` of the `total` steps were done before."""

    def __init__(self, total: int, first: int = 0, stream: TextIO | None = None) -> None:
        super().__init__(stream, total=total, initial=first, unit="step")
        self._total = total

    def advance(self, step: int, *, loss: float, **figures: float) -> None:
        text = f"loss {loss:.4f}, {figures['tokens_per_second']:,.0f} tokens/s"
        if "peak_mib" in figures:
            text += f", {figures['peak_mib']:,.0f} MiB"
        if "mfu" in figures:
            text += f", MFU {100 * figures['mfu']:.1f} %"
        line = f"step {step}/{self._total}: {text}"
        self.move(step, self._total, line, text, last=step == self._total)


class Speed:
    """Tokens per second over training steps, without pauses."""

    def __init__(self) -> None:
        self._started = self._lap_started = time.perf_counter()
        self._tokens = self._lap_tokens = 0

    def count(self, tokens: int) -> None:
        """Add the tokens of a step."""
        self._tokens += tokens
        self._lap_tokens += tokens

    def mean(self) -> float:
        """Compute the speed since the start."""
        return self._tokens / max(time.perf_counter() - self._started, 1e-9)

    def lap(self) -> float:
        """Compute the speed since the last lap."""
        now = time.perf_counter()
        rate = self._lap_tokens / max(now - self._lap_started, 1e-9)
        self._lap_started, self._lap_tokens = now, 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block."""
        begin = time.perf_counter()
        yield
        pause = time.perf_counter() - begin
        self._started += pause
        self._lap_started += pause


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Add to an error of the file system that the run's checkpoints are kept."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        raise OSError(f"cannot write {path}: {cause}; the run's checkpoints are kept") from None
