"""Masked-token pre-training: how tokens are chosen and what becomes of them."""

import pytest
import torch

from fastattn.training.data.text import TextDataset
from fastattn.training.tasks.masking import MaskedTask, mask_tokens
from fastattn.training.tokenizers import train_tokenizer

TEXT = "abcdefghij" * 60
TOKENIZER = train_tokenizer("char", TEXT, special=True)


def make_task(context_length=16) -> MaskedTask:
    dataset = TextDataset.from_text(TEXT, TOKENIZER, context_length)
    return MaskedTask(dataset, TOKENIZER, context_length)


def test_the_shares_are_those_of_bert():
    tokens = torch.randint(5, 105, (400, 100), generator=torch.Generator().manual_seed(0))
    replacements = torch.arange(1000, 2000)
    inputs, targets = mask_tokens(
        tokens, mask=4, replacements=replacements, generator=torch.Generator().manual_seed(1)
    )
    chosen = targets != -100
    assert chosen.sum(1).tolist() == [15] * 400
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    masked, drawn = inputs[chosen] == 4, inputs[chosen] >= 1000
    kept = inputs[chosen] == tokens[chosen]
    assert torch.equal(masked.int() + drawn.int() + kept.int(), torch.ones(6000, dtype=torch.int))
    # Three standard deviations of 6000 draws.
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.016)
    assert float(drawn.float().mean()) == pytest.approx(0.1, abs=0.012)
    # Every place is as likely as any other: 60 of 400 rows, five standard deviations.
    assert (chosen.sum(0) - 60).abs().max() < 5 * (400 * 0.15 * 0.85) ** 0.5


def test_random_tokens_are_no_special_ones():
    task = make_task()
    assert task._replacements.tolist() == list(range(5, TOKENIZER.vocab_size))


def test_validation_is_masked_the_same_way_and_training_is_not():
    task = make_task(29)  # the last window has one target
    first, again = (list(task.validation(2)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.targets, other.targets)
    generator = torch.Generator().manual_seed(0)
    one, other = (task.draw("train", 4, generator) for _ in range(2))
    assert one.inputs[0].shape == (4, 29)
    assert not torch.equal(one.targets != -100, other.targets != -100)
    assert all((batch.targets != -100).any(1).all() for batch in (one, other, *first))
    assert task.extent == "540 training and 60 validation tokens"
