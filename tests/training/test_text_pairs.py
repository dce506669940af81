"""Pairs to translate: files, the standard library's docstrings, batches, scores, and messages."""

import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn.training.data import text_pairs as pairs_module
from fastattn.training.data.text_pairs import (
    Pair,
    date_in_words,
    date_pairs,
    pairs_fingerprint,
    read_pairs,
    standard_library_pairs,
)
from fastattn.training.tasks.scores import confusion, tag_scores, text_scores
from fastattn.training.tasks.sources import DataConfig, pair_source
from fastattn.training.tasks.translation import TranslationTask, encode_pairs, encode_texts
from fastattn.training.tokenizers import train_tokenizer

TOKENIZER = train_tokenizer("word", "one two three eins zwei drei")
PAIRS = [Pair("one two", "eins zwei", "f:1"), Pair("three", "drei", "f:2")]


def encode(pairs, **changes):
    return encode_pairs(pairs, TOKENIZER, **{"source_length": 4, "target_length": 4, **changes})


def test_files_of_pairs_are_read_with_places(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("one\teins\r\n two words \tzwei Wörter\n".encode())
    assert read_pairs([path]) == [
        Pair("one", "eins", f"{path}:1"),
        Pair("two words", "zwei Wörter", f"{path}:2"),
    ]
    spaced = train_tokenizer("word-space", "two words")
    actual = encode_texts([(" two words\r", "f:1")], spaced, 4)
    assert actual == [tuple(spaced.encode("two words"))], "as in training"


def test_the_run_s_pairs_are_those_of_validation_too(tmp_path):
    files = []
    for target in ("drei", "eins"):
        files.append(str(tmp_path / target))
        Path(files[-1]).write_text(f"one two\t{target}\n")
    read = [pair_source(DataConfig((files[0],), validation=(x,), truncate=True)) for x in files]
    assert read[0].fingerprint != read[1].fingerprint
    task = read[0].make_task(TOKENIZER, SimpleNamespace(source_length=1, target_length=4))
    assert task.draw("train", 1, torch.Generator()).inputs[0].tolist() == [TOKENIZER.encode("one")]


def test_docstrings_are_paired_with_the_words_of_names(monkeypatch):
    source = (
        'def read_file(x):\n    """Read it.\n\n    More."""\n\n\n'
        'class A:\n    def __len__(self):\n        """Length."""\n\n'
        "    async def no_text(self): ...\n\n\n"
        f'def long():\n    """{"x" * 81}"""\n\n\n'
        'def read_file():\n    """Read it."""\n'
    )
    texts = {"a.py": source, "b.py": "def broken(:"}
    monkeypatch.setattr(pairs_module, "standard_library_sources", lambda limit: texts)
    assert standard_library_pairs() == [
        Pair("Read it.", "read file", "a.py:1"),
        Pair("Length.", "len", "a.py:8"),
    ]


def test_the_fingerprint_is_of_both_sides():
    one, three = Pair("one", "eins zwei", "f:1"), Pair("three", "zwei", "f:2")
    changed = [PAIRS, PAIRS[:1], [one, PAIRS[1]], [PAIRS[0], three]]
    assert len({pairs_fingerprint(pairs) for pairs in changed}) == 4


def test_pairs_are_cut_on_request():
    (first, second) = encode(PAIRS, source_length=1, target_length=2, truncate=True)
    assert list(first.source) == TOKENIZER.encode("one")
    assert list(first.target) == TOKENIZER.encode("eins")
    assert list(second.target) == TOKENIZER.encode("drei")


def test_batches_are_shifted_padded_and_measured():
    encoded = encode(PAIRS)
    task = TranslationTask(
        encoded, encoded, ["eins zwei", "drei"], tokenizer=TOKENIZER, fingerprint="f"
    )
    (batch,) = task.validation(3)
    source, inputs = batch.inputs
    begin, end, pad = (TOKENIZER.special_id(name) for name in ("begin", "end", "pad"))
    one, two, three = TOKENIZER.encode("one two three")
    eins, zwei, drei = TOKENIZER.encode("eins zwei drei")
    assert source.tolist() == [[one, two], [three, pad]]
    assert inputs.tolist() == [[begin, eins, zwei], [begin, drei, pad]]
    assert batch.targets.tolist() == [[eins, zwei, end], [drei, end, -100]]
    assert batch.lengths["source_lengths"].tolist() == [2, 1]
    assert batch.lengths["target_lengths"].tolist() == [3, 2]
    assert (batch.num_targets, batch.num_tokens) == (5, 8)
    assert task.extent == "2 training and 2 validation pairs"
    drawn = task.draw("train", 32, torch.Generator().manual_seed(1))
    assert set(drawn.lengths["source_lengths"].tolist()) == {1, 2}


def test_f1_of_each_tag_by_hand():
    counts = confusion(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1, 1]), 3)
    assert counts.tolist() == [[1, 2, 0], [0, 2, 0], [0, 0, 0]]
    scores = tag_scores(counts, ["a", "b", "c"])
    # a: 1 right of 3 expected and 1 got; b: 2 right of 2 and 4; c occurs nowhere.
    assert scores["f1"] == {"a": pytest.approx(1 / 2), "b": pytest.approx(2 / 3)}
    assert scores["macro_f1"] == pytest.approx(7 / 12)
    assert (scores["accuracy"], scores["majority"]) == (0.6, 0.6)


def test_scores_of_texts_are_sacrebleu_s():
    import sacrebleu

    expected = ["the cat sat on the mat today", "a dog"]
    got = ["the cat sat on  the mat now", " a dog"]
    scores = text_scores(got, expected)
    assert scores["exact_match"] == 0.5
    clean = [" ".join(text.split()) for text in got]
    assert scores["bleu"] == sacrebleu.corpus_bleu(clean, [expected]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(clean, [expected]).score
    assert 50 < scores["bleu"] < 100
    assert text_scores(expected, expected)["chrf"] == 100


def test_dates_are_written_in_words():
    for *day, words in (
        (1954, 11, 21, "twenty-first of November nineteen fifty-four"),
        (2000, 1, 1, "first of January two thousand"),
        (2001, 5, 30, "thirtieth of May two thousand one"),
        (2012, 2, 12, "twelfth of February twenty twelve"),
        (1900, 3, 20, "twentieth of March nineteen hundred"),
        (1905, 8, 13, "thirteenth of August nineteen oh five"),
    ):
        assert date_in_words(datetime.date(*day)) == words


def test_every_day_is_paired_once_in_one_of_three_forms():
    actual = date_pairs()
    assert len(actual) == len({pair.place for pair in actual}) == 36525
    assert len({pair.target for pair in actual}) == 36525
    for separator, order in (("-", (0, 1, 2)), (".", (2, 1, 0)), ("/", (2, 0, 1))):
        some = [pair for pair in actual if separator in pair.source]
        assert 0.3 < len(some) / len(actual) < 0.37
        numbers = some[0].source.split(separator)
        day = datetime.date(*(int(numbers[i]) for i in order))
        assert some[0].target == date_in_words(day)
    # Neither the first nor the last tenth is of some years alone.
    assert len({pair.place[:4] for pair in actual[:3650]}) == 100
