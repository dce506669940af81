"""Tokenizers of words and pieces: special tokens, vocabulary files, folders, padding."""

import json

import pytest
import torch

from fastattn.training.data.rows import pad
from fastattn.training.tokenizers import (
    BPETokenizer,
    CharacterTokenizer,
    PieceTokenizer,
    TokenizerError,
    from_json,
    load_tokenizer,
    train_tokenizer,
)
from fastattn.training.tokenizers.pieces import read_vocabulary

TEXT = "the cat sat on the mat, the rat ate the cat\n" * 20
SPECIAL = ["[PAD]", "[UNK]", "[BEGIN]", "[END]", "[MASK]"]
KINDS = ["word", "word-space", "word-sign", "char", "char-bpe", "wordpiece", "unigram"]


def make(kind: str, vocab_size: int = 60):
    return train_tokenizer(kind, TEXT, vocab_size=vocab_size, special=True)


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
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


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
    found = tokenizer.encode("ice cream.")
    assert found == [tokenizer.find_id(token) for token in ("ice", " ", "cream", ".")]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_kind_cuts_as_its_name_says():
    lengths = {kind: len(make(kind).encode("the cat sat")) for kind in KINDS}
    assert lengths["word"] == 3
    assert lengths["word-space"] == 5
    assert lengths["char"] == 11
    assert 3 <= lengths["char-bpe"] < 11
    assert 3 <= lengths["wordpiece"] < 11
    continued = make("wordpiece").backend.encode("that", add_special_tokens=False).tokens
    assert continued[0].startswith("t")
    assert all(token.startswith("##") for token in continued[1:])


def test_byte_level_bpe_has_special_tokens_on_request():
    plain = train_tokenizer("bpe", TEXT, vocab_size=280)
    assert plain.special_ids == frozenset()
    with pytest.raises(TokenizerError, match=r"no mask token, such as \[MASK\] or <mask>"):
        plain.special_id("mask")
    special = train_tokenizer("bpe", TEXT, vocab_size=280, special=True)
    assert isinstance(special, BPETokenizer)
    assert special.special_ids == set(range(4))
    assert special.decode(special.encode("the ß 漢")) == "the ß 漢"
    assert isinstance(from_json(special.to_json()), BPETokenizer)
    with pytest.raises(TokenizerError, match="no begin token"):
        CharacterTokenizer("ab").special_id("begin")


@pytest.mark.parametrize("kind", ["word", "wordpiece"])
def test_a_vocabulary_file_is_the_same_tokenizer(kind, tmp_path):
    tokenizer = make(kind)
    path = tmp_path / "vocab.txt"
    tokens = sorted(tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    path.write_text("".join(f"{token}\n" for token, _ in tokens))
    assert [token for token, _ in tokens[:5]] == SPECIAL
    again = load_tokenizer(path)
    text = "the cat, mats and [MASK]"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.encode(text)[-1] == tokenizer.special_id("mask")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[UNK]\na\n\nb\n", "vocab.txt:3: the line is empty, a token is expected"),
        (b"[UNK]\na\nb\na\n", "vocab.txt:4: token 'a' stands on line 2 already"),
        (b"a\nb\n", r"vocab.txt has no unknown token, such as \[UNK\] or <unk>"),
        (b"\xff", "vocab.txt is not UTF-8 text"),
        (None, "cannot read vocabulary .*vocab.txt: No such file"),
    ],
)
def test_an_unusable_vocabulary_is_named(content, message, tmp_path):
    if content is not None:
        (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        read_vocabulary(tmp_path / "vocab.txt")


def test_gpt2_s_two_files_are_read_from_their_folder(tmp_path):
    plain = train_tokenizer("bpe", TEXT, vocab_size=280)
    fields = json.loads(plain.to_json())["model"]
    vocabulary = {**fields["vocab"], "<|endoftext|>": 280}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor vocab\.json with"):
        load_tokenizer(tmp_path)
    merges = [" ".join(pair) for pair in fields["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT) == plain.encode(TEXT)
    assert tokenizer.special_id("begin") == tokenizer.special_id("end") == 280
    assert tokenizer.encode("cat<|endoftext|>")[-1] == 280


@pytest.mark.parametrize("kind", KINDS)
def test_unusable_requests_are_named(kind):
    with pytest.raises(TokenizerError, match=r"vocab_size must be over 5, .* got 5"):
        PieceTokenizer.train(kind, TEXT, 5)
    with pytest.raises(TokenizerError, match=f"kind '{kind}' needs a text, got none"):
        PieceTokenizer.train(kind, " \n", 60)
    with pytest.raises(TokenizerError, match=r"must be one of word, word-space, .* got 'letters'"):
        PieceTokenizer.train("letters", TEXT, 60)
    tokenizer = make(kind)
    with pytest.raises(TokenizerError, match=r"must be in 0\.\.\d+ for this tokenizer, got 999"):
        tokenizer.decode([999])
    with pytest.raises(TokenizerError, match="half of a character"):
        tokenizer.encode("a\udcff")
    if kind == "unigram":
        with pytest.raises(TokenizerError, match="cannot train a tokenizer of kind 'unigram'"):
            PieceTokenizer.train("unigram", TEXT, 6)


def test_padding_gives_lengths():
    padded = pad([[5, 6, 7], [8], []], 0)
    assert padded.tokens.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert padded.lengths.tolist() == [3, 1, 0]
    assert padded.tokens.dtype == padded.lengths.dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_follows_another_joins_it(kind):
    from fastattn.generation.text import TextStream, encode_prompt

    tokenizer = make(kind)
    whole = tokenizer.encode("the rat sat on")
    before = len(tokenizer.encode("the rat"))
    stream = TextStream(tokenizer, after="the rat")
    pieces = [stream.feed(token) for token in whole[before:]]
    assert "".join(pieces) + stream.finish() == " sat on"
    assert len(encode_prompt(tokenizer, "")) == 1
