"""The documented torchrun command trains on a CPU until a rank fails; by night it goes on then."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from nightly import gate_cases

from fastattn.training.metrics import read_metrics

CHECKOUT = Path(__file__).resolve().parents[3]
SMALL = """
    --steps 6 --batch 4 --layers 1 --heads 2 --embed-dim 16 --context 16 --device cpu
    --log-every 1 --eval-every 2 --save-every 3 --save-in-background
    --timeout 20
"""
# By night the ranks are started again, twice: a first time rank 1 stops, a second time all is well.
RESTARTS = gate_cases([0], [2])[-1]
# The command, whose rank 1 fails after a checkpoint, and stops when it is started again.
DRIVER = """
import os, signal, sys
from fastattn.cli.main import main
from fastattn.training.trainer import Trainer

train_step = Trainer._train_step

def failing(self):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1" and self.step == 4:
        raise RuntimeError("planted in rank 1")
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    if again and os.environ["RANK"] == "1" and self.step == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    train_step(self)

Trainer._train_step = failing
sys.exit(main(sys.argv[1:]))
"""


def documented() -> list[str]:
    """The command of the page, a word an entry."""
    page = (CHECKOUT / "docs" / "training.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^torchrun .* -m fastattn train .*$", page, re.MULTILINE)
    return shlex.split(command)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "driver.py").write_text(DRIVER)
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog.\n" * 12)
    words = documented()
    at = words.index("-m")
    assert words[at : at + 2] == ["-m", "fastattn"]
    words[at : at + 2] = [str(folder / "driver.py")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--shutdown-timeout", "1", "--max-restarts", str(RESTARTS)]
    environment = {**os.environ, "FASTATTN_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    command = [*launch, *words[1:], "--text", str(folder / "text"), *SMALL.split()]
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return run, folder / "runs" / "two"


@pytest.mark.nightly
def test_a_run_goes_on_after_a_failure(ended):
    run, out = ended
    assert run.returncode == 0, run.stderr
    assert "from step 3" in run.stderr
    assert [path.name for path in out.glob("step-*")] == ["step-00000006"]


def test_the_first_cause_is_shown_once(ended):
    run, _ = ended
    assert (run.returncode == 0) == (RESTARTS > 0)
    cause = r"^\[rank\d\]: RuntimeError: planted in rank 1$"  # and once in torchrun's report
    assert len(re.findall(cause, run.stderr, re.MULTILINE)) == 1
    assert "Connection closed by peer" not in run.stderr


@pytest.mark.nightly
def test_a_rank_that_has_stopped_is_named(ended):
    run, _ = ended
    (line,) = re.findall("^.*did not answer in time.*$", run.stderr, re.MULTILINE)
    assert "rank 1 did not answer in time: stopped, ended or very slow; --timeout says" in line


def test_one_rank_speaks(ended):
    run, out = ended
    assert "of 2 ranks: cp 2" in run.stderr
    assert len(re.findall("^training a GPT in", run.stderr, re.MULTILINE)) == 1 + RESTARTS
    assert run.stdout.count("validation loss") == (RESTARTS > 0)
    steps = [record["step"] for record in read_metrics(out) if "loss" in record]
    assert steps == ([1, 2, 3, 4] if RESTARTS == 0 else [1, 2, 3, 4, 5, 6])
