"""Tokenizers: text to ids and back, special tokens, files, names, and decoding as ids come."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.generation.text import TextStream, encode_prompt
from fastattn.training.tokenizers import (
    TOKENIZER_KINDS,
    BackendTokenizer,
    Tokenizer,
    TokenizerError,
    from_json,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "the cat sat on the mat; the cat ate the rat.\n" * 20 + "Größe: 3 €, 🎉\n"
WORDS = "the cat sat on the mat, the rat ate the cat\n" * 20
SPECIAL = ["[PAD]", "[UNK]", "[BEGIN]", "[END]", "[MASK]"]
KINDS = [kind for kind in TOKENIZER_KINDS if kind != "bpe"]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", TEXT, vocab_size=280)


def make(kind: str, vocab_size: int = 60) -> BackendTokenizer:
    made = train_tokenizer(kind, WORDS, vocab_size=vocab_size, special=True)
    assert isinstance(made, BackendTokenizer)
    return made


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join(map(decoder.feed, tokens)) + decoder.finish()


def test_bpe_has_merged_what_is_frequent(bpe, monkeypatch):
    assert bpe.vocab_size == 280
    assert len(bpe.encode(" the")) == 1 and len(bpe.encode("zzz")) == 3
    assert 256 <= train_tokenizer("bpe", "ab", vocab_size=1000).vocab_size < 1000, "no more pairs"
    texts = TEXT, TEXT.replace("\n", " ")
    whole = bpe.encode_batch(texts)
    # Long texts are cut at line breaks or before spaces, or anywhere without.
    monkeypatch.setattr("fastattn.training.tokenizers.backend._PIECE_CHARACTERS", 100)
    assert list(map(bpe.encode, texts)) == whole
    assert bpe.decode(bpe.encode("x" * 250)) == "x" * 250


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_bpe_encodes_any_text(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text == streamed(bpe, bpe.encode(text))


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 279), max_size=20))
def test_bpe_decodes_any_ids_one_by_one(bpe, tokens):
    assert streamed(bpe, tokens) == bpe.decode(tokens)


def test_half_a_character_is_held_and_at_the_end_replaced(bpe):
    ids = bpe.encode("a漢b")
    decoder = bpe.decoder()
    assert [decoder.feed(token) for token in ids] == ["a", "", "", "漢", "b"]
    assert [decoder.feed(token) for token in ids[1:3]] == ["", ""] and decoder.finish() == "\ufffd"


def test_bpe_file_is_hugging_faces_own(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == bpe.encode(TEXT)
    theirs.add_special_tokens(["<|end|>", "é"])
    loaded = BackendTokenizer(theirs)
    assert loaded.decode(loaded.encode("the<|end|>éé")) == "the<|end|>éé"


def test_padding_truncation_and_template_of_a_file_are_not_used(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="? $A ?", special_tokens=[("?", 1)]
    )
    words.enable_truncation(2)
    words.enable_padding(pad_id=1)
    words.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (load_tokenizer(tmp_path), BackendTokenizer(words)):
        assert tokenizer.encode_batch(["a", "a a a"]) == [[0], [0, 0, 0]]
    assert words.padding and words.truncation, "the caller's own"


def test_a_missing_package_is_named(monkeypatch):
    for module in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[gpt\]" in a checkout'):
        train_tokenizer("bpe", TEXT)
    with pytest.raises(TokenizerError, match=r"no file gpt2; .* char, bpe.*: pip install tiktoken"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_text_comes_back(kind, tmp_path):
    tokenizer = make(kind)
    names = ("pad", "unknown", "begin", "end", "mask")
    assert [tokenizer.special_id(name) for name in names] == list(range(5))
    ids = tokenizer.encode("the rat sat")
    assert min(ids) > 4 and max(ids) < tokenizer.vocab_size
    assert tokenizer.special_id("unknown") in tokenizer.encode("the ß")
    assert tokenizer.decode(ids) == "the rat sat" == streamed(tokenizer, ids)
    assert tokenizer.encode_batch(["the", "rat sat"])[1] == tokenizer.encode("rat sat")
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.backend.get_vocab() == tokenizer.backend.get_vocab()
    assert again.encode(WORDS) == tokenizer.encode(WORDS)
    # Text that follows another joins it.
    stream = TextStream(tokenizer, after="the rat")
    pieces = [stream.feed(token) for token in ids[len(tokenizer.encode("the rat")) :]]
    assert "".join(pieces) + stream.finish() == " sat"
    assert len(encode_prompt(tokenizer, "")) == 1


def test_words_with_white_space_and_punctuation_come_back_exactly():
    text = '\tHe said:  "don\'t, (really)"\r\n\n\u00a0\u3000x=f(a, b);   #\u00e9t\u00e9 \n'
    tokenizer = train_tokenizer("word-space", text, vocab_size=100)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)
    assert tokenizer.find_id("\"don't,") in ids


def test_a_sentence_by_word_character_and_subword():
    """Words, spaces and signs are tokens; characters; pieces of words, each joined again."""
    text = "I like ice cream."
    ways = {
        "word-sign": ["I", " ", "like", " ", "ice", " ", "cream", "."],
        "char": list(text),
        "word": ["I", "like", "ice", "cream", "."],
    }
    for kind, expected in ways.items():
        tokenizer = train_tokenizer(kind, text, special=True)
        assert tokenizer.encode(text) == [tokenizer.find_id(token) for token in expected]
    for kind in ("bpe", "char-bpe", "wordpiece", "unigram"):
        tokenizer = train_tokenizer(kind, f"{text}\n" * 50, vocab_size=300, special=True)
        ids = tokenizer.encode("I like creamice.")
        assert tokenizer.decode(ids).replace(" .", ".") == "I like creamice." and len(ids) > 4


def test_vocabularies_have_the_size_and_the_special_tokens_that_are_asked_for():
    assert make("word", 9).vocab_size == 9
    assert train_tokenizer("bpe", WORDS, vocab_size=280).special_ids == frozenset()
    assert make("bpe", 280).special_ids == set(range(4)), "no text is unknown"
    continued = make("wordpiece").backend.encode("that", add_special_tokens=False).tokens
    assert continued[0].startswith("t")
    assert all(token.startswith("##") for token in continued[1:])


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


def test_an_encoding_of_tiktoken_is_loaded_by_name(monkeypatch, tmp_path):
    """Here one of bytes, the end of a text, and an id between them that is none."""
    table = {**{bytes([i]): i for i in range(256)}, b"<|endoftext|>": 257}
    back = {token: content for content, token in table.items()}

    def encode(texts: list[str], allowed_special: str) -> list[list[int]]:
        assert allowed_special == "all"
        parts = (re.findall(rb"<\|endoftext\|>|[\x00-\xff]", text.encode()) for text in texts)
        return [[table[part] for part in row] for row in parts]

    encoding = SimpleNamespace(
        n_vocab=258,
        encode_batch=encode,
        encode_single_token=lambda text: table[text.encode()],
        decode_single_token_bytes=back.__getitem__,
    )
    names = ["gpt2", "r50k"]
    get = {"gpt2": encoding}.__getitem__
    fake = SimpleNamespace(list_encoding_names=lambda: names, get_encoding=get)
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    monkeypatch.chdir(tmp_path)
    load_tokenizer("gpt2").save("tokenizer.json")
    text = "a€b<|endoftext|>"
    for tokenizer in (load_tokenizer("gpt2"), load_tokenizer("tokenizer.json")):
        ids = tokenizer.encode(text)
        assert ids == [*"a€b".encode(), 257] and tokenizer.special_id("end") == 257
        assert tokenizer.decode([*ids, 256]) == text == streamed(tokenizer, ids)
    with pytest.raises(TokenizerError, match=r"no file gpt5; .* char, bpe.*are gpt2, r50k, got"):
        load_tokenizer("gpt5")
    with pytest.raises(TokenizerError, match="tiktoken cannot load encoding 'r50k'"):
        from_json('{"format": "fastattn-tiktoken", "name": "r50k"}')
