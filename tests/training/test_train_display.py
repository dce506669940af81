"""Display of a training run: its first line, the time left, and its pictures."""

import io
import sys
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from fastattn.cli.main import main
from fastattn.training import metrics
from fastattn.training.data.text import DataError
from fastattn.training.metrics import ProgressBar, draw_loss_curve

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

    def read(self):
        seen.append(pipe.arrived.decode())
        raise DataError("stop here")

    monkeypatch.setattr("fastattn.training.tasks.sources.DataConfig.read", read)
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
def test_progress_has_what_is_known_and_a_time_left_without_the_start(
    terminal, installed, monkeypatch
):
    """The first ten steps take 1000 s, as they compile; each further one a second."""
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(metrics, "_LINE_INTERVAL", 0.0)
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    screen = Screen(terminal)
    shown = ProgressBar(100, stream=screen)
    now[0] = 1000.0
    many = {"tokens_per_second": 9876.5, "tokens_per_second_per_rank": 2469.1}
    shown.advance(10, loss=1.25, **many, peak_mib=3072, mfu=0.4125)
    refresh = (lambda: None) if shown._bar is None else shown._bar.refresh
    refresh()
    text = "loss 1.2500, 9,876 tokens/s (2,469 a rank), 3,072 MiB, MFU 41.2 %"
    assert text in screen.getvalue() and " left" not in screen.getvalue()
    for step, left in ((20, "1:20"), (40, "1:00")):
        now[0] = 1000.0 + step - 10
        shown.advance(step, loss=1.0, tokens_per_second=4321.0)
        refresh()
        assert f"loss 1.0000, 4,321 tokens/s, {left} left" in screen.getvalue()
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
    path = tmp_path / "mine-$x_{$" / "loss.png"
    path.parent.mkdir()
    draw_loss_curve([], path)
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    draw_loss_curve([*records, {"step": 2, "validation_loss": 2.5}], path)
    assert [list(path.parent.iterdir()), path.read_bytes()[:4]] == [[path], b"\x89PNG"]
    axes = drawn[1].axes[0]
    assert axes.get_title() == "Loss of the run mine-$x_{$"
    assert [list(line.get_ydata()) for line in axes.lines] == [[3.0, 2.0], [2.5]]
