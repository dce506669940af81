"""`fastattn train` with every model and task, and what `tag` and `translate` make of them."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from fastattn.cli.main import main
from fastattn.models import model_config as model_config
from fastattn.training.checkpoint import load_checkpoint, load_trained
from fastattn.training.data import tagged_text
from fastattn.training.data.tagged_text import standard_library_sentences
from fastattn.training.metrics import read_metrics
from fastattn.training.train_config import DataConfig

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SMALL = [
    *("--layers", "1", "--heads", "2", "--embed-dim", "32", "--batch", "16", "--lr", "1e-2"),
    *("--warmup", "5", "--log-every", "50", "--device", "cpu"),
]
TINY = ["--layers", "1", "--heads", "2", "--embed-dim", "16", "--batch", "4", "--device", "cpu"]
CONLL = "the O\nfox X\n\na O\ndog X\n\n" * 8
PAIRS = "one two\teins zwei\nthree\tdrei\n" * 8
WORDS = "the quick brown fox jumps over the lazy dog .\n" * 30


def run(*words: object) -> int:
    return main([str(word) for word in words])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def train(out: Path, model: str, text: Path, *options: object) -> int:
    return run("train", "--model", model, "--text", text, "--out", out, *options)


@pytest.fixture(scope="module")
def torch_only():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        yield patch


@pytest.fixture(scope="module")
def python_tagger(tmp_path_factory, one_thread, torch_only) -> Path:
    """Tags of the standard library's own tokens."""
    few = partial(standard_library_sentences, 60_000)
    torch_only.setattr(tagged_text, "standard_library_sentences", few)
    out = tmp_path_factory.mktemp("tagger") / "run"
    options = ["--tokenizer", "char", "--context", 16, "--steps", 60, *SMALL]
    assert run("train", "--model", "encoder", "--out", out, *options) == 0
    return out


@pytest.fixture(scope="module")
def translator(tmp_path_factory, one_thread, torch_only) -> Path:
    """Two digits in words."""
    pairs = [f"{a} {b}\t{DIGITS[a]} {DIGITS[b]}\n" for a in range(10) for b in range(10)]
    random.Random(0).shuffle(pairs)
    folder = tmp_path_factory.mktemp("translator")
    text = write(folder / "digits.tsv", "".join(pairs))
    options = ["--tokenizer", "word", "--source-length", 4, "--target-length", 4, "--steps", 150]
    assert train(folder / "run", "seq2seq", text, *options, *SMALL) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def masked(tmp_path_factory, one_thread, torch_only) -> Path:
    """A sentence that comes again and again."""
    folder = tmp_path_factory.mktemp("masked")
    text = write(folder / "text.txt", WORDS)
    options = ["--task", "masked", "--tokenizer", "word", "--context", 12, "--steps", 200]
    extra = ["--positions", "rotary", "--batch", 32]
    assert train(folder / "run", "encoder", text, *options, *SMALL, *extra) == 0
    return folder / "run"


def test_a_tagger_learns_python_s_tokens(python_tagger, capsys):
    checkpoint = load_checkpoint(python_tagger)
    assert checkpoint.config["kind"] == "tagger"
    scores = checkpoint.config["results"]["scores"]
    assert scores["majority"] < 0.6
    assert scores["accuracy"] > 0.85
    assert scores["macro_f1"] > 0.6
    assert set(scores["f1"]) == set(checkpoint.config["data"]["tags"])
    assert read_metrics(python_tagger)[-1]["scores"] == scores
    command = ["tag", "--checkpoint", python_tagger, "--device", "cpu"]
    assert run(*command, "--text", "import os  # why\n\nx = 3") == 0
    lines = capsys.readouterr().out.splitlines()
    words = ["import", "os", "# why", "", "x", "=", "3", ""]
    assert [line.split("\t")[0] for line in lines] == words
    assert "# why\tcomment" in lines
    assert "=\toperator" in lines
    assert run("train", "--out", python_tagger, "--resume") == 0, "a finished run says it again"
    written = capsys.readouterr().out
    assert f"accuracy of the most frequent tag alone {scores['majority']:.4f}\n" in written
    assert f"  operator {scores['f1']['operator']:.4f}\n" in written


