"""Batches of token files: documents, ranks, validation, and a run on them."""

import json
import re
from pathlib import Path

import pytest
import torch

from fastattn.training.data.prepare import prepare
from fastattn.training.data.text import DataError
from fastattn.training.run import Options, train
from fastattn.training.tasks.prepared import PreparedTask

pytestmark = pytest.mark.usefixtures("one_thread")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.fixture
def task(tmp_path: Path) -> PreparedTask:
    lines = "".join(f"{'abcdefg'[i % 7] * (1 + i % 5)}\n" for i in range(200))
    path = write(tmp_path / "a", lines)
    return PreparedTask(prepare([path], tmp_path / "o", tokenizer="char", documents="line"), 16)


def test_batches_have_documents(task):
    batch = task.draw("train", 8, torch.Generator().manual_seed(1))
    (inputs,), documents = batch.inputs, batch.documents
    assert inputs.shape == batch.targets.shape == documents.shape == (8, 16)
    assert (documents[:, 0] == 0).all() and documents.max() > 1
    changes = documents.diff()
    assert set(changes.unique().tolist()) == {0, 1}
    # Neighbours are of one letter and of one document, or of two; the line breaks are gone.
    assert torch.equal(inputs.diff() != 0, changes == 1)
    after = torch.cat([changes == 1, batch.targets[:, -1:] == -100], 1)
    assert torch.equal(batch.targets == -100, after)
    assert torch.equal(batch.targets[~after], inputs[~after])


def test_a_rank_reads_its_rows_of_the_same_batch(task):
    """The next batch follows from the generator alone, whatever part of a batch was read."""
    whole, parts = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = task.draw("train", 8, whole)
        part = task.draw("train", 8, parts, rows=slice(2, 4))
        assert torch.equal(part.inputs[0], batch.inputs[0][2:4])
        assert torch.equal(part.targets, batch.targets[2:4])
        assert torch.equal(part.documents, batch.documents[2:4])
        assert whole.get_state().equal(parts.get_state())


def test_validation_has_every_token_once(task):
    tokens = int(re.sub(r".* (\d+) validation .*", r"\1", task.extent))
    batches = list(task.validation(3))
    assert max(len(batch.targets) for batch in batches) == 3
    count = sum(batch.inputs[0].numel() for batch in batches)
    assert count == tokens - 1
    draws = task.draw("validation", 4, torch.Generator().manual_seed(0))
    assert draws.inputs[0].shape == (4, 16)


def test_a_text_that_is_too_short_is_named(tmp_path):
    text = prepare([write(tmp_path / "a", "abcd" * 10)], tmp_path / "o", tokenizer="char")
    with pytest.raises(DataError, match=r"it has 36 tokens for training and 4 for validation.* 41"):
        PreparedTask(text, 40)


def test_a_gpt_is_trained_on_token_files(tmp_path, monkeypatch):
    """And goes on from where it was stopped with the batches that would have followed."""
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    lines = "".join(f"{'abcdefg'[i % 7] * (1 + i % 5)}\n" for i in range(300))
    prepare([write(tmp_path / "a", lines)], tmp_path / "o", tokenizer="char", documents="line")
    sizes = {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "context_length": 16}
    steps = {"steps": 6, "batch_size": 4, "eval_batches": 1, "log_interval": 1, "device": "cpu"}
    options = Options(sizes, steps, {"prepared": str(tmp_path / "o")})
    said: list[str] = []
    whole = train(options, tmp_path / "whole", say=said.append)
    assert any(line.endswith(f"on {tmp_path / 'o'}") for line in said)
    assert any("training and 90 validation tokens of 300 documents" in line for line in said)
    left = iter([False] * 3 + [True] * 9)
    train(options, tmp_path / "parts", should_stop=lambda: next(left))
    resumed = train(Options(), tmp_path / "parts", resume=True)
    assert resumed.validation_loss == whole.validation_loss
    metrics = [
        [json.loads(line)["loss"] for line in path.read_text().splitlines() if '"loss"' in line]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "parts" / "metrics.jsonl")
    ]
    assert len(metrics[0]) == 6 and metrics[0] == metrics[1]
    for data, message in (
        ({"tokenizer": "bpe"}, "prepared data bring their own tokenizer"),
        ({"text": (str(tmp_path / "a"),)}, "prepared data are in place of a text"),
    ):
        wrong = Options(sizes, steps, {"prepared": str(tmp_path / "o"), **data})
        with pytest.raises(ValueError, match=message):
            train(wrong, tmp_path / "wrong")
    with pytest.raises(ValueError, match="prepared is no option of task masked"):
        train(Options(data={"prepared": "x"}, kind="masked"), tmp_path / "wrong")
