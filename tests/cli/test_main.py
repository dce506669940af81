"""The `fastattn` command end to end: train, generate, info, and one line for what goes wrong."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fastattn.cli.main import main
from fastattn.files.lock import LOCK
from fastattn.training.checkpoint import load_checkpoint, save_checkpoint
from fastattn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Café:\n    price = 3\n" * 20


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_train_then_generate(text, tmp_path, capsys, quick):
    """A run is started by --resume too where there is none."""
    out = tmp_path / "run"
    arguments = ["train", "--text", text, "--out", str(out), "--tokenizer", "bpe", "--resume"]
    assert main([*arguments, "--vocab-size", "280", *quick]) == 0
    written = capsys.readouterr()
    loss = load_checkpoint(out).config["results"]["validation_loss"]
    assert written.out.startswith(f"validation loss {loss:.4f} over the whole split\n")
    assert "tokens/s while training\n" in written.out
    assert f"checkpoint {out / 'step-00000008'}\nloss curve {out / 'loss.png'}\n" in written.out
    assert f"no checkpoint in {out}: starting a new run" in written.err
    assert "step 4/8: validation loss" in written.err
    names = ["loss.png", "metrics.jsonl", "step-00000008"]
    assert sorted(path.name for path in out.iterdir()) == names

    generate = ["generate", "--checkpoint", str(out), "--prompt", "def ", "--device", "cpu"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*generate, "--tokens", "30", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("def ") and texts[0].endswith("\n")
    assert texts[0] == texts[1] != texts[2]
    assert main([*generate, "--tokens", "0"]) == 0
    assert capsys.readouterr().out == "def \n"


def test_a_run_keeps_what_was_given(text, tmp_path, quick, error_line):
    out = tmp_path / "run"
    given = ["--ffn", "swiglu", "--lr", "0.01", "--dtype", "bfloat16", "--set", "tie_weights=false"]
    given += ["--set", "softcap=30", "--set", "positions=alibi"]
    assert main(["train", "--text", text, "--out", str(out), *quick, "--steps", "1", *given]) == 0
    config = load_checkpoint(out).config
    model, training = config["model"], config["training"]
    assert (model["positions"], model["activation"], model["softcap"]) == ("alibi", "swiglu", 30)
    assert model["tie_weights"] is False
    assert (training["learning_rate"], training["dtype"]) == (0.01, "bfloat16")
    line = error_line("train", "--context-parallel", 2, code=2)
    assert "--context-parallel was removed: fastattn.parallel" in line
    assert "--set softcap=VALUE" in error_line("train", "--softcap", 2, code=2)
    for words, message in (
        ("--set sinks", "--set must be FIELD=VALUE, such as tie_weights=false, got 'sinks'"),
        ("--layers 1 --set num_layers=2", "num_layers is set twice, the second time by --set"),
        ("--set depth=3", "depth is no option of model gpt"),
    ):
        assert message in error_line("train", "--text", text, "--out", tmp_path, *words.split())


def test_a_finished_run_is_left_as_it_is(run, capsys):
    before = contents(run)
    assert main(["train", "--out", str(run), "--resume"]) == 0
    written = capsys.readouterr()
    assert f"the run in {run} is finished: 8 steps" in written.err
    assert "validation loss" in written.out
    assert contents(run) == before


def test_ctrl_c_saves_and_resume_continues(
    text, finished_run, tmp_path, capsys, monkeypatch, quick
):
    from fastattn.training.trainer import Trainer

    step = Trainer._train_step

    def interrupted_step(self):
        step(self)
        if self.step == 5:
            assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", interrupted_step)
        assert main(["train", "--text", text, "--out", str(out), *quick]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    written = capsys.readouterr().err
    assert "stopping after this step" in written
    assert f"stopped at step 5: {out / 'step-00000005'} is kept" in written
    assert main(["train", "--out", str(out), "--resume"]) == 0
    losses = [[r.get("loss") for r in read_metrics(path)] for path in (out, finished_run)]
    assert losses[0] == losses[1]


def test_two_runs_in_one_folder(text, tmp_path, capsys, monkeypatch, quick):
    """The second says so at once, and changes nothing; what a crash has left stops nobody."""
    from fastattn.training.trainer import Trainer

    step, out, seen = Trainer._train_step, tmp_path / "run", []

    def second_run(self):
        if self.step == 3:
            before = contents(out)
            for options in ([], ["--resume"]):
                assert main(["train", "--text", text, "--out", str(out), *quick, *options]) == 1
                seen.append(capsys.readouterr().err)
            assert contents(out) == before
        step(self)

    out.mkdir()
    (out / LOCK).write_text("process 1 on a host without power\n")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", second_run)
        assert main(["train", "--text", text, "--out", str(out), *quick]) == 0
    for line in seen:
        assert f"\nfastattn: error: {out} is in use (held by process {os.getpid()} " in f"\n{line}"
    assert len(seen) == 2 and not (out / LOCK).exists()
    # Without locks a run goes on, and says so.
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "no locks")))
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert f"{out} has no lock ([Errno 37] no flock: no locks)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("signals", "when", "last"),
    [
        # Before the first step, and a second time in it.
        (1, "fastattn.training.tasks.sources.read_text", "nothing"),
        (2, "fastattn.training.trainer.Trainer._train_step", "step-00000000"),
    ],
)
def test_ctrl_c_that_stops_at_once(signals, when, last, text, tmp_path, capsys, monkeypatch, quick):
    def interrupted(self):
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(when, interrupted)
    out = tmp_path / "run"
    assert main(["train", "--text", text, "--out", str(out), *quick]) == 130
    kept = last if last == "nothing" else out / last
    assert capsys.readouterr().err.endswith(f"interrupted: {kept} is kept\n")


def test_info_names_versions_and_reasons(capsys):
    assert main(["info"]) == 0
    written = capsys.readouterr().out
    assert f"torch {version('torch')}" in written
    assert "fastattn " in written
    assert "cpu: 1 threads" in written
    assert "backend: torch" in written
    assert 'not triton: backend "torch" was requested' in written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--layers 1000000000",
            "a model of num_layers=1000000000, embed_dim=16 has at least 3,104,000,000,288",
        ),
        ("--batch 1000000000", "training it on batches of 16,000,000,000 tokens needs"),
        ("--dtype float16", "dtype must be 'float32' or 'bfloat16' on the CPU, got 'float16'"),
        ("--tokenizer wordd", "the kinds that can be trained are char, bpe, word, word-space,"),
        ("--text absent", "cannot read text file"),
        ("--context 2000", "the text is too short: it has 1080 tokens for training and 120 for"),
    ],
)
def test_an_unusable_option_is_named(options, message, text, tmp_path, error_line, quick):
    command = ["train", "--text", text, "--out", tmp_path / "run", *quick, *options.split()]
    assert message in error_line(*command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *("fly", "trian", "train --fast", "train --steps many", "train --alibi --steps 1"),
        *("train --out= --steps 1", "prepare --text x --out=", "train --set"),
        *("generate", "tag", "translate", "tag --checkpoint x", "inspect --checkpoint x"),
    ],
)
def test_wrong_usage_is_one_line(arguments, error_line):
    assert "--help" in error_line(*arguments.split(), code=2)


def test_a_wrong_option_gets_the_closest_one_of_its_command(error_line):
    line = error_line("train", "--postions", "rotary", "--steps", "1", code=2)
    assert line.startswith("fastattn train: error: unrecognized arguments: --postions rotary: ")
    assert "did you mean --positions? (" in line
    for words, hint in (("trian", "'train'"), ("train --model gtp", "'gpt'")):
        assert f": did you mean {hint}? (" in error_line(*words.split(), code=2)
    assert "'xyz': choose auto, float32, " in error_line("train", "--dtype", "xyz", code=2)


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert main(["--help"]) == 0
    assert capsys.readouterr() == shown and "import-nanogpt" in shown.out


@pytest.mark.parametrize("command", ["", "train"])
def test_colours_are_for_terminals_alone(command, capsys, monkeypatch):
    """And the words are the same without rich-argparse."""
    pytest.importorskip("rich_argparse")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = []
    for name, value in (("COLUMNS", "100"), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        if name == "NO_COLOR":
            monkeypatch.setitem(sys.modules, "rich_argparse", None)
        assert main([*command.split(), "--help"]) == 0
        shown.append(capsys.readouterr().out)
    pipe, terminal, plain = shown
    assert "\x1b[" not in pipe and "\x1b[" in terminal
    assert pipe.lower().split() == plain.lower().split()


def test_a_shell_completes_commands_and_options(capsys):
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    complete = "\nCOMP_WORDS=(fastattn train --resu); COMP_CWORD=2; _shtab_fastattn fastattn --resu"
    done = ["bash", "-c", script + complete + '\necho "${COMPREPLY[@]}"']
    assert subprocess.run(done, capture_output=True, text=True).stdout.strip() == "--resume"


def test_completion_names_the_package_that_it_needs(error_line, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    line = error_line("--print-completion", "bash", code=2)
    assert '--print-completion needs the package shtab: pip install ".[gpt]"' in line


def test_a_removed_option_says_what_took_its_place(error_line):
    line = error_line("prepare", "--check", "--out", "prepared", code=2)
    assert "fastattn prepare: error: --check was removed: fastattn train --data checks" in line


def test_a_run_that_ends_in_nan_fails(text, tmp_path, capsys, quick):
    wild = ["--lr", "1e39", "--warmup", "0", "--steps", "1"]
    assert main(["train", "--text", text, "--out", str(tmp_path / "run"), *quick, *wild]) == 1
    assert "loss is nan at step 1, so training has stopped" in capsys.readouterr().err


def test_a_folder_with_another_run_is_kept(run, text, tmp_path, error_line, quick):
    before = contents(run)
    line = error_line("train", "--text", text, "--out", run, *quick)
    assert f"{run} holds a run already (step-00000008): continue it with --resume" in line
    assert contents(run) == before
    shutil.rmtree(run / "step-00000008")
    line = error_line("train", "--text", text, "--out", run, *quick)
    assert f"{run} holds a run already (metrics.jsonl)" in line
    line = error_line("train", "--text", text, "--out", text, *quick)
    assert f"the output folder {text} is a file" in line
    assert Path(text).read_text() == TEXT


@pytest.fixture
def stopped(run: Path, tmp_path: Path, text: str) -> Path:
    """A short run that stopped at its start."""
    from fastattn.training.run import Options, train

    config = load_checkpoint(run).config
    del config["model"]["vocab_size"]
    options = Options(model=config["model"], training=config["training"], data={"text": (text,)})
    train(options, tmp_path / "stopped", should_stop=lambda: True)
    return tmp_path / "stopped"


def test_resume_with_another_configuration_or_text_is_refused(stopped, text, error_line):
    before = contents(stopped)
    for options, message in (
        ("--layers 2", "step-00000000 was started with num_layers=1, got 2: leave the option out"),
        ("--lr 9", "was started with learning_rate=0.003, got 9.0"),
        ("--tokenizer bpe", "was started with tokenizer=None, got 'bpe'"),
        ("--text /etc/passwd", "was started with text="),
        ("", "step-00000000 was trained on another text"),
    ):
        if not options:
            Path(text).write_text(TEXT + "more")
        line = error_line("train", "--out", stopped, "--resume", *options.split())
        assert message in line
        assert contents(stopped) == before


def test_a_run_from_before_some_options_goes_on(stopped, text, quick, error_line):
    """With what it was started with, too."""
    saved = load_checkpoint(stopped)
    for name in ("keep_first", "softcap", "sinks", "qk_norm", "attention_dropout"):
        del saved.config["model"][name]
    shutil.rmtree(stopped / "step-00000000")
    save_checkpoint(stopped, saved)
    resume = ["train", "--out", str(stopped), "--resume", "--text", text, *quick]
    assert "was started with softcap=None, got 5" in error_line(*resume, "--set", "softcap=5")
    assert main([*resume, "--set", "attention_dropout=0", "--save-every", "1"]) == 0
    config = load_checkpoint(stopped).config
    assert config["model"]["attention_dropout"] == 0
    assert config["training"]["checkpoint_interval"] == 1


def test_a_finished_run_is_trained_longer(run, error_line):
    resume = ["train", "--out", str(run), "--resume", "--steps"]
    assert "is beyond step 7: choose more --steps" in error_line(*resume, 7)
    assert main([*resume, "12"]) == 0
    assert [r["step"] for r in read_metrics(run) if "loss" in r] == [2, 4, 6, 8, 10, 12]
    assert [path.name for path in run.glob("step-*")] == ["step-00000012"]


def test_a_run_may_end_where_it_was_stopped(run, capsys):
    from fastattn.training.run import Options, train

    stop = iter((False, False, True))
    longer = Options(training={"steps": 12})
    assert train(longer, run, resume=True, should_stop=lambda: next(stop)).step == 10
    assert main(["train", "--out", str(run), "--resume", "--steps", "10"]) == 0
    assert capsys.readouterr().out.startswith("validation loss ")
