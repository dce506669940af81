"""Greedy and beam decoding of an encoder-decoder, against all targets there are."""

import itertools
import math

import pytest
import torch
from torch import nn

from fastattn.generation import beam_translate, greedy_translate, translate
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

# Targets of at most three tokens of 1..3, ended by 0; 4 begins them.
V, COUNT, END, BEGIN = 5, 3, 0, 4
SOURCE = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 9, 9, 9, 9], [2, 9, 9, 9, 9, 9]])
LENGTHS = torch.tensor([6, 2, 1])
CALL = {"source_lengths": LENGTHS, "begin": BEGIN, "end": END, "max_length": COUNT}


def make_model(**options) -> Seq2Seq:
    torch.manual_seed(7)
    # Two layers: the second one's keys depend on the source.
    sizes = {"num_layers": 2, "num_heads": 2, "embed_dim": 16}
    model = Seq2Seq(Seq2SeqConfig(10, V, 6, 8, **{**sizes, **options})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


@torch.no_grad()
def log_probabilities(model: Seq2Seq, row: int) -> dict[tuple[int, ...], float]:
    """Log probability of every target of a source, with its end token if any; without a cache."""
    results = {}
    for length in range(1, COUNT + 1):
        targets = [
            tokens
            for tokens in itertools.product(range(V), repeat=length)
            if END not in tokens[:-1] and (tokens[-1] == END or length == COUNT)
        ]
        inputs = torch.tensor([[BEGIN, *tokens[:-1]] for tokens in targets])
        source = SOURCE[row, : LENGTHS[row]].expand(len(targets), -1)
        scores = model(source, inputs)[0].log_softmax(-1).tolist()
        for tokens, rows in zip(targets, scores, strict=True):
            results[tokens] = sum(row[token] for row, token in zip(rows, tokens, strict=True))
    return results


def without_end(tokens: tuple[int, ...]) -> list[int]:
    return [token for token in tokens if token != END]


@pytest.mark.parametrize("options", [{}, {"positions": "content", "relative_distance": 2}])
def test_wide_beams_find_the_best_of_all_targets(options):
    model = make_model(**options)
    totals = [log_probabilities(model, row) for row in range(3)]
    for penalty in (0.0, 9.0):
        for width in (1, V**2):
            actual = beam_translate(model, SOURCE, beams=width, length_penalty=penalty, **CALL)
            texts = translate(model, SOURCE, beams=width, length_penalty=penalty, **CALL)
            assert texts == [beams[0].tokens for beams in actual]
        for beams, total in zip(actual, totals, strict=True):
            scores = {t: total[t] / ((5 + len(t)) / 6) ** penalty for t in total}
            best = sorted(scores, key=lambda tokens: -scores[tokens])[: len(beams)]
            assert [beam.tokens for beam in beams[:5]] == [without_end(t) for t in best[:5]]
            assert math.isclose(beams[0].score, scores[best[0]], abs_tol=1e-9)
        assert len({beams[0].score for beams in actual}) == 3, "sources that matter"


def test_greedy_takes_the_likeliest_token_of_each_step():
    model = make_model(dropout=0.5)
    expected = []
    for row in range(3):
        tokens = []
        while len(tokens) < COUNT:
            inputs = torch.tensor([[BEGIN, *tokens]])
            with torch.no_grad():
                token = int(model(SOURCE[row : row + 1, : LENGTHS[row]], inputs)[0][0, -1].argmax())
            if token == END:
                break
            tokens.append(token)
        expected.append(tokens)
    model.train()  # as if it were in evaluation mode
    with torch.device("meta"):
        assert greedy_translate(model, SOURCE, **CALL) == expected
    assert translate(model, SOURCE, **CALL) == expected
    assert len({len(tokens) for tokens in expected}) > 1, "a row that ends before others"


def test_target_length_bounds_what_is_chosen():
    model = make_model()
    unknown = {"begin": BEGIN, "end": V - 2}
    with torch.no_grad():
        model.decoder.token_embedding.weight[V - 2] = 0  # never the likeliest
    assert max(map(len, greedy_translate(model, SOURCE, **unknown))) == 8
    assert max(map(len, greedy_translate(model, SOURCE, max_length=2, **unknown))) == 2
