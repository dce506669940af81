"""Options of `fastattn train` that change attention: each learns, continues and generates."""

import json

import pytest
import torch

from fastattn.cli.main import main
from fastattn.models.gpt import GPT
from fastattn.training.checkpoint import load_checkpoint, load_model
from fastattn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Café:\n    price = 3\n" * 20
QUICK = [
    *("--layers", "1", "--heads", "2", "--embed-dim", "16", "--context", "16", "--batch", "4"),
    *("--log-every", "2", "--eval-every", "100", "--lr", "0.02", "--device", "cpu"),
]


@pytest.fixture
def train(tmp_path) -> list[str]:
    """The command that starts a run, but for its options."""
    (tmp_path / "text.txt").write_text(TEXT)
    return ["train", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *QUICK]


@torch.no_grad()
def naive_continuation(model: GPT, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens one by one, each from all that the model holds, without a cache."""
    context, held = model.config.context_length, len(tokens)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-held:]]))
        tokens = [*tokens, int(logits[0, -1].argmax())]
        held = held + 1 if held < context else context // 2
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        "--attention-dropout 0.2",
        "--window 4",
        "--window 3 --keep-first 2",
        "--alibi",
        "--softcap 5",
        "--sinks",
        "--qk-norm",
        "--alibi --window 6 --keep-first 1 --softcap 5 --sinks --qk-norm --attention-dropout 0.1",
    ],
)
def test_every_kind_of_attention_learns_and_generates(options, train, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*train, "--steps", "40", *options.split()]) == 0
    losses = [record["loss"] for record in read_metrics(out) if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
    capsys.readouterr()
    generate = ["generate", "--checkpoint", str(out), "--device", "cpu", "--tokens", "30"]
    assert main([*generate, "--prompt", "def ", "--greedy"]) == 0
    model, tokenizer = load_model(out)
    expected = naive_continuation(model, tokenizer.encode("def "), 30)
    assert capsys.readouterr().out == tokenizer.decode(expected) + "\n"


def test_alibi_is_a_kind_of_positions(train, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*train, "--steps", "2", "--alibi"]) == 0
    assert load_checkpoint(out).config["model"]["positions"] == "alibi"
    assert main(["train", "--out", str(out), "--resume", "--positions", "alibi"]) == 0
    capsys.readouterr()
    assert main(["train", "--positions", "rotary", "--alibi"]) == 2
    assert "argument --alibi: not allowed with argument --positions" in capsys.readouterr().err


def test_a_run_from_before_some_options_goes_on(train, tmp_path, monkeypatch, capsys):
    from fastattn.training.trainer import Trainer

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", interrupt)
        assert main([*train, "--steps", "4"]) == 130
    path = out / "step-00000000" / "checkpoint.json"
    index = json.loads(path.read_text())
    for name in ("keep_first", "softcap", "sinks", "qk_norm", "attention_dropout"):
        del index["config"]["model"][name]
    path.write_text(json.dumps(index))

    load_model(out)
    resume = ["train", "--out", str(out), "--resume"]
    assert main([*resume, "--softcap", "5"]) == 1
    assert "its softcap is None, not 5.0" in capsys.readouterr().err
    assert main([*resume, "--attention-dropout", "0", "--keep-first", "0"]) == 0
    assert load_checkpoint(out).config["model"]["attention_dropout"] == 0
    assert main(["generate", "--checkpoint", str(out), "--device", "cpu", "--tokens", "3"]) == 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
