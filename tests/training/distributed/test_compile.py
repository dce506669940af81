"""Layers that are compiled under FSDP and data parallelism train as those that are not."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.data.text import TextDataset
from fastattn.training.distributed.degrees import Split
from fastattn.training.distributed.ranks import Ranks
from fastattn.training.distributed.together import Together
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12
SPLITS = {"dp2": Split(dp=2), "fsdp2": Split(fsdp=2)}
STEPS = 2


def losses(out: Path, ranks: Ranks | None = None, compiled: bool = False) -> list[float]:
    """Losses of a run's steps, and of an evaluation after each."""
    tokenizer = CharacterTokenizer(TEXT)
    torch.manual_seed(0)
    fields = {"context_length": 16, "num_layers": 1, "num_heads": 2, "embed_dim": 16}
    model = GPT(GPTConfig(tokenizer.vocab_size, **fields, dropout=0.1))
    data = TextDataset.from_text(TEXT, tokenizer, 16)
    config = TrainConfig(steps=STEPS, batch_size=4, eval_batches=1, device="cpu", compile=compiled)
    trainer = Trainer(model, data, tokenizer, config, out, ranks=ranks)
    found = []
    for _ in range(STEPS):
        trainer._train_step()
        found += [float(trainer.ranks.total(trainer._loss_sum)), trainer.estimate_loss()]
        trainer._loss_sum.zero_()
    return found


def world(folder: str) -> dict[str, tuple[list[float], int]]:
    """Losses of the splits, and how many graphs were compiled."""
    os.environ["FASTATTN_BACKEND"] = "torch"
    graphs = []

    def traced(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # That layers can be traced is ours; the code that is made of it is torch's, and slow.
        patch.setattr(torch, "compile", partial(torch.compile, backend=traced))
        for name, split in SPLITS.items():
            torch.compiler.reset()
            graphs.clear()
            found[name] = losses(Path(folder), Together(split), compiled=True), len(graphs)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[list[float], int]]]:
    return run_ranks(f"{__file__}:world", 2, folder=str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", SPLITS)
def test_compiled_layers_train_as_others(name: str, tmp_path: Path, by_rank: list) -> None:
    alone = losses(tmp_path)
    for found, graphs in (rank[name] for rank in by_rank):
        assert found == pytest.approx(alone, abs=1e-4)
        assert graphs > 0
