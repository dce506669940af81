"""Options of `fastattn train` are fields of configurations."""

from fastattn.cli import train as cli_train
from fastattn.training.tasks.kinds import KINDS


def test_the_commands_options_are_fields_of_a_model():
    kinds = KINDS.values()
    fields = {"preset"}.union(*(kind.config.__dataclass_fields__ for kind in kinds))
    assert {field for field, _ in cli_train._MODEL.values()} <= fields
    assert {kind.model for kind in kinds} == set(cli_train.MODELS)
    assert {kind.task for kind in kinds} == set(cli_train.TASKS)
