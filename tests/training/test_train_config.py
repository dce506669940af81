"""Options of `fastattn train` are fields of configurations."""

import dataclasses

import pytest

from fastattn.cli import train as cli_train
from fastattn.cli.main import build_parser
from fastattn.training.tasks.kinds import KINDS
from fastattn.training.train_config import DataConfig, TrainConfig


def test_the_commands_options_are_fields_of_a_model():
    kinds = KINDS.values()
    fields = {"preset"}.union(*(kind.config.__dataclass_fields__ for kind in kinds))
    assert {field for field, _ in cli_train._MODEL.values()} <= fields
    assert {kind.model for kind in kinds} == set(cli_train.MODELS)
    assert {kind.task for kind in kinds} == set(cli_train.TASKS)


def test_a_number_that_is_0_is_not_absent():
    """Each option passes 0 on; a configuration keeps it, and refuses it where it may not be."""
    for part, config in (("training", TrainConfig), ("data", DataConfig)):
        for field in dataclasses.fields(config):
            if not str(field.type).startswith(("int", "float")):
                continue
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            chosen = vars(build_parser("train").parse_args(["train", flag, "0"]))
            assert cli_train._options(chosen)[part] == {field.name: 0}, flag
            check = field.metadata["check"]
            if check is None or check[1](0):
                kept = config(**{field.name: 0})
                assert getattr(kept, field.name) == 0
                if part == "training":
                    assert TrainConfig.from_dict(kept.to_dict()) == kept
            else:
                with pytest.raises(ValueError, match=f"{field.name} must be"):
                    config(**{field.name: 0})
