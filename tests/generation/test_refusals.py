"""Every row of refusals.txt is refused by name, and the call that it changes is served."""

import math
from typing import Any

import pytest
import torch
from refusals import rows_of, served
from small_gpt import make_gpt, randomised

from fastattn.generation import Engine, generate, search, speculative, translate
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.training.tokenizers import CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

ROWS = rows_of(__file__)
MODEL, PADDED = make_gpt(), torch.tensor([[9, 9, 3, 4], [5, 6, 7, 9]])
PAIR, LOST = (
    randomised(Seq2Seq(Seq2SeqConfig(10, 5, 6, 8, num_layers=1, num_heads=2, embed_dim=16)))
    for _ in range(2)
)
LOST.decoder.norm.weight.data.fill_(math.nan)


def tokens(*given: Any, **change: Any) -> list[int]:
    return list(generate.generate_tokens(MODEL, *(given or ([1], 1)), **change))


def batch(*given: Any, **change: Any) -> list[list[int]]:
    return generate.generate_batch(MODEL, *(given or ([[1]], 1)), **change)


def text(*given: Any, **change: Any) -> list[str]:
    letters = CharacterTokenizer("abcdefghijklmnopqrst")
    return list(generate.generate_text(MODEL, letters, *(given or ("a", 1)), **change))


def engine(**change: Any) -> Engine:
    return Engine(MODEL, num_pages=4, **change)


def drafted(draft: Any = MODEL, model: Any = MODEL, **change: Any) -> list[int]:
    return list(speculative.speculative_tokens(model, draft, [1], 1, **change))


def translated(source: Any = PADDED[:, :2], model: Any = PAIR, **change: Any) -> Any:
    return translate(model, source, **{"begin": 4, "end": 0, "max_length": 3, **change})


NAMES = vars(generate) | vars(search) | globals()


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    assert served(ROWS[name], NAMES) == []


@pytest.mark.parametrize("name", ["tokens", "batch", "text", "engine", "drafted", "translated"])
def test_what_the_rows_change_is_served(name: str) -> None:
    globals()[name]()
