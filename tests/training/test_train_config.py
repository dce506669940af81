"""`TrainConfig`: its checks, the learning rate at each step, the device; kinds of runs."""

from typing import get_args

import pytest

from fastattn.cli import train as cli_train
from fastattn.models import model_config as model_config
from fastattn.training.tasks.kinds import KINDS
from fastattn.training.train_config import TrainConfig


def test_learning_rate_rises_and_follows_half_a_cosine():
    config = TrainConfig(steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.2)
    rates = [config.learning_rate_at(step) for step in range(111)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.6)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    default = TrainConfig(steps=200, learning_rate=1.0)
    assert default.learning_rate_at(9) < default.learning_rate_at(10) == 1.0
    assert default.learning_rate_at(200) == pytest.approx(0.1)
    assert TrainConfig(steps=1, warmup_steps=1).learning_rate_at(0) > 0


def test_choices_are_those_of_the_models():
    assert set(cli_train.CHOICES) == set(model_config._CHOICES)
    for name, kind in model_config._CHOICES.items():
        assert cli_train.CHOICES[name] == get_args(kind), name
    assert {kind.model for kind in KINDS.values()} == set(cli_train.MODELS)
    assert {kind.task for kind in KINDS.values()} == set(cli_train.TASKS)
