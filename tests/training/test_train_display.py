"""Display of a training run: its first line, the time left, and its pictures."""

import io
import sys

import pytest
from matplotlib.figure import Figure

from fastattn.cli.main import main
from fastattn.training import metrics
from fastattn.training.data.text import DataError
from fastattn.training.metrics import ProgressBar, append_metrics, draw_loss_curve

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


class Pipe(io.RawIOBase):
    """Pipe that keeps what arrived at the other end."""

    def __init__(self) -> None:
        self.arrived = b""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.arrived += bytes(data)
        return len(data)


def test_the_first_line_is_through_a_pipe_before_data_are_read(tmp_path, monkeypatch):
    pipe, seen = Pipe(), []
    screen = io.TextIOWrapper(io.BufferedWriter(pipe, 1 << 16), line_buffering=False)
    monkeypatch.setattr(sys, "stderr", screen)

    def read(config):
        seen.append(pipe.arrived.decode())
        raise DataError("stop here")

    monkeypatch.setattr("fastattn.training.tasks.sources.read_text", read)
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--text", str(tmp_path / "book.txt")]) == 1
    assert main(["train", "--out", str(out)]) == 1
    assert seen[0] == f"training a GPT in {out}, on {tmp_path / 'book.txt'}\n"
    assert seen[1].endswith(f"training a GPT in {out}, on data of this Python installation\n")


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(("terminal", "installed"), [(True, True), (True, False), (False, True)])
def test_progress_has_what_is_known(terminal, installed, monkeypatch):
    monkeypatch.setattr(metrics, "LINE_INTERVAL", 0.0)
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    screen = Screen(terminal)
    shown = ProgressBar(100, stream=screen)
    shown.advance(10, loss=1.25, tokens_per_second=9876.5, peak_mib=3072, mfu=0.4125)
    if shown._bar is not None:
        shown._bar.refresh()
    assert "loss 1.2500, 9,876 tokens/s, 3,072 MiB, MFU 41.2 %" in screen.getvalue()
    shown.advance(40, loss=1.0, tokens_per_second=4321.0)
    shown.note("a line of its own")
    shown.close()
    assert "a line of its own\n" in screen.getvalue() and "40/100" in screen.getvalue()
    assert ("\r" in screen.getvalue()) == (terminal and installed)


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved."""
    figures = []
    save = Figure.savefig

    def keep(self, *arguments, **options):
        figures.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_the_loss_curve_shows_its_records_and_names_the_run(tmp_path, drawn):
    run = tmp_path / "mine-$x_{$"
    run.mkdir()
    draw_loss_curve(run)
    for record in ({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}):
        append_metrics(run, record)
    append_metrics(run, {"step": 2, "validation_loss": 2.5})
    draw_loss_curve(run)
    assert sorted(path.name for path in run.iterdir()) == ["loss.png", "metrics.jsonl"]
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    axes = drawn[1].axes[0]
    assert axes.get_title() == "Loss of the run mine-$x_{$"
    assert [list(line.get_ydata()) for line in axes.lines] == [[3.0, 2.0], [2.5]]
