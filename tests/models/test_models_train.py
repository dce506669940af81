"""Every option of the models learns: the loss on a small real text falls below a bound."""

import codecs
import contextlib
import importlib
import io

import pytest
import torch
from torch import Tensor, nn

from fastattn.models.encoder import EncoderConfig, MaskedLM, Tagger
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SIZES = {"num_layers": 1, "num_heads": 2, "embed_dim": 32}
LENGTH, BATCH = 16, 16
RELATIVE = {"relative_distance": 8}
OPTIONS = {
    "defaults": {},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "scalar": {"positions": "scalar", **RELATIVE},
    "content": {"positions": "content", **RELATIVE},
    "content-values": {"positions": "content", "relative_values": True, **RELATIVE},
    "transformer-xl": {
        "positions": "transformer_xl",
        "relative_table": "sinusoidal",
        **RELATIVE,
    },
    "no-positions": {"positions": "none"},
    "post": {"block": "post"},
    "parallel": {"block": "parallel"},
    "rmsnorm": {"norm": "rmsnorm"},
    "embedding-norm": {"embedding_norm": True},
    "relu": {"activation": "relu"},
    "gelu-tanh": {"activation": "gelu_tanh"},
    "geglu": {"activation": "geglu"},
    "swiglu": {"activation": "swiglu"},
    "alternate": {"sparse": "alternate", "window": 4, "stride": 4, "num_layers": 2},
    "merge": {"sparse": "merge", "window": 4, "stride": 4},
    "dot": {"scoring": "dot"},
    "multiplicative": {"scoring": "multiplicative"},
    "additive": {"scoring": "additive"},
    "smoothed-dropout": {"label_smoothing": 0.05, "dropout": 0.05, "attention_dropout": 0.05},
    "untied-bias": {"tie_weights": False, "bias": True},
}


@pytest.fixture(scope="module")
def text() -> Tensor:
    """The Zen of Python as ids of its characters."""
    with contextlib.redirect_stdout(io.StringIO()):
        letters = codecs.decode(importlib.import_module("this").s, "rot13")
    known = sorted(set(letters))
    return torch.tensor([known.index(letter) for letter in letters])


def windows(text: Tensor, length: int) -> Tensor:
    """[BATCH, length] pieces from random places."""
    places = torch.randint(len(text) - length, (BATCH, 1))
    return text[places + torch.arange(length)]


def trained(model: nn.Module, draw, steps: int = 40) -> tuple[float, float]:
    """The loss before and after so many steps, each over some batches."""
    for parameter in model.parameters():
        # So narrow a model needs wider weights than GPT-2's to learn in so few steps.
        if parameter.dim() == 2:
            parameter.data *= 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss() -> float:
        model.eval()
        torch.manual_seed(1)
        with torch.no_grad():
            return sum(float(model(*draw())[1]) for _ in range(4)) / 4

    before = loss()
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(*draw())[1].backward()
        optimizer.step()
    return before, loss()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_option_learns_the_next_character(options, text):
    """Frequencies of the characters alone come to a loss of 3.1."""
    V = int(text.max()) + 1
    model = GPT(GPTConfig(V, LENGTH, **{**SIZES, **options}))

    def draw() -> tuple[Tensor, Tensor]:
        piece = windows(text, LENGTH + 1)
        return piece[:, :-1], piece[:, 1:]

    before, after = trained(model, draw)
    assert after < 2.7 < 3.1 < before


@pytest.mark.parametrize("options", [{}, {"block": "post", "positions": "rotary", "bias": True}])
def test_tagger_learns_what_comes_next(options, text):
    """Whether a space is next: the share of spaces alone comes to a loss of 0.46."""
    space = int(text.bincount().argmax())
    model = Tagger(EncoderConfig(int(text.max()) + 1, LENGTH, **SIZES, **options), 2)

    def draw() -> tuple[Tensor, Tensor]:
        piece = windows(text, LENGTH + 1)
        targets = (piece[:, 1:] == space).long()
        targets[:, -1] = -100
        return piece[:, :-1], targets

    before, after = trained(model, draw, steps=80)
    assert after < 0.1 < 0.46 < before


def test_masked_model_learns_what_is_masked(text):
    """Frequencies of the characters alone come to a loss of 3.1."""
    mask = int(text.max()) + 1
    model = MaskedLM(EncoderConfig(mask + 1, LENGTH, **SIZES, positions="rotary"))

    def draw() -> tuple[Tensor, Tensor]:
        piece = windows(text, LENGTH)
        hidden = torch.rand(piece.shape) < 0.15
        return piece.masked_fill(hidden, mask), piece.masked_fill(~hidden, -100)

    before, after = trained(model, draw, steps=250)
    assert after < 2.8 < 3.1 < before


def test_encoder_decoder_learns_to_copy(text):
    """Without the source a character costs 2.4 and more, as the models above find."""
    V = int(text.max()) + 1
    model = Seq2Seq(Seq2SeqConfig(V, V + 1, 6, 6, **SIZES))

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        piece = windows(text, 6)
        begin = torch.full((BATCH, 1), V)
        return piece, torch.cat((begin, piece[:, :-1]), dim=1), piece

    before, after = trained(model, draw, steps=150)
    assert after < 1.0 < 3.1 < before
