"""Degrees make a split of the ranks that there are, or one line says why not."""

import dataclasses

import pytest
import torch

from fastattn.models.encoder import EncoderConfig
from fastattn.models.gpt import GPTConfig
from fastattn.training.distributed.degrees import Degrees, Split, SplitError, check_split
from fastattn.training.distributed.ranks import Ranks
from fastattn.training.run import Options, ranks_for, train
from fastattn.training.tasks.kinds import KINDS
from fastattn.training.train_config import TrainConfig


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Split(dp=8)),
        ({"fsdp": "auto"}, Split(fsdp=8)),
        ({"fsdp": 2}, Split(dp=4, fsdp=2)),
        ({"data_parallel": 2, "fsdp": "auto"}, Split(dp=2, fsdp=4)),
        ({"context_parallel": 2, "tensor_parallel": 2}, Split(dp=2, cp=2, tp=2)),
        ({"fsdp": "auto", "context_parallel": 4}, Split(fsdp=2, cp=4)),
    ],
)
def test_eight_ranks_are_split(asked, expected):
    assert Degrees(**asked).split(8) == expected


@pytest.mark.parametrize(
    ("asked", "ranks", "message"),
    [
        ({"data_parallel": 3}, 8, "multiply to the 8 ranks that there are, got data_parallel 3 x"),
        ({"context_parallel": 3}, 8, "got data_parallel auto x fsdp 1 x context_parallel 3"),
        ({"tensor_parallel": 16, "fsdp": "auto"}, 8, "multiply to the 8 ranks"),
        ({"fsdp": 2}, 1, "the 1 rank that there is, .*: torchrun --nproc-per-node N -m fastattn"),
        ({"fsdp": 0}, 8, "fsdp must be at least 1 or auto, got 0"),
        ({"context_parallel": "auto"}, 8, "context_parallel must be at least 1, got auto"),
        ({"timeout": 0.0}, 8, "timeout must be positive and finite, got 0"),
    ],
)
def test_degrees_that_make_no_split_are_named(asked, ranks, message):
    with pytest.raises(SplitError, match=message) as error:
        Degrees(**asked).split(ranks)
    assert error.value.exit_status == 2


GPT = {"vocab_size": 9, "context_length": 64}
VALUES = {"relative_values": True, "positions": "content"}


@pytest.mark.parametrize(
    ("split", "changes", "kind", "message"),
    [
        (Split(dp=2, fsdp=4), {}, "gpt", "batch_size must be divisible by the 8 ranks .* got 12"),
        (Split(dp=2), {"dtype": "float16"}, "gpt", "dtype must be .* on several ranks"),
        (Split(cp=2), {"compile": True}, "gpt", "compile must be False with context_parallel=2"),
        (Split(cp=3), {}, "gpt", "context_length must be divisible by context_parallel=3, got 64"),
        (Split(cp=2), {}, "tagger", "context_parallel must be 1 for a tagger"),
        (Split(cp=2), {"scoring": "additive"}, "gpt", "1 with scoring='additive', got 2"),
        (Split(cp=2), VALUES, "gpt", "1 with relative_values=True"),
    ],
)
def test_what_does_not_divide_is_named(split, changes, kind, message):
    names = ("dtype", "compile")
    of_training = {name: x for name, x in changes.items() if name in names}
    fields = GPT | {name: x for name, x in changes.items() if name not in names}
    config = GPTConfig(**fields) if kind == "gpt" else EncoderConfig(**fields)
    with pytest.raises(SplitError, match=message):
        check_split(split, TrainConfig(**of_training), config, KINDS[kind])
    check_split(Split(), TrainConfig(**of_training), config, KINDS[kind])


def test_one_process_is_alone_under_torchrun_too(monkeypatch, tmp_path):
    """There is no process group: a collective would raise."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    (tmp_path / "text").write_text("the quick brown fox\n" * 40)
    options = Options(
        model={"num_layers": 1, "num_heads": 2, "embed_dim": 16, "context_length": 8},
        training={"steps": 2, "device": "cpu"},
        data={"text": (str(tmp_path / "text"),)},
    )
    assert train(options, tmp_path / "run").finished
    assert not torch.distributed.is_initialized()
    with ranks_for(Degrees()) as ranks:
        assert type(ranks) is Ranks
    with pytest.raises(SplitError, match="multiply to the 1 rank"):
        train(dataclasses.replace(options, parallel={"fsdp": 2}), tmp_path / "other")
    assert not (tmp_path / "other").exists()