def test_a_translator_learns_digits_in_words(translator, capsys):
    scores = load_checkpoint(translator).config["results"]["scores"]
    assert scores["exact_match"] > 0.8
    assert scores["chrf"] > 80
    assert scores["pairs"] == 10
    command = ["translate", "--checkpoint", translator, "--device", "cpu"]
    assert run(*command, "--text", "4 2", "--text", "7 7") == 0
    assert capsys.readouterr().out == "four two\nseven seven\n"
    assert run(*command, "--text", "4 2", "--beams", 3) == 0
    assert capsys.readouterr().out == "four two\n"
    assert run(*command, "--text", "4 2 9 9 9", "--truncate") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_file_is_translated_line_by_line(translator, tmp_path, capsys, monkeypatch, error_line):
    monkeypatch.setattr("fastattn.cli.tasks._SOURCES_AT_ONCE", 2)
    path = write(tmp_path / "digits.txt", "".join(f"{a} {a}\n" for a in (1, 3, 5)))
    command = ["translate", "--checkpoint", translator, "--file", path, "--device", "cpu"]
    assert run(*command) == 0
    assert capsys.readouterr().out == "one one\nthree three\nfive five\n"
    write(path, "1 2\n\n3 4\n")
    assert f"{path}:2: the source has no token" in error_line(*command)


def test_masked_words_are_named(masked):
    checkpoint = load_checkpoint(masked)
    assert checkpoint.config["kind"] == "masked"
    # The most frequent word stands at one place in five.
    assert checkpoint.config["results"]["scores"]["accuracy"] > 0.8


def test_a_tagger_starts_from_a_masked_model(masked, tmp_path, error_line):
    text = write(tmp_path / "a.conll", CONLL)
    out = tmp_path / "run"
    options = ["--start-from", masked, "--steps", 1, "--dropout", 0.1, "--lr", "1e-9"]
    assert train(out, "encoder", text, *options, "--device", "cpu") == 0
    tagger, before = load_trained(out, "tagger"), load_trained(masked)
    assert tagger.tokenizer.to_json() == before.tokenizer.to_json()
    assert tagger.config.positions == "rotary"
    assert tagger.config.dropout == 0.1
    for name, tensor in before.model.encoder.state_dict().items():
        torch.testing.assert_close(tensor, tagger.model.encoder.state_dict()[name])
    assert run("train", "--out", out, "--resume") == 0
    new = tmp_path / "new"
    start = ["train", "--model", "encoder", "--text", text, "--out", new, "--start-from", masked]
    line = error_line(*start, "--embed-dim", 16)
    assert "the pretrained encoder has embed_dim=32, got 16: leave" in line
    line = error_line(*start, "--tokenizer", "char")
    assert "start_from has its own tokenizer" in line
    line = error_line(*start[:-1], out)
    assert "holds a tagger, a masked-token model is needed" in line
    assert not new.exists()


def test_a_preset_is_the_base_of_a_configuration(tmp_path, error_line):
    text = write(tmp_path / "a.conll", CONLL)
    options = ["--tokenizer", "word", "--steps", 1, "--preset", "bert-base", *TINY]
    assert train(tmp_path / "run", "encoder", text, *options, "--context", 8) == 0
    actual = load_trained(tmp_path / "run")
    assert actual.config.vocab_size == actual.tokenizer.vocab_size
    assert (actual.config.block, actual.config.norm_eps) == ("post", 1e-12)
    assert (actual.config.num_layers, actual.config.context_length) == (1, 8)
    command = ["train", "--text", text, "--out", tmp_path / "new", "--preset", "none"]
    assert "GPTConfig has the presets gpt2-small" in error_line(*command)


