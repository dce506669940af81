"""Every row of refusals.txt is refused by name, and the calls that rows change are served."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import rows_of, served

from fastattn.models import gpt, gpt2
from fastattn.training import checkpoint, run, tokenizers, train_config, trainer
from fastattn.training.data import tagged_text, text_pairs
from fastattn.training.data import text as text_data
from fastattn.training.tasks import kinds, masking, translation

ROWS = rows_of(__file__)
TEXT = "the cat sat on the mat, the rat ate the cat\n" * 20
BPE = tokenizers.train_tokenizer("bpe", TEXT, vocab_size=280)
LETTERS = tokenizers.CharacterTokenizer("abc")
PIECES = tokenizers.train_tokenizer("wordpiece", TEXT, vocab_size=60, special=True)
WORDS = tokenizers.train_tokenizer("word", "one two three eins zwei drei")
GPT2 = gpt2.config_to_hf(gpt.GPTConfig(10, num_heads=2))


def exported(**change: Any) -> Any:
    return gpt2.config_to_hf(gpt.GPTConfig(10, num_heads=2, **change))


def imported(**change: Any) -> Any:
    return gpt2.config_from_hf({**GPT2, **change})


def pairs(*more: text_pairs.Pair, **change: Any) -> Any:
    both = [text_pairs.Pair("one two", "eins zwei", "f:1"), text_pairs.Pair("three", "drei", "f:2")]
    lengths = {"source_length": 4, "target_length": 4}
    return translation.encode_pairs([*both, *more], WORDS, **{**lengths, **change})


MODULES = (
    gpt, gpt2, checkpoint, tokenizers, train_config, tagged_text, text_pairs, text_data,
    kinds, masking, run, trainer, translation,
)  # fmt: skip
NAMES = {name: x for module in MODULES for name, x in vars(module).items()} | globals()
NAMES |= {"Path": Path, "SimpleNamespace": SimpleNamespace}


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str, tmp_path: Path) -> None:
    def file(content: bytes, name: str = "given") -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert served(ROWS[name], {**NAMES, "file": file}) == []


def test_what_the_rows_change_is_served() -> None:
    assert exported() == GPT2 and imported().num_heads == 2 and len(pairs()) == 2
