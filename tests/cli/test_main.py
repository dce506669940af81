"""The `fastattn` command end to end: train, generate, info, and one line for what goes wrong."""

import fcntl
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fastattn.cli.main import main
from fastattn.files.lock import LOCK
from fastattn.training.checkpoint import load_checkpoint
from fastattn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Café:\n    price = 3\n" * 20


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_train_then_generate(tokenizer, text, tmp_path, capsys, quick):
    out = tmp_path / "run"
    arguments = ["train", "--text", text, "--out", str(out), "--tokenizer", tokenizer]
    assert main([*arguments, "--vocab-size", "280", *quick]) == 0
    written = capsys.readouterr()
    loss = load_checkpoint(out).state["validation_loss"]
    assert f"validation loss {loss:.4f} over the whole split\n" in written.out
    assert "tokens/s while training\n" in written.out
    assert f"checkpoint {out / 'step-00000008'}\n" in written.out
    assert f"loss curve {out / 'loss.png'}\n" in written.out
    assert "step 4/8: validation loss" in written.err
    assert sorted(path.name for path in out.iterdir()) == [
        "loss.png",
        "metrics.jsonl",
        "step-00000008",
    ]

    generate = ["generate", "--checkpoint", str(out), "--prompt", "def ", "--device", "cpu"]
    assert main([*generate, "--tokens", "30", "--seed", "1"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert first.endswith("\n")
    if tokenizer == "char":
        assert len(first) == len("def ") + 30 + 1
    assert main([*generate, "--tokens", "30", "--seed", "1"]) == 0
    assert capsys.readouterr().out == first
    assert main([*generate, "--tokens", "5", "--greedy", "--top-k", "3", "--top-p", "0.9"]) == 0
    assert main(["generate", "--checkpoint", str(out), "--tokens", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("\n\n")


def test_a_draft_model_with_another_tokenizer_is_named(
    finished_run, text, tmp_path, error_line, quick
):
    Path(text).write_text(TEXT + "§")
    other = tmp_path / "other"
    assert main(["train", "--text", text, "--out", str(other), *quick]) == 0
    command = ["generate", "--checkpoint", finished_run, "--draft", other, "--device", "cpu"]
    assert f"--draft {other} has another tokenizer than" in error_line(*command)


def test_options_reach_the_run(text, tmp_path, quick):
    out = tmp_path / "run"
    options = {
        "kv-heads": ("model", "num_kv_heads", 1),
        "positions": ("model", "positions", "rotary"),
        "window": ("model", "window", 5),
        "keep-first": ("model", "keep_first", 2),
        "softcap": ("model", "softcap", 20.0),
        "attention-dropout": ("model", "attention_dropout", 0.2),
        "dropout": ("model", "dropout", 0.1),
        "accumulate": ("training", "accumulation", 2),
        "lr": ("training", "learning_rate", 0.01),
        "min-lr": ("training", "min_learning_rate", 0.001),
        "warmup": ("training", "warmup_steps", 1),
        "weight-decay": ("training", "weight_decay", 0.2),
        "grad-clip": ("training", "grad_clip", 0.5),
        "seed": ("training", "seed", 7),
        "dtype": ("training", "dtype", "bfloat16"),
    }
    arguments = [word for name, (*_, value) in options.items() for word in (f"--{name}", value)]
    flags = ["--bias", "--sinks", "--qk-norm"]
    command = ["train", "--text", text, "--out", out, *flags, *quick, "--steps", 2, *arguments]
    assert main([str(word) for word in command]) == 0
    config = load_checkpoint(out).config
    for part, field, value in options.values():
        assert config[part][field] == value, field
    assert config["model"]["bias"] and config["model"]["sinks"] and config["model"]["qk_norm"]
    assert config["model"]["num_heads"] == 2
    assert config["training"]["steps"] == 2


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
    resumed, whole = load_checkpoint(out), load_checkpoint(finished_run)
    for part in ("model", "training"):
        tensors = getattr(resumed, part)
        assert all(torch.equal(x, getattr(whole, part)[name]) for name, x in tensors.items())
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


def test_a_second_ctrl_c_stops_at_once(text, tmp_path, capsys, monkeypatch, quick):
    from fastattn.training.trainer import Trainer

    def interrupted_step(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_train_step", interrupted_step)
    assert main(["train", "--text", text, "--out", str(tmp_path / "run"), *quick]) == 130
    kept = tmp_path / "run" / "step-00000000"
    assert capsys.readouterr().err.endswith(f"interrupted: {kept} is kept\n")
    assert load_checkpoint(kept).step == 0


def test_ctrl_c_before_the_first_step_keeps_nothing(text, tmp_path, capsys, monkeypatch, quick):
    def read(self):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("fastattn.training.run.DataConfig.read", read)
    assert main(["train", "--text", text, "--out", str(tmp_path / "run"), *quick]) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted: nothing is kept\n")


def test_resume_without_a_run_starts_one(text, tmp_path, capsys, quick):
    out = tmp_path / "run"
    assert main(["train", "--text", text, "--out", str(out), "--resume", *quick]) == 0
    assert f"no checkpoint in {out}: starting a new run" in capsys.readouterr().err
    assert load_checkpoint(out).step == 8


def test_info_names_versions_and_reasons(capsys):
    assert main(["info"]) == 0
    written = capsys.readouterr().out
    assert f"torch {torch.__version__}" in written
    assert "fastattn " in written
    assert "cpu: 1 threads" in written
    assert "backend: torch" in written
    assert 'not triton: backend "torch" was asked for' in written


def test_info_survives_a_backend_that_cannot_serve(capsys, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "none")
    assert main(["info"]) == 0
    assert "FASTATTN_BACKEND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read text file {path}: No such file or directory"),
        (b"", "text file {path} is empty"),
        (b"abc\xff", "text file {path} is not UTF-8: byte 0xff at offset 3"),
        (b"ab" * 8, "the text is too short: it has 14 tokens for training and 2 for validation"),
    ],
)
def test_an_unusable_text_is_named(content, message, tmp_path, error_line, quick):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    line = error_line("train", "--text", path, "--out", tmp_path / "run", *quick)
    assert line.startswith("fastattn: error: " + message.format(path=path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers 0", "num_layers must be a positive integer, got 0"),
        ("--heads 3", "embed_dim must be a multiple of num_heads=3, got 16"),
        ("--steps 0", "steps must be at least 1, got 0"),
        ("--device tpu", "device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got 'tpu'"),
        ("--softcap 0", "softcap must be positive and finite, got 0.0"),
        ("--keep-first 2", "keep_first=2 keeps keys that a window or stride hides"),
        ("--attention-dropout 1", "attention_dropout must be in [0, 1), got 1.0"),
        ("--dtype float16", "dtype must be 'float32' or 'bfloat16' on the CPU, got 'float16'"),
        ("--tokenizer absent.json", "cannot read tokenizer absent.json: No such file or directory"),
        ("--tokenizer bpe --vocab-size 9", "vocab_size must be at least 256"),
    ],
)
def test_an_unusable_option_is_named(options, message, text, tmp_path, error_line, quick):
    command = ["train", "--text", text, "--out", tmp_path / "run", *quick, *options.split()]
    assert message in error_line(*command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    ["", "fly", "train --fast", "train --steps many", "generate", "train --positions many"],
)
def test_wrong_usage_is_one_line(arguments, error_line):
    assert "--help" in error_line(*arguments.split(), code=2)


def test_help_is_offered(capsys):
    for arguments in (["--help"], ["train", "--help"], ["generate", "--help"], ["info", "--help"]):
        assert main(arguments) == 0
        assert "usage: fastattn" in capsys.readouterr().out


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


def interrupted_copy(run: Path, tmp_path: Path, text: str) -> Path:
    """A short run that stopped at its start."""
    out = tmp_path / "stopped"
    from fastattn.training.run import Options, train

    model = load_checkpoint(run).config["model"]
    training = load_checkpoint(run).config["training"]
    model.pop("vocab_size")
    options = Options(model=model, training=training, data={"text": (text,)})
    train(options, out, should_stop=lambda: True)
    return out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers 2", "another configuration: its num_layers is 1, not 2"),
        ("--steps 9", "another configuration: its steps is 8, not 9"),
        ("--tokenizer bpe", "another configuration: its tokenizer is 'char', not 'bpe'"),
        ("--text /etc/passwd", "another configuration: its text is"),
    ],
)
def test_resume_with_another_configuration_is_refused(
    options, message, run, text, tmp_path, error_line
):
    out = interrupted_copy(run, tmp_path, text)
    before = contents(out)
    line = error_line("train", "--out", out, "--resume", *options.split())
    assert message in line
    assert contents(out) == before


