"""Every row of refusals.txt is refused by name."""

from typing import Any

import pytest
import torch
from refusals import rows_of, served

import fastattn
from fastattn.models import encoder, gpt, layers, sampling, seq2seq, tensor_parallel

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

ROWS = rows_of(__file__)
RELATIVE = {"positions": "content", "relative_values": True}
ADDITIVE = {"scoring": "additive"}
ODD = {"positions": "sinusoidal", "embed_dim": 9, "num_heads": 3}
MERGE = {"sparse": "merge", "window": 3}
SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "embed_dim": 32}
SMALL, ROWS_OF_5 = encoder.EncoderConfig(11, 9, **SIZES), torch.zeros(2, 5, dtype=torch.long)
ENCODER, DECODER = encoder.Encoder(SMALL), gpt.GPT(gpt.GPTConfig(11, 10, **SIZES))
PAIR = seq2seq.Seq2Seq(seq2seq.Seq2SeqConfig(11, 13, 9, 10, **SIZES))


def latent(**change: Any) -> gpt.GPTConfig:
    return gpt.GPTConfig(**{"vocab_size": 31, "kv_latent_dim": 16, **SIZES, **change})


LATENT = gpt.GPT(latent())
NAMES = vars(fastattn) | vars(encoder) | vars(gpt) | vars(seq2seq) | vars(sampling)
NAMES |= vars(tensor_parallel) | vars(layers) | globals()


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_refused(name: str) -> None:
    assert served(ROWS[name], {**NAMES, "MEMORY": PAIR.encode(ROWS_OF_5)}) == []
