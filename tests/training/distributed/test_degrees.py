"""Degrees make a split of the ranks that there are, or one line says why not."""

import dataclasses

import pytest
import torch

from fastattn.training.distributed.degrees import Degrees, Split, SplitError
from fastattn.training.distributed.ranks import Ranks
from fastattn.training.run import Options, ranks_for, train


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
    with pytest.raises(SplitError, match="multiply to the 1 rank") as error:
        train(dataclasses.replace(options, parallel={"fsdp": 2}), tmp_path / "other")
    assert error.value.exit_status == 2 and not (tmp_path / "other").exists()
