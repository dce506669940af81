"""Prepared text: each rank reads the rows of its own part of a batch, and no others."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.data.prepare import prepare
from fastattn.training.data.prepared import PreparedText
from fastattn.training.distributed import batches, together
from fastattn.training.distributed.degrees import Split
from fastattn.training.distributed.ranks import Ranks
from fastattn.training.distributed.together import Together
from fastattn.training.tasks.task import Batch, LanguageTask
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SPLITS = {"dp2 fsdp2": Split(dp=2, fsdp=2), "fsdp2 cp2": Split(fsdp=2, cp=2)}
ROWS, CONTEXT, STEPS, PASSES = 4, 8, 3, 2


def trained(folder: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train; return the tokens read in a step, the mean losses, and the final draws and counts."""
    read: list[int] = []

    class Counted(PreparedText):
        def windows(self, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            read.append(len(starts) * length)
            return super().windows(starts, length)

    task = LanguageTask(Counted.open(folder), CONTEXT)
    torch.manual_seed(0)
    fields = {"vocab_size": 40, "context_length": CONTEXT, "num_layers": 1, "num_heads": 2}
    model = GPT(GPTConfig(**fields, embed_dim=16, dropout=0.1, positions="rotary"))
    config = TrainConfig(steps=STEPS, batch_size=ROWS, accumulation=PASSES, device="cpu")
    trainer = Trainer(model, task, CharacterTokenizer("ab"), config, folder / "run", ranks=ranks)
    losses = []
    for _ in range(STEPS):
        trainer._train_step()
        losses.append(float(trainer.ranks.total(trainer._loss_sum)))
        trainer._loss_sum.zero_()
    batch = trainer.ranks.draw(task, ROWS, trainer._batches)
    states = trainer._batches.get_state(), torch.get_rng_state()
    return {
        "read": read[:-1],
        "losses": losses,
        "tokens": batch.num_tokens,
        "states": [x.numpy().tobytes() for x in states],
    }


def world(folder: str) -> dict[str, Any]:
    os.environ["FASTATTN_BACKEND"] = "torch"
    results = {name: trained(Path(folder), Together(split)) for name, split in SPLITS.items()}
    results["plans"] = planned(Path(folder))
    return results


def planned(folder: Path) -> list[tuple[Any, Any, bool]]:
    """Record for each pass: documents of this rank's rows and of its plan; whether heads match."""
    given: list[Any] = []

    def plan_rows(*sizes: int, **options: Any) -> Any:
        given.append(options)
        return batches.plan_rows(*sizes, **options)

    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "plan_rows", plan_rows)
        ranks = Together(SPLITS["fsdp2 cp2"])
        draw = ranks.draw
        drawn: list[Batch] = []
        patch.setattr(ranks, "draw", lambda *x: drawn.append(draw(*x)) or drawn[-1])
        trained(folder, ranks)
    for batch, options in zip(drawn, given, strict=False):
        same = options["heads"] == (2, 2) and options["head_dim"] == 8
        rows.append((batch.documents.tolist(), options["documents"].tolist(), same))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of many short documents: of its windows not all have as many targets."""
    actual = tmp_path_factory.mktemp("rows")
    (actual / "text").write_text("\n".join("abcdefghijkl"[: 1 + n % 12] for n in range(60)))
    prepare([actual / "text"], actual / "data", tokenizer="char", documents="line")
    return actual / "data"


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{__file__}:world", 4, folder=str(folder))


def test_plans_are_made_for_the_documents_of_each_batch(by_rank: list) -> None:
    """Which are those of this rank's rows, and so the same on both ranks of cp."""
    for actual in (rank["plans"] for rank in by_rank):
        assert len(actual) >= STEPS * PASSES
        assert all(own == given and same for own, given, same in actual)
        assert len({str(given) for _, given, _ in actual}) > 1
    assert by_rank[0]["plans"] == by_rank[1]["plans"] != by_rank[2]["plans"]


@pytest.mark.parametrize("name", SPLITS)
def test_a_rank_reads_its_own_rows(name: str, folder: Path, by_rank: list) -> None:
    alone = trained(folder)
    whole = ROWS * (CONTEXT + 1)
    assert alone["read"] == [whole] * STEPS * PASSES
    for results in (rank[name] for rank in by_rank):
        assert results["read"] == [whole // SPLITS[name].parts] * STEPS * PASSES
        assert results["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert results["tokens"] == alone["tokens"] == ROWS * CONTEXT
        assert results["states"] == alone["states"]
