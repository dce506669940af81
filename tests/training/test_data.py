"""Text files to tokens: reading, splitting, batches."""

import pytest
import torch

from fastattn.training.data import text as text_data
from fastattn.training.data.text import (
    DataError,
    TextDataset,
    read_text_files,
    standard_library_text,
)
from fastattn.training.tasks.task import LanguageTask
from fastattn.training.tokenizers import CharacterTokenizer


def test_files_are_joined_in_order(tmp_path):
    for name, content in (("a", b"one"), ("b", b"\xef\xbb\xbftwo\n"), ("c", "drei €".encode())):
        (tmp_path / name).write_bytes(content)
    assert read_text_files([tmp_path / name for name in "abc"]) == "one\ntwo\ndrei €"
    assert read_text_files([tmp_path / "b"]) == "two\n"


def test_dataset_holds_the_text_s_tokens():
    text = "abcdefghij" * 5
    dataset = TextDataset.from_text(text, CharacterTokenizer(text), context_length=8)
    assert dataset.train.tolist() == [i % 10 for i in range(45)]
    assert dataset.validation.tolist() == [i % 10 for i in range(45, 50)]
    other = TextDataset.from_text(text + "a", CharacterTokenizer(text), context_length=8)
    assert dataset.fingerprint != other.fingerprint
    assert TextDataset.from_text("a" * 20, CharacterTokenizer("a"), 17).counts == (18, 2)


def test_random_batches_are_windows_and_their_continuations():
    tokens = torch.arange(50, dtype=torch.int32)
    task = LanguageTask(TextDataset(tokens, tokens[:5] + 50, ""), 7)
    batch = task.draw("train", 200, torch.Generator().manual_seed(0))
    (inputs,), targets = batch.inputs, batch.targets
    assert inputs.shape == targets.shape == (200, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert set(inputs[:, 0].tolist()) == set(range(43))
    assert task.draw("validation", 9, torch.Generator()).targets.tolist() == [[51, 52, 53, 54]] * 9


@pytest.mark.parametrize("length", [2, 7, 8, 9, 30, 36])
def test_evaluation_reads_every_target_once(length):
    tokens = torch.arange(length, dtype=torch.int32)
    batches = list(LanguageTask(TextDataset(-1 - torch.arange(9), tokens, ""), 7).validation(3))
    for batch in batches:
        assert batch.targets.shape[0] <= 3 and batch.targets.shape[1] <= 7
        assert torch.equal(batch.targets, batch.inputs[0] + 1)
    seen = torch.cat([batch.targets.flatten() for batch in batches])
    assert seen.tolist() == list(range(1, length))


def test_standard_library_text_skips_what_it_should(tmp_path, monkeypatch):
    for name, content in {
        "a.py": b"a = 1\n",
        "pkg/b.py": b"b = 2\n",
        "test/c.py": b"c = 3\n",
        "site-packages/d.py": b"d = 4\n",
        "e.py": "e = 'é'\n".encode(),
        "f.txt": b"f\n",
        "g.py": b"#" * 100,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(text_data.sysconfig, "get_path", lambda name: str(tmp_path))
    # In the order of hashes, in which pkg/b.py is before a.py.
    assert standard_library_text(50) == "b = 2\na = 1\n"
    with pytest.raises(DataError, match=r"no Python source in .* --text"):
        standard_library_text(3)
