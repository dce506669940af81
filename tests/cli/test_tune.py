"""`fastattn tune`: what it prints, and files that go out and come in."""

import io

import pytest
import torch

from fastattn.bench.tune import tune
from fastattn.bench.tune.tune import Progress, Record
from fastattn.cli.main import main
from fastattn.testing.verify.report import Steps
from fastattn.tuned import environment
from fastattn.tuned.store import Store

H100 = environment.Environment("NVIDIA H100", 132, "580.1", "2.11.0", "3.6.0", "0123456789abcdef")
STEP = "tiles: forward plain 2 bytes D 128"
ROW = {"kernel": "forward", "calls": "plain", "element_size": 2, "BLOCK_D": 128, "gain": 0.12}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which a run finds one tile; its arguments are kept."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "environment", lambda device: H100)
    asked = []

    def run(*, show, **arguments):
        asked.append(arguments)
        store = Store(H100)
        store.put("tiles", ROW)
        show(Progress(1, 2, 12.3, STEP, "1 of 25; best so far", False))
        show(Progress(1, 2, 9.0, STEP, "B in place of A: 12.0 % less time", True))
        # What a kill behind a step would leave.
        exported = list(tmp_path.glob("tuned.json"))
        assert all('"forward"' in file.read_text() for file in exported)
        if arguments["seconds"] < 0:
            raise KeyboardInterrupt
        last = Record("another", "broken off" if arguments["heads"] else "not reached")
        return tune.Tuning([Record(STEP, "done"), last], [("tiles", ROW)], [], store.folder)

    monkeypatch.setattr(tune, "tune", run)
    return asked


def test_a_run_prints_its_steps_and_what_it_came_to(gpu, capsys):
    assert main(["tune", "--seconds", "150", "--dims", "64", "128"]) == 0
    (asked,) = gpu
    assert (asked["seconds"], asked["head_dims"]) == (150, [64, 128])
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "tuning on NVIDIA H100, 150 s",
        f"  1/2    9 s left  {STEP}: B in place of A: 12.0 % less time",
    ]
    assert out.splitlines() == [
        f"choices measured: 1, faster than shipped: 1; kept in {Store(H100).folder}",
        "steps not reached: 1 of 2; the same command continues there",
    ]
    assert main(["tune", "--heads", "8"]) == 1


def test_findings_go_out_and_come_in(gpu, capsys, tmp_path, monkeypatch):
    file = tmp_path / "tuned.json"
    assert main(["tune", "--export", str(file)]) == 0
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "another"))
    capsys.readouterr()
    assert main(["tune", "--import", str(file)]) == 0
    assert capsys.readouterr().out == f"stored 1 results of {file}\n"
    (row,) = Store(H100).read("tiles")
    assert row.items() >= ROW.items()
    assert len(gpu) == 1
    file.write_text("{")
    assert main(["tune", "--import", str(file)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert Store(H100).read("tiles") == [row]


def test_what_is_told_before_the_run(gpu, capsys, tmp_path, monkeypatch):
    assert main(["tune", "--export", str(tmp_path / "nowhere" / "tuned.json")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--seconds", "1"]) == 1
    assert capsys.readouterr().err.startswith("fastattn: error: no GPU: torch sees no CUDA device")
    assert not gpu


def test_what_was_found_is_exported_where_a_run_is_interrupted(gpu, capsys, tmp_path):
    file = tmp_path / "tuned.json"
    assert main(["tune", "--seconds", "-1", "--export", str(file)]) == 130
    assert capsys.readouterr().err.endswith("fastattn: interrupted\n")
    assert '"forward"' in file.read_text()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_far_a_step_is():
    stream = Terminal()
    with Steps(stream) as status:
        status.show(1, 3, "step: 1 of 9; best so far A", done=False)
        under_way = stream.getvalue()
        status.show(1, 3, "step: done", prefix="   9 s left  ")
        status.show(2, 3, "all right", kept=False)
    assert "0/3" in under_way
    assert under_way.endswith("step: 1 of 9; best so far A]")
    assert "\r  1/3    9 s left  step: done\n" in stream.getvalue()
    assert "2/3 [" in stream.getvalue() and "all right\n" not in stream.getvalue()
    plain = io.StringIO()
    with Steps(plain) as status:
        status.show(1, 2, "step: 1 of 9", done=False)
        status.show(1, 2, "done", kept=False)
    assert plain.getvalue() == "  1/2 done\n"
