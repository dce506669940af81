"""Sharded checkpoints that cannot be read or written whole: every rank says so, and why."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import full_disk, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import Checkpoint, CheckpointError
from fastattn.training.sharded import (
    ShardedWriter,
    model_tensors,
    optimizer_tensors,
    restore_sharded,
)
from fastattn.training.storage import shards
from fastattn.training.tokenizers import CharacterTokenizer

# An odd vocabulary and width: some ranks have a smaller part than others, or none.
CONFIG = GPTConfig(vocab_size=7, context_length=6, num_layers=1, num_heads=1, embed_dim=6)


@cache
def four() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


class Sharded:
    """A model over four ranks, with its optimizer."""

    def __init__(self, config: GPTConfig = CONFIG) -> None:
        torch.manual_seed(0)
        self.model = fully_shard(GPT(config), mesh=four())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def step(self) -> None:
        tokens = torch.arange(12).view(2, 6) % 7
        _, loss = self.model(tokens, tokens.flip(1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpoint(self, step: int) -> Checkpoint:
        training = optimizer_tensors(self.model, self.optimizer)
        config = {"kind": "gpt", "model": CONFIG.to_dict()}
        tokenizer = CharacterTokenizer("abcdefg")
        return Checkpoint(step, model_tensors(self.model), training, tokenizer, config, {})


def world(folder: str) -> dict[str, Any]:
    """Everything that this file asserts of a rank, in one start of four processes."""
    found: dict[str, Any] = {}
    for case in (refusals, failures):
        found[case.__name__] = case(Path(folder) / case.__name__)
        dist.barrier()
    return found


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(folder: Path) -> dict[str, str]:
    """Messages about damaged and unsuitable checkpoints, as every rank gives them."""
    split = Sharded()
    split.step()
    path = ShardedWriter(folder).save(split.checkpoint(1))
    found = {"names": message(lambda: ShardedWriter(folder).save(two_of_a_name(split)))}
    wide = Sharded(replace(CONFIG, embed_dim=8))
    before = parts(wide)
    found["wide"] = message(lambda: restore_sharded(folder, wide.model, wide.optimizer))
    found["kept"] = str(all(map(torch.equal, parts(wide), before)) and not wide.optimizer.state)
    few = torch.optim.AdamW(list(split.model.parameters())[:-1], foreach=False)
    found["few"] = message(lambda: restore_sharded(folder, split.model, few))
    found["nothing"] = message(lambda: restore_sharded(folder / "none", split.model))
    shard = path / "shard-00003-model-00002-of-00002.safetensors"
    whole = shard.read_bytes() if dist.get_rank() == 0 else b""
    for name, damage in DAMAGES.items():
        dist.barrier()
        if dist.get_rank() == 0:
            damage(shard)
        dist.barrier()
        found[name] = message(lambda: restore_sharded(path, split.model, split.optimizer))
        dist.barrier()
        if dist.get_rank() == 0:
            shard.write_bytes(whole)
    dist.barrier()
    found["mended"] = message(lambda: restore_sharded(path, split.model, split.optimizer))
    return found


def parts(split: Sharded) -> list[torch.Tensor]:
    """This rank's of the parameters."""
    return [x.to_local().clone() for x in split.model.parameters()]


def two_of_a_name(split: Sharded) -> Checkpoint:
    made = split.checkpoint(2)
    return replace(made, training={**made.training, "norm.weight": torch.ones(2)})


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "changed": change,
}


def failures(folder: Path) -> dict[str, Any]:
    """A full disk on one rank is told on all, and what was there before is kept."""
    split, writer = Sharded(), ShardedWriter(folder)
    split.step()
    writer.save(split.checkpoint(1))
    found: dict[str, Any] = {}
    for name, rank in (("prepare_global_plan", 0), ("write_data", 3), ("finish", 0)):
        with full_disk(shards.ShardWriter, name, rank):
            told = message(lambda: writer.save(split.checkpoint(2)))
        found[name] = told, sorted(path.name for path in folder.iterdir())
        dist.barrier()
    split.step()
    writer.save(split.checkpoint(2))
    kept = (folder / "step-00000002" / "checkpoint.json").stat().st_mtime_ns
    writer.save(split.checkpoint(2))
    again = (folder / "step-00000002" / "checkpoint.json").stat().st_mtime_ns
    found["after"] = sorted(path.name for path in folder.iterdir()), kept == again
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return run_ranks(f"{__file__}:world", 4, folder=str(folder))


def test_all_ranks_refuse_what_one_cannot_read(by_rank: list[dict[str, Any]]) -> None:
    first = by_rank[0]["refusals"]
    assert all(rank["refusals"] == first for rank in by_rank)
    assert first["kept"] == "True" and first["mended"] == "no error"
    for name, part in {
        "names": "ValueError: model and training must differ in names, both have 'norm.weight'",
        "wide": "of another configuration: blocks.0.attention.k_proj.weight has shape (6, 6), "
        "the model needs (8, 8)",
        "few": "of another configuration: optimizer.norm.weight.exp_avg has shape (6,), the "
        "optimizer needs none",
        "nothing": "CheckpointError: there is no checkpoint in",
        "missing": "cannot read",
        "truncated": "shard-00003-model-00002-of-00002.safetensors is truncated or changed: it has",
        "changed": "shard-00003-model-00002-of-00002.safetensors is corrupt: its SHA-256 differs",
    }.items():
        assert part in first[name], name


def test_a_full_disk_of_one_rank_is_told_on_all(by_rank: list[dict[str, Any]]) -> None:
    for found in (rank["failures"] for rank in by_rank):
        for name, rank in (("prepare_global_plan", 0), ("write_data", 3), ("finish", 0)):
            told, left = found[name]
            assert f"step-00000002: rank {rank}: No space left on device; " in told
            assert "step-00000001 is kept" in told and left == ["step-00000001"]
        assert found["after"] == (["step-00000002"], True)
