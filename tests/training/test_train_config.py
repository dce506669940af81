"""`TrainConfig`: its checks, the learning rate at each step, the device; kinds of runs."""

import pytest

from fastattn.cli import train as cli_train
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


def test_the_commands_options_are_fields_of_a_model():
    kinds = KINDS.values()
    fields = {"preset"}.union(*(kind.config.__dataclass_fields__ for kind in kinds))
    assert {field for field, _ in cli_train._MODEL.values()} <= fields
    assert {kind.model for kind in kinds} == set(cli_train.MODELS)
    assert {kind.task for kind in kinds} == set(cli_train.TASKS)
