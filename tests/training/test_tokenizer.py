"""Tokenizers: text to ids and back, files, and messages."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.training.tokenizers import (
    BPETokenizer,
    CharacterTokenizer,
    TokenizerError,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "the cat sat on the mat; the cat ate the rat.\n" * 20 + "Größe: 3 €, 🎉\n"


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(TEXT, 280)


def test_characters_are_numbered_by_code_point():
    tokenizer = CharacterTokenizer("cab€a")
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("abc€") == [0, 1, 2, 3]
    assert tokenizer.decode([3, 0]) == "€a"


def test_bpe_has_merged_what_is_frequent(bpe):
    assert bpe.vocab_size == 280
    assert len(bpe.encode(" the")) == 1
    assert len(bpe.encode("zzz")) == 3


def test_bpe_stops_where_the_text_has_no_more_pairs():
    assert 256 <= BPETokenizer.train("ab", 1000).vocab_size < 1000


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_training_is_repeatable(kind):
    first, second = (train_tokenizer(kind, TEXT, vocab_size=290) for _ in range(2))
    assert first.to_json() == second.to_json()


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


def test_a_character_of_several_tokens_appears_when_it_is_complete(bpe):
    tokens = bpe.encode("漢")
    assert len(tokens) == 3
    decoder = bpe.decoder()
    assert [decoder.feed(token) for token in tokens] == ["", "", "漢"]
    assert decoder.finish() == ""
    decoder = bpe.decoder()
    assert decoder.feed(tokens[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_long_texts_are_encoded_in_pieces_cut_at_line_breaks(bpe, monkeypatch):
    whole = bpe.encode(TEXT)
    monkeypatch.setattr("fastattn.training.tokenizers.backend._PIECE_CHARACTERS", 100)
    assert bpe.encode(TEXT) == whole
    unbroken = "x" * 250
    assert bpe.decode(bpe.encode(unbroken)) == unbroken


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_saved_tokenizer_is_the_same(kind, tmp_path):
    tokenizer = train_tokenizer(kind, TEXT, vocab_size=280)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(tokenizer.encode(TEXT)) == TEXT


def test_bpe_file_is_hugging_faces_own(bpe, tmp_path):
    import tokenizers

    bpe.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == bpe.encode(TEXT)
    theirs.add_special_tokens(["<|end|>", "é"])
    loaded = BPETokenizer(theirs)
    assert loaded.decode(loaded.encode("the<|end|>é")) == "the<|end|>é"


def test_an_unknown_character_is_named():
    with pytest.raises(TokenizerError, match=r"character 'é' \(U\+00E9\) does not occur"):
        CharacterTokenizer("abc").encode("abé")
    with pytest.raises(TokenizerError, match=r"character '\\udcff' \(U\+DCFF\) does not occur"):
        CharacterTokenizer("abc").encode("a\udcff")


def test_half_a_character_is_named(bpe):
    with pytest.raises(TokenizerError, match=r"holds '\\udcff' at position 1"):
        bpe.encode("a\udcff")


@pytest.mark.parametrize("token", [-1, 280])
def test_an_id_out_of_range_is_named(bpe, token):
    with pytest.raises(TokenizerError, match=rf"0..279 for this tokenizer, got {token}"):
        bpe.decode([token])
    with pytest.raises(TokenizerError, match=rf"0..2 for this tokenizer, got {token}"):
        CharacterTokenizer("abc").decode([token])


def test_wrong_training_requests_are_named():
    with pytest.raises(TokenizerError, match="at least one character, got none"):
        train_tokenizer("char", "")
    with pytest.raises(TokenizerError, match=r"vocab_size must be at least 256 .* got 255"):
        train_tokenizer("bpe", TEXT, vocab_size=255)
    with pytest.raises(TokenizerError, match=r"at least 260 .* with special tokens, got 259"):
        train_tokenizer("bpe", TEXT, vocab_size=259, special=True)
    with pytest.raises(TokenizerError, match=r"one of 'char', 'bpe', .*'unigram', got 'letters'"):
        train_tokenizer("letters", TEXT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b"[]", "neither a character tokenizer nor a Hugging Face one"),
        (b'{"format": "fastattn-characters"}', "has no text under 'characters'"),
        (b'{"model": {}}', "cannot be read by Hugging Face tokenizers"),
    ],
)
def test_an_unusable_file_is_named(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer.json .*{message}|{message}") as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"cannot read tokenizer .*absent: No such file"):
        load_tokenizer(tmp_path / "absent")


def test_a_tokenizer_that_is_not_byte_level_is_none_of_bpe(tmp_path):
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    with pytest.raises(TokenizerError, match=r"must have a ByteLevel decoder.*got NoneType"):
        BPETokenizer(words)
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    assert load_tokenizer(path).encode("a") == [0]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "fastattn\[gpt\]"'):
        BPETokenizer.train(TEXT, 280)


def test_character_file_holds_readable_json(tmp_path):
    CharacterTokenizer("ab").save(tmp_path / "t.json")
    fields = json.loads((tmp_path / "t.json").read_text())
    assert fields == {"format": "fastattn-characters", "characters": "ab"}
