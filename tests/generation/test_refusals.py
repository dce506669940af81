"""Every row of refusals.txt is refused by name, and the call that it changes is served."""

import math
from typing import Any

import pytest
import torch
from engine import Engine
from refusals import rows_of, served
from small_gpt import make_gpt, randomised
from speculative import speculative_tokens

from fastattn.generation import generate, search, translate
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.training.tokenizers import CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

ROWS = rows_of(__file__)
MODEL, PADDED = make_gpt(), torch.tensor([[9, 9, 3, 4], [5, 6, 7, 9]])
PAIR, LOST = (
    randomised(Seq2Seq(Seq2SeqConfig(10, 5, 6, 8, num_layers=1, num_heads=2, embed_dim=16)))
    for _ in range(2)
)
NAN = make_gpt()
NAN.norm.weight.data.fill_(math.nan)
LOST.decoder.norm.weight.data.fill_(math.nan)


def tokens(*given: Any, **change: Any) -> list[int]:
    return list(generate.generate_tokens(MODEL, *(given or ([1], 1)), **change))


def batch(*given: Any, **change: Any) -> list[list[int]]:
    return generate.generate_batch(MODEL, *(given or ([[1]], 1)), **change)


def text(*given: Any, **change: Any) -> list[str]:
    letters = CharacterTokenizer("abcdefghijklmnopqrst")
    return list(generate.generate_text(MODEL, letters, *(given or ("a", 1)), **change))


def engine(**change: Any) -> Engine:
    cache = MODEL.new_paged_cache(4, 2, max_rows=8)
    return Engine(MODEL, cache, **{"max_batch": 8, **change})


def drafted(draft: Any = MODEL, model: Any = MODEL, prompt: Any = (1,), **change: Any) -> list[int]:
    return list(speculative_tokens(model, draft, prompt, 1, **{"widths": (2, 1), **change}))


def translated(source: Any = PADDED[:, :2], model: Any = PAIR, **change: Any) -> Any:
    return translate(model, source, **{"begin": 4, "end": 0, "max_length": 3, **change})


NAMES = vars(generate) | vars(search) | globals()


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    assert served(ROWS[name], NAMES) == []


@pytest.mark.parametrize("name", ["tokens", "batch", "text", "engine", "drafted", "translated"])
def test_what_the_rows_change_is_served(name: str) -> None:
    globals()[name]()
