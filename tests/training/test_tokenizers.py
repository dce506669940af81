"""Tokenizers: text to ids and back, special tokens, files, padding, and messages."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.generation.text import TextStream, encode_prompt
from fastattn.training.tokenizers import (
    BPETokenizer,
    PieceTokenizer,
    TokenizerError,
    from_json,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "the cat sat on the mat; the cat ate the rat.\n" * 20 + "Größe: 3 €, 🎉\n"


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(TEXT, 280)


def test_bpe_has_merged_what_is_frequent(bpe):
    assert bpe.vocab_size == 280
    assert len(bpe.encode(" the")) == 1
    assert len(bpe.encode("zzz")) == 3
    assert 256 <= BPETokenizer.train("ab", 1000).vocab_size < 1000, "no more pairs"


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_bpe_encodes_any_text(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 279), max_size=20))
def test_bpe_decodes_any_ids_piece_by_piece(bpe, tokens):
    decoder = bpe.decoder()
    pieces = [decoder.feed(token) for token in tokens] + [decoder.finish()]
    whole = b"".join(bpe.token_bytes[token] for token in tokens).decode("utf-8", "replace")
    assert "".join(pieces) == whole == bpe.decode(tokens)


def test_long_texts_are_encoded_in_pieces_cut_at_line_breaks(bpe, monkeypatch):
    whole = bpe.encode(TEXT)
    monkeypatch.setattr("fastattn.training.tokenizers.backend._PIECE_CHARACTERS", 100)
    assert bpe.encode(TEXT) == whole
    unbroken = "x" * 250
    assert bpe.decode(bpe.encode(unbroken)) == unbroken


def test_bpe_file_is_hugging_faces_own(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == bpe.encode(TEXT)
    theirs.add_special_tokens(["<|end|>", "é"])
    loaded = BPETokenizer(theirs)
    assert loaded.decode(loaded.encode("the<|end|>é")) == "the<|end|>é"


def test_a_tokenizer_that_is_not_byte_level_is_none_of_bpe(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    with pytest.raises(TokenizerError, match=r"must have a ByteLevel decoder.*got NoneType"):
        BPETokenizer(words)
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    assert load_tokenizer(path).encode("a") == [0]
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="? $A ?", special_tokens=[("?", 1)]
    )
    words.enable_truncation(2)
    words.enable_padding(pad_id=1)
    assert from_json(words.to_str()).encode_batch(["a", "a a a"]) == [[0], [0, 0, 0]]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "fastattn\[gpt\]"'):
        BPETokenizer.train(TEXT, 280)


WORDS = "the cat sat on the mat, the rat ate the cat\n" * 20
SPECIAL = ["[PAD]", "[UNK]", "[BEGIN]", "[END]", "[MASK]"]
KINDS = ["word", "word-space", "word-sign", "char", "char-bpe", "wordpiece", "unigram"]


def make(kind: str, vocab_size: int = 60):
    return train_tokenizer(kind, WORDS, vocab_size=vocab_size, special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_text_comes_back(kind, tmp_path):
    tokenizer = make(kind)
    assert isinstance(tokenizer, PieceTokenizer)
    names = ("pad", "unknown", "begin", "end", "mask")
    assert [tokenizer.special_id(name) for name in names] == list(range(5))
    assert tokenizer.special_ids == set(range(5))
    ids = tokenizer.encode("the rat sat")
    assert min(ids) > 4
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.special_id("unknown") in tokenizer.encode("the ß")
    assert tokenizer.decode(ids) == "the rat sat"
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed(token) for token in ids) + decoder.finish() == "the rat sat"
    each = [tokenizer.encode("the"), tokenizer.encode("rat sat")]
    assert tokenizer.encode_batch(["the", "rat sat"]) == each
    if kind in ("char", "char-bpe", "unigram"):
        assert tokenizer.decode(tokenizer.encode("the  cat\nsat ")) == "the  cat\nsat "
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(again) is PieceTokenizer
    assert again.backend.get_vocab() == tokenizer.backend.get_vocab()
    assert again.encode(WORDS) == tokenizer.encode(WORDS)


def test_words_with_white_space_and_punctuation_come_back_exactly():
    text = '\tHe said:  "don\'t, (really)"\r\n\n\u00a0\u3000x=f(a, b);   #\u00e9t\u00e9 \n'
    tokenizer = train_tokenizer("word-space", text, vocab_size=100)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.find_id("\"don't,") in ids
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.finish() == text
    # Other words are unknown, but the space about them is kept.
    unknown = tokenizer.special_id("unknown")
    assert [token == unknown for token in tokenizer.encode("He  sang\n")] == [0, 0, 0, 1, 0]


def test_signs_are_words_of_their_own_with_the_space_between_them():
    text = "I like ice cream.  Do you?\n"
    tokenizer = train_tokenizer("word-sign", text, vocab_size=100)
    actual = tokenizer.encode("ice cream.")
    assert actual == [tokenizer.find_id(token) for token in ("ice", " ", "cream", ".")]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_kind_cuts_as_its_name_says():
    lengths = {kind: len(make(kind).encode("the cat sat")) for kind in KINDS}
    assert lengths["word"] == 3
    assert make("word", 9).vocab_size == 9
    assert lengths["word-space"] == 5
    assert lengths["char"] == 11
    assert 3 <= lengths["char-bpe"] < 11
    assert 3 <= lengths["wordpiece"] < 11
    continued = make("wordpiece").backend.encode("that", add_special_tokens=False).tokens
    assert continued[0].startswith("t")
    assert all(token.startswith("##") for token in continued[1:])


def test_byte_level_bpe_has_special_tokens_on_request():
    plain = train_tokenizer("bpe", WORDS, vocab_size=280)
    assert plain.special_ids == frozenset()
    special = train_tokenizer("bpe", WORDS, vocab_size=280, special=True)
    assert isinstance(special, BPETokenizer)
    assert special.special_ids == set(range(4))
    assert special.decode(special.encode("the ß 漢")) == "the ß 漢"
    assert isinstance(from_json(special.to_json()), BPETokenizer)


@pytest.mark.parametrize("kind", ["word", "wordpiece"])
def test_a_vocabulary_file_is_the_same_tokenizer(kind, tmp_path):
    tokenizer = make(kind)
    path = tmp_path / "vocab.txt"
    tokens = sorted(tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    text = "".join(f"{token}\n" for token, _ in tokens)
    path.write_text(text.replace("[BEGIN]", "[CLS]").replace("[END]", "[SEP]"))
    assert [token for token, _ in tokens[:5]] == SPECIAL
    again = load_tokenizer(path)
    text = "the cat, mats and [MASK]"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.encode(text)[-1] == tokenizer.special_id("mask")
    assert (again.special_id("begin"), again.special_id("end")) == (2, 3), "as BERT names them"


def test_gpt2_s_two_files_are_read_from_their_folder(tmp_path):
    plain = train_tokenizer("bpe", WORDS, vocab_size=280)
    fields = json.loads(plain.to_json())["model"]
    vocabulary = {**fields["vocab"], "<|endoftext|>": 280}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor vocab\.json with"):
        load_tokenizer(tmp_path)
    merges = [" ".join(pair) for pair in fields["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(WORDS) == plain.encode(WORDS)
    assert tokenizer.special_id("begin") == tokenizer.special_id("end") == 280
    assert tokenizer.encode("cat<|endoftext|>")[-1] == 280


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_follows_another_joins_it(kind):
    tokenizer = make(kind)
    whole = tokenizer.encode("the rat sat on")
    before = len(tokenizer.encode("the rat"))
    stream = TextStream(tokenizer, after="the rat")
    pieces = [stream.feed(token) for token in whole[before:]]
    assert "".join(pieces) + stream.finish() == " sat on"
    assert len(encode_prompt(tokenizer, "")) == 1
