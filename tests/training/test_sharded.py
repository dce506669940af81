"""Sharded checkpoints: saved at one split, read at another, and refused by all ranks or by none."""

import json
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import full_disk, run_ranks
from nightly import gate_cases
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fastattn.cli.main import main
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from fastattn.training.sharded import (
    ShardedWriter,
    ShardWriter,
    model_tensors,
    optimizer_tensors,
    restore_sharded,
)
from fastattn.training.tokenizers import CharacterTokenizer

# An odd vocabulary and width: some ranks have a smaller part than others, or none.
CONFIG = GPTConfig(vocab_size=7, context_length=6, num_layers=1, num_heads=1, embed_dim=6)
# Degrees of (dp, fsdp, tp). Context parallelism holds parameters as dp does.
SPLITS = dict(
    gate_cases(
        {
            "one": (1, 1, 1), "fsdp4": (1, 4, 1), "tp4": (1, 1, 4), "dp2-fsdp2": (2, 2, 1),
            "fsdp2-tp2": (1, 2, 2),
        }.items(),
        {
            "dp2": (2, 1, 1), "fsdp2": (1, 2, 1), "tp2": (1, 1, 2), "dp4": (4, 1, 1),
            "dp2-tp2": (2, 1, 2),
        }.items(),
    )
)  # fmt: skip


@lru_cache
def mesh_of(name: str) -> tuple[DeviceMesh, Any]:
    """A split's mesh over the first ranks, and a group of them. All ranks call it."""
    ranks = torch.arange(math.prod(SPLITS[name])).view(SPLITS[name])
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "fsdp", "tp"))
    return mesh, dist.new_group(ranks.flatten().tolist())