def test_dates_are_pairs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("fastattn.training.data.text_pairs._YEARS", range(2026, 2027))
    options = ["--pairs", "dates", "--tokenizer", "char", "--steps", 1, *TINY]
    assert run("train", "--model", "seq2seq", "--out", tmp_path / "run", *options) == 0
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.config["data"]["pairs"] == "dates"
    assert checkpoint.config["results"]["scores"]["pairs"] == 36
    with pytest.raises(ValueError, match="pairs must be 'names', 'dates' or null, got 'numbers'"):
        DataConfig(pairs="numbers")


def test_a_file_to_measure_on_is_not_trained_on(tmp_path, capsys, error_line):
    text = write(tmp_path / "a.conll", CONLL)
    other = write(tmp_path / "b.conll", "a O\nfox O\nthe X\n")
    options = ["--tokenizer", "word", "--context", 8, "--steps", 40, "--validation", other]
    assert train(tmp_path / "run", "encoder", text, *options, *SMALL) == 0
    # What was learned is wrong there, but for the first word.
    scores = load_checkpoint(tmp_path / "run").config["results"]["scores"]
    assert scores["accuracy"] == pytest.approx(1 / 3)
    capsys.readouterr()
    command = ["tag", "--checkpoint", tmp_path / "run", "--device", "cpu", "--text", "a don't\n"]
    assert run(*command) == 0
    words = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["a", "don't", ""], "at white space, as in the file"
    write(other, "the O\n\ndog Y\n")
    command = ["train", "--model", "encoder", "--text", text, "--validation", other]
    line = error_line(*command, "--out", tmp_path / "new")
    assert f"{other}:3: unknown tag 'Y'; the run's are O, X" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("model", "content", "options", "message"),
    [
        ("encoder", "a O\n", "", "there are too few sentences: 1, at least 2 are needed"),
        ("encoder", CONLL, "--source-length 3", "source_length is no option of model encoder"),
        ("encoder", CONLL, "--task translation", "model encoder has the task tagging or masked"),
        ("gpt", CONLL, "--task tagging", "model gpt has the task language, got task 'tagging'"),
        ("gpt", CONLL, "--validation x", "validation is no option of task language"),
        ("seq2seq", PAIRS, "--pairs dates", "pairs are generated without a text: leave out one"),
    ],
)
def test_unusable_data_and_options_are_named(
    model, content, options, message, tmp_path, error_line
):
    text = write(tmp_path / "text", content)
    words = ["--tokenizer", "word", *TINY, *options.split()]
    line = error_line("train", "--model", model, "--text", text, "--out", tmp_path / "run", *words)
    assert line.startswith("fastattn: error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_kind_is_refused(python_tagger, translator, masked, error_line):
    cases = [
        (["generate"], python_tagger, "holds a tagger, a GPT is needed: see fastattn tag"),
        (["tag", "--text", "a"], masked, "holds a masked-token model, a tagger is needed"),
        (["translate", "--text", "a"], python_tagger, "a tagger, an encoder-decoder is needed"),
        (["tag", "--text", "a"], translator, "an encoder-decoder, a tagger is needed: see fast"),
    ]
    for command, run_dir, message in cases:
        line = error_line(*command, "--checkpoint", run_dir, "--device", "cpu")
        assert message in line
    line = error_line("train", "--model", "gpt", "--out", translator, "--resume")
    assert "holds an encoder-decoder, not a GPT" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tag --text \n", "--text: there is no word to tag"),
        ("translate --text 1|2|3|4|5", "--text: the source has 5 tokens, the model reads at most"),
        ("translate --text 1 --text |", "--text 2: the source has no token"),
    ],
)
def test_unusable_requests_are_named(words, message, python_tagger, translator, error_line):
    command, *options = [word.replace("|", " ") for word in words.split(" ")]
    run_dir = python_tagger if command == "tag" else translator
    assert message in error_line(command, "--checkpoint", run_dir, "--device", "cpu", *options)
