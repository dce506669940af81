"""Kinds of runs: found by model and task, and named alike by the CLI and the models."""

from types import SimpleNamespace
from typing import get_args

import pytest

from fastattn.cli import train as cli_train
from fastattn.models import model_config as model_config
from fastattn.training.checkpoint import CheckpointError, kind_of
from fastattn.training.tasks.kinds import KINDS, find_kind


def test_choices_are_those_of_the_models():
    assert set(cli_train.CHOICES) == set(model_config._CHOICES)
    for name, kind in model_config._CHOICES.items():
        assert cli_train.CHOICES[name] == get_args(kind), name
    assert {kind.model for kind in KINDS.values()} == set(cli_train.MODELS)
    assert {kind.task for kind in KINDS.values()} == set(cli_train.TASKS)


def test_kinds_are_found_by_model_and_task():
    assert find_kind().name == "gpt"
    assert find_kind("encoder").name == "tagger"
    assert find_kind(task="masked").name == "masked"
    assert find_kind("seq2seq", "translation").name == "seq2seq"
    with pytest.raises(ValueError, match="model must be one of gpt, encoder, seq2seq, got 'rnn'"):
        find_kind("rnn")
    with pytest.raises(ValueError, match=r"task must be one of language, tagging, .* got 'none'"):
        find_kind(task="none")


def test_a_checkpoint_that_names_no_kind_is_a_gpt():
    assert kind_of(SimpleNamespace(config={})).name == "gpt"
    with pytest.raises(CheckpointError, match="x is of kind 'rnn', this fastattn has gpt, tagger"):
        kind_of(SimpleNamespace(config={"kind": "rnn"}, source="x"))
