"""Words with tags: CoNLL's files and Python's own tokens, rows of tokens, and messages."""

import sys

import pytest
import torch

from fastattn.training.data.tagged_text import (
    Sentence,
    python_sentences,
    read_conll,
    sentences_fingerprint,
    split_words,
    tags_of,
)
from fastattn.training.data.text import DataError
from fastattn.training.tasks.tagging import TaggingTask, cut_rows
from fastattn.training.tokenizers import TokenizerError, train_tokenizer

CONLL = "-DOCSTART- -X- O\r\n\r\nEU NNP B-ORG\rrejects VBZ O\n\n\nPeter\tNNP\tB-PER\n"
TOKENIZER = train_tokenizer("char", "EU rejects Peter Blackburn", special=True)


def sentence(words: str, tags: str) -> Sentence:
    pairs = words.split(), tags.split()
    return Sentence(*map(tuple, pairs), tuple(f"f:{i}" for i in range(1, 1 + len(pairs[0]))))


def task(train, validation=None, *, length=8, tags=("O", "X"), tokenizer=TOKENIZER) -> TaggingTask:
    validation = train if validation is None else validation
    options = {"tags": tags, "tokenizer": tokenizer, "context_length": length, "fingerprint": "f"}
    return TaggingTask(train, validation, **options)


def test_conll_files_are_read_with_places(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text(CONLL)
    actual = read_conll([path, path])
    assert actual[:2] == actual[2:]
    first, second = actual[:2]
    assert (first.words, first.tags) == (("EU", "rejects"), ("B-ORG", "O"))
    assert (second.words, second.tags) == (("Peter",), ("B-PER",))
    assert first.places == (f"{path}:3", f"{path}:4")
    assert second.places == (f"{path}:7",)
    assert tags_of(actual) == ("B-ORG", "B-PER", "O")


def test_python_s_tokens_are_tagged_line_by_line():
    source = 'def f(x):  # twice\n    return 2 * x + len("a")\n\n\n"""long\ntext"""\n'
    first, second, third = python_sentences(source)
    assert first.words == ("def", "f", "(", "x", ")", ":", "# twice")
    assert first.tags == ("keyword", "name", "operator", "name", *["operator"] * 2, "comment")
    tagged = dict(zip(second.words, second.tags, strict=True))
    assert (tagged["return"], tagged["2"], tagged['"a"']) == ("keyword", "number", "string")
    assert (third.words, third.tags) == (('"""long',), ("string",))
    assert second.places[0] == "the text:2"
    assert third.places == ("the text:5",)


def test_parts_of_f_strings_are_strings():
    (tagged,) = python_sentences('y = f"a{x}b"\n')
    tags = dict(zip(tagged.words, tagged.tags, strict=True))
    if sys.version_info >= (3, 12):
        tagged = [tags[part] for part in ('f"', "a", "x", "b")]
        assert tagged == ["string", "string", "name", "string"]
    else:
        assert tags['f"a{x}b"'] == "string"


def test_words_to_tag_are_cut_as_the_training_s_were():
    assert split_words("a b\n\n c\n", "t", python=False) == [("a", "b"), ("c",)]
    assert split_words("f(\nx)\n", "t", python=True) == [("f", "("), ("x", ")")]
    assert split_words(" \n", "t", python=True) == split_words(" \n", "t", python=False) == []


def test_the_fingerprint_is_of_words_tags_and_sentences():
    sentences = [
        [sentence("a b", "O X")],
        [sentence("a b", "O O")],
        [sentence("a c", "O X")],
        [sentence("a", "O"), sentence("b", "X")],
    ]
    assert len({sentences_fingerprint(one) for one in sentences}) == 4


def test_rows_are_cut_between_words():
    rows = cut_rows(["EU", "rejects", "Pe"], TOKENIZER, 9)
    assert [(row.starts, row.words) for row in rows] == [((0, 2), (0, 1)), ((0,), (2,))]
    assert list(rows[0].tokens) == TOKENIZER.encode("EUrejects")
    long, short = cut_rows(["Blackburn", "EU"], TOKENIZER, 5)
    assert list(long.tokens) == TOKENIZER.encode("Black")
    assert list(short.tokens) == TOKENIZER.encode("EU")


def test_a_word_without_tokens_is_the_unknown_one():
    words = train_tokenizer("wordpiece", "a b", vocab_size=20)
    assert words.encode(" ") == []
    assert cut_rows([" "], words, 4)[0].tokens == (words.special_id("unknown"),)
    plain = train_tokenizer("bpe", "a b")
    with pytest.raises(TokenizerError, match="no unknown token"):
        cut_rows([""], plain, 4)
    with pytest.raises(DataError, match="f:1: the tokenizer has no unknown token"):
        task([Sentence(("",), ("O",), ("f:1",))], tokenizer=plain)


def test_batches_hold_tags_at_first_tokens_and_lengths():
    validation = [sentence("EU rejects", "X O"), sentence("Pe", "X")]
    one = task([sentence("Peter", "X")], validation, length=16)
    (batch,) = one.validation(4)
    assert batch.lengths["key_lengths"].tolist() == [9, 2]
    assert batch.targets.tolist() == [[1, -100, 0, *[-100] * 6], [1, *[-100] * 8]]
    assert batch.inputs[0][1].tolist() == [*TOKENIZER.encode("Pe"), *[0] * 7]
    assert (batch.num_targets, batch.num_tokens) == (3, 11)
    assert one.extent == "1 training and 3 validation words of 2 tags"
    for split, lengths in (("train", {5}), ("validation", {9, 2})):
        drawn = one.draw(split, 64, torch.Generator().manual_seed(0))
        again = one.draw(split, 64, torch.Generator().manual_seed(0))
        assert torch.equal(drawn.inputs[0], again.inputs[0])
        assert set(drawn.lengths["key_lengths"].tolist()) == lengths


def test_scores_count_words_and_not_padding():
    """A model that says X for what begins with P, and O else."""
    one = task([sentence("EU Pe rejects", "X X O"), sentence("Pe", "O")], length=16)
    begins = TOKENIZER.encode("P")[0]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens, *, key_lengths):
            is_p = (tokens == begins).float()
            return torch.stack([1 - is_p, is_p], dim=-1), None

    # Expected X X O O, got O X O X.
    shares = dict.fromkeys(("accuracy", "majority", "macro_f1"), 0.5)
    assert one.scores(Model(), 1) == {**shares, "f1": {"O": 0.5, "X": 0.5}}