def test_resume_accepts_what_it_was_started_with(run, text, tmp_path, quick):
    out = interrupted_copy(run, tmp_path, text)
    command = ["train", "--out", str(out), "--resume", "--text", text, *quick, "--save-every", "1"]
    assert main(command) == 0
    assert load_checkpoint(out).config["training"]["checkpoint_interval"] == 1


def test_resume_with_a_changed_text_is_refused(run, text, tmp_path, error_line):
    out = interrupted_copy(run, tmp_path, text)
    before = contents(out)
    Path(text).write_text(TEXT + "more")
    line = error_line("train", "--out", out, "--resume")
    assert "step-00000000 is of another text" in line
    assert contents(out) == before


def test_a_truncated_checkpoint_is_named(run, error_line):
    path = run / "step-00000008" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    before = contents(run)
    for command in (["train", "--out", run, "--resume"], ["generate", "--checkpoint", run]):
        line = error_line(*command)
        assert f"{path} is truncated or changed: it has 1000 bytes" in line
    assert contents(run) == before


def test_a_full_disk_is_one_line_and_keeps_what_was_there(run, text, tmp_path, capsys, quick):
    """A limit on file sizes stands in for a full disk: the same write call fails."""
    out = interrupted_copy(run, tmp_path, text)
    before = contents(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        capsys.readouterr()
        assert main(["train", "--text", text, "--out", str(tmp_path / "new"), *quick]) == 1
        new = capsys.readouterr().err.splitlines()
        assert main(["train", "--out", str(out), "--resume"]) == 1
        resumed = capsys.readouterr().err.splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert new[-1].endswith("step-00000000: File too large; there is no earlier one")
    assert resumed[-1].endswith(f"File too large; {out / 'step-00000000'} is kept")
    assert [sum("error" in line for line in lines) for lines in (new, resumed)] == [1, 1]
    assert contents(tmp_path / "new") == {}
    after = contents(out)
    assert [name for name in before if after[name] != before[name]] == ["metrics.jsonl"]
    assert main(["train", "--out", str(out), "--resume"]) == 0
