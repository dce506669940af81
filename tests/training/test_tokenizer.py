"""Tokenizers: text to ids and back, files, and messages."""

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


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_saved_tokenizer_is_the_same(kind, tmp_path):
    tokenizer = train_tokenizer(kind, TEXT, vocab_size=280)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(tokenizer.encode(TEXT)) == TEXT
    assert loaded.to_json() == train_tokenizer(kind, TEXT, vocab_size=280).to_json(), "repeatable"


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
        (None, "No such file"),
    ],
)
def test_an_unusable_file_is_named(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


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