class Split:
    """A model with its optimizer on a split's ranks."""

    def __init__(self, name: str, seed: int = 0, config: GPTConfig = CONFIG) -> None:
        mesh, self.group = mesh_of(name)
        torch.manual_seed(seed)
        self.model = GPT(config)
        dp, fsdp, tp = SPLITS[name]
        if tp > 1:
            for block in self.model.blocks:
                plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
                parallelize_module(block.mlp, mesh["tp"], plan)
        if fsdp > 1:
            shards = mesh["dp", "fsdp"] if dp > 1 else mesh["fsdp"]
            for block in self.model.blocks:
                fully_shard(block, mesh=shards)
            fully_shard(self.model, mesh=shards)
        # One parameter at a time: some are DTensors and some are not.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def loss(self) -> torch.Tensor:
        """Loss of a batch that all ranks share."""
        tokens = torch.arange(12).view(2, 6) % 7
        _, loss = self.model(tokens, tokens.flip(1))
        return loss

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(
            step=step,
            model=model_tensors(self.model),
            training={
                **optimizer_tensors(self.model, self.optimizer),
                "random": torch.arange(5, dtype=torch.uint8),
                "loss_sum": torch.tensor(2.5),
            },
            tokenizer=CharacterTokenizer("abcdefg"),
            config={"kind": "gpt", "model": CONFIG.to_dict()},
            state={"finished": False},
        )

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors of model and optimizer, put together."""
        actual = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return {
            name: (x.full_tensor() if isinstance(x, DTensor) else x).clone()
            for name, x in actual.items()
        }


def world(folder: str) -> dict[str, Any]:
    """Everything that this file asserts of a rank, in one start of four processes."""
    results: dict[str, Any] = {}
    for case in (matrix, background, one_file, refusals, failures):
        results[case.__name__] = case(Path(folder) / case.__name__)
        dist.barrier()
    return results


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[x], second[x]) for x in first)


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def matrix(folder: Path) -> dict[str, dict[str, Any]]:
    """For each split whether others went on from what it saved, and the losses that follow."""
    names, splits, saved = list(SPLITS), {}, {}
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        member = dist.get_rank() < math.prod(SPLITS[name])
        mesh_of(name)
        if member:
            splits[name] = split = Split(name)
            split.step(), split.step()
            saved[name] = split.whole()
            ShardedWriter(folder / name, group=split.group).save(split.checkpoint(2))
            results[name]["next"] = True, split.loss().item()
    dist.barrier()
    for i, other in enumerate(names):
        # Every split reads what two others have saved, each time different ones.
        for name in (names[(i + shift) % len(names)] for shift in (1, 3)):
            if other not in splits:
                continue
            resumed = Split(other, seed=1)
            path = folder / name
            read = restore_sharded(path, resumed.model, resumed.optimizer, group=resumed.group)
            assert read.step == 2 and read.training["loss_sum"] == 2.5
            assert torch.equal(read.training["random"], torch.arange(5, dtype=torch.uint8))
            whole = resumed.whole()
            equal = name not in saved or same(whole, saved[name])
            results[name][other] = equal, resumed.loss().item()
    return results


def background(folder: Path) -> dict[str, Any]:
    """A save in the background keeps the values it was given, and its error is not lost."""
    split, writer = Split("fsdp4"), ShardedWriter(folder, background=True)
    # Before its first step an optimizer has no state, and neither saving nor reading makes one.
    writer.save(split.checkpoint(0))
    writer.wait()
    resumed = Split("fsdp2-tp2", seed=1)
    restore_sharded(folder, resumed.model, resumed.optimizer)
    assert not split.optimizer.state and not resumed.optimizer.state
    assert same(split.whole(), resumed.whole())
    split.step()
    writer.save(split.checkpoint(1))
    split.step()
    wanted, stepped = split.whole(), threading.Event()
    write = ShardWriter.write_data

    def late(*arguments: Any) -> Any:
        assert stepped.wait(60)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write_data", late)
        path = writer.save(split.checkpoint(2))
        before = [x.name for x in folder.iterdir() if not x.name.startswith(".")]
        split.step()
        stepped.set()
        writer.wait()
    results = {"before": before, "after": [x.name for x in path.parent.iterdir()]}
    read = Split("tp4", seed=1)
    restore_sharded(folder, read.model, read.optimizer)
    results["values"] = same(read.whole(), wanted)
    dist.barrier()
    with full_disk(ShardWriter, "write_data", 2):
        writer.save(split.checkpoint(3))
        results["later"] = message(writer.wait), message(writer.wait)
        writer.save(split.checkpoint(4))
        results["next save"] = message(lambda: writer.save(split.checkpoint(5)))
    return results


def one_file(folder: Path) -> dict[str, bool]:
    """A checkpoint of one file is read by ranks, and written by them."""
    split = Split("one", seed=3)
    split.step()
    if dist.get_rank() == 0:
        save_checkpoint(folder / "one", split.checkpoint(1))
    dist.barrier()
    resumed = Split("dp2-fsdp2", seed=1)
    restore_sharded(folder / "one", resumed.model, resumed.optimizer)
    ShardedWriter(folder / "four").save(load_checkpoint(folder / "one"))
    again = Split("fsdp2-tp2", seed=1)
    restore_sharded(folder / "four", again.model, again.optimizer)
    model_alone = Split("tp4", seed=1)
    restore_sharded(folder / "four", model_alone.model)
    return {
        "read": same(resumed.whole(), split.whole()),
        "written": same(again.whole(), split.whole()),
        "model alone": not model_alone.optimizer.state
        and torch.equal(model_alone.whole()["norm.weight"], split.whole()["norm.weight"]),
    }


def refusals(folder: Path) -> dict[str, str]:
    """Messages about damaged and unsuitable checkpoints, as every rank gives them."""
    split = Split("fsdp4")
    split.step()
    made = split.checkpoint(1)
    path = ShardedWriter(folder).save(made)
    twice = replace(made, step=2, training={**made.training, "norm.weight": torch.ones(2)})
    results = {"names": message(lambda: ShardedWriter(folder).save(twice))}
    wide = Split("fsdp4", config=replace(CONFIG, embed_dim=8))
    before = wide.whole()
    results["wide"] = message(lambda: restore_sharded(folder, wide.model, wide.optimizer))
    results["kept"] = str(same(wide.whole(), before) and not wide.optimizer.state)
    few = torch.optim.AdamW(list(split.model.parameters())[:-1], foreach=False)
    results["few"] = message(lambda: restore_sharded(folder, split.model, few))
    results["nothing"] = message(lambda: restore_sharded(folder / "none", split.model))
    shard = path / "shard-00003-model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    for name, content in {"missing": None, "truncated": whole[:-5], "changed": changed}.items():
        dist.barrier()
        if dist.get_rank() == 0:
            shard.unlink() if content is None else shard.write_bytes(content)
        dist.barrier()
        results[name] = message(lambda: restore_sharded(path, split.model, split.optimizer))
        dist.barrier()
        if dist.get_rank() == 0:
            shard.write_bytes(whole)
    dist.barrier()
    results["mended"] = message(lambda: restore_sharded(path, split.model, split.optimizer))
    return results


FULL = {"prepare_global_plan": 0, "write_data": 3, "finish": 0}


def failures(folder: Path) -> dict[str, Any]:
    """A full disk on one rank is told on all, and what was there before is kept."""
    split, writer = Split("fsdp4"), ShardedWriter(folder)
    split.step()
    writer.save(split.checkpoint(1))
    results: dict[str, Any] = {}
    for name, rank in FULL.items():
        with full_disk(ShardWriter, name, rank):
            told = message(lambda: writer.save(split.checkpoint(2)))
        results[name] = told, sorted(path.name for path in folder.iterdir())
        dist.barrier()
    split.step()
    writer.save(split.checkpoint(2))
    told = message(lambda: writer.save(split.checkpoint(2)))
    again = "holds step-00000002 already" in told
    results["after"] = sorted(path.name for path in folder.iterdir()), again
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{__file__}:world", 4, folder=str(folder))


def test_every_split_resumes_from_others(by_rank: list[dict[str, Any]]) -> None:
    results = by_rank[0]["matrix"]
    _, wanted = results["one"]["next"]
    for name, by_split in results.items():
        assert len(by_split) == 3
        for other, (_, loss) in by_split.items():
            assert math.isclose(loss, wanted, rel_tol=1e-5), (name, other)
    for rank in by_rank:
        for by_split in rank["matrix"].values():
            assert all(equal for equal, _ in by_split.values())


def test_a_background_save_keeps_what_it_was_given(by_rank: list[dict[str, Any]]) -> None:
    for results in (rank["background"] for rank in by_rank):
        assert results["before"] == ["step-00000001"] and results["after"] == ["step-00000002"]
        assert results["values"]
        told, again = results["later"]
        assert "rank 2: No space left on device" in told and "step-00000002 is kept" in told
        assert again == "no error"
        assert "cannot write checkpoint" in results["next save"]
        assert "step-00000004: rank 2: No space" in results["next save"]


def test_one_file_and_shards_are_the_same(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["one_file"] == dict.fromkeys(("read", "written", "model alone"), True)


def test_one_process_reads_what_ranks_have_written(
    by_rank: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    """Whole, by its shapes alone, as a model that generates, and as one file."""
    path = folder / "matrix" / "fsdp2-tp2"
    whole, shapes = (load_checkpoint(path, device=device) for device in ("cpu", "meta"))
    other = load_checkpoint(folder / "matrix" / "fsdp4")
    for part in ("model", "training"):
        mine, meta, theirs = (getattr(x, part) for x in (whole, shapes, other))
        assert mine.keys() == meta.keys() == theirs.keys()
        for name, x in mine.items():
            assert meta[name].is_meta
            assert (meta[name].shape, meta[name].dtype) == (x.shape, x.dtype)
            torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5)
    gather = ["gather", "--checkpoint", str(path), "--out", str(tmp_path / "one")]
    assert main(gather) == 0 and main(gather) == 1
    assert (tmp_path / "one" / "step-00000002" / "model.safetensors").exists()
    one = load_checkpoint(tmp_path / "one")
    assert same(one.model | one.training, whole.model | whole.training)
    model, tokenizer = load_model(path)
    assert model.config == CONFIG and tokenizer.vocab_size == 7
    assert all(torch.equal(x, whole.model[name]) for name, x in model.state_dict().items())


def test_a_part_that_is_not_there_is_missed(
    by_rank: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    """Also where the manifest does not name it."""
    shutil.copytree(folder / "matrix" / "fsdp4", tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run")
    fields = json.loads((path / "checkpoint.json").read_text())
    del fields["files"]["shard-00002-model-00001-of-00002.safetensors"]
    (path / "checkpoint.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"is incomplete: it has .* values of "):
        load_checkpoint(path, training=False)
    fields["files"]["../x.safetensors"] = fields["files"]["tokenizer.json"]
    (path / "checkpoint.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"names '\.\./x\.safetensors', which is no file"):
        load_checkpoint(path, training=False)


def test_all_ranks_refuse_what_one_cannot_read(by_rank: list[dict[str, Any]]) -> None:
    first = by_rank[0]["refusals"]
    assert all(rank["refusals"] == first for rank in by_rank)
    assert first["kept"] == "True" and first["mended"] == "no error"
    shard = "shard-00003-model-00002-of-00002.safetensors"
    for name, part in {
        "names": "ValueError: model and training must differ in names, both have 'norm.weight'",
        "wide": "of another configuration: blocks.0.attention.k_proj.weight has shape (6, 6), "
        "the model needs (8, 8)",
        "few": "of another configuration: optimizer.norm.weight.exp_avg has shape (6,), the "
        "optimizer needs none",
        "nothing": "CheckpointError: there is no checkpoint in",
        "missing": "cannot read",
        "truncated": f"{shard} is truncated or changed: it has",
        "changed": f"{shard} is corrupt: its SHA-256 differs",
    }.items():
        assert part in first[name], name


def test_a_full_disk_of_one_rank_is_told_on_all(by_rank: list[dict[str, Any]]) -> None:
    for results in (rank["failures"] for rank in by_rank):
        for name, rank in FULL.items():
            told, left = results[name]
            assert f"step-00000002: rank {rank}: No space left on device; " in told
            assert "step-00000001 is kept" in told and left == ["step-00000001"]
        assert results["after"] == (["step-00000002"], True)
