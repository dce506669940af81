"""Token files: what is prepared is read, in flat memory; batches of them, and a run on them."""

import codecs
import json
import re
import resource
from array import array
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from gloo_ranks import run_alone

from fastattn.cli.main import main
from fastattn.training import metrics
from fastattn.training.data import prepare as preparing
from fastattn.training.data import prepared
from fastattn.training.data.prepare import Unit, prepare
from fastattn.training.data.prepared import PreparedText
from fastattn.training.data.text import DataError
from fastattn.training.run import Options, train
from fastattn.training.tasks.task import LanguageTask

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "\none äö\ntwo\n\nthree\n\n\nfour €\n"
DOCUMENTS = {
    "file": [TEXT],
    "line": ["one äö", "two", "three", "four €"],
    "paragraph": ["one äö\ntwo", "three", "four €"],
}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def read(text: PreparedText) -> tuple[list[int], list[int]]:
    """All ids, and the document of each."""
    ids, documents = text.windows(torch.tensor([0]), text.tokens)
    return ids[0].tolist(), documents[0].tolist()


def texts_of(text: PreparedText) -> list[str]:
    ids, numbers = read(text)
    rows: list[list[int]] = [[] for _ in range(text.documents)]
    for token, number in zip(ids, numbers, strict=True):
        rows[number].append(token)
    return list(map(text.tokenizer.decode, rows))


@pytest.mark.parametrize("documents", get_args(Unit))
@pytest.mark.parametrize("part", [1, 3, 5, 1 << 20])
def test_what_is_prepared_is_the_text(documents, part, tmp_path, monkeypatch):
    """However it is cut into parts, in long lines too, and of all files of a folder."""
    monkeypatch.setattr(preparing, "PART", part)
    monkeypatch.setattr(preparing, "BATCH", 3 * part)
    other = "b" + TEXT[1:].replace("\n", "\r\n")
    write(tmp_path / "in" / "a", "\ufeff" + TEXT)
    write(tmp_path / "elsewhere" / "b", other)
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "in" / ".git" / "c", "hidden")
    actual = prepare([tmp_path / "in"], tmp_path / "out", tokenizer="char", documents=documents)
    first = DOCUMENTS[documents]
    wanted = [*first, "b" + first[0], *first[1:]] if documents != "file" else [TEXT, other]
    assert texts_of(actual) == wanted and actual.dtype == "uint16"


def test_an_end_token_follows_each_document(tmp_path, monkeypatch):
    path = write(tmp_path / "a", "some text\nmore text\n" * 30)
    actual = prepare([path], tmp_path / "out", tokenizer="word", documents="line")
    ids, numbers = read(actual)
    end = actual.tokenizer.special_id("end")
    last = [i for i, n in enumerate(numbers) if i + 1 == len(ids) or numbers[i + 1] != n]
    assert [i for i, x in enumerate(ids) if x == end] == last
    assert actual.documents == 60 == ids.count(end)
    assert actual.tokenizer.special_id("unknown") not in ids, "words of two lines are not one"
    monkeypatch.setattr(preparing, "PART", 16)
    path.write_text(long := "more text of one line " * 9)
    actual = prepare([path], tmp_path / "long", tokenizer="word-space")
    assert texts_of(actual) == [long + "[END]"], "no word is cut"


def test_ids_have_the_bits_that_they_need(tmp_path):
    characters = "".join(map(chr, [*range(0x4E00, 0x4E00 + 20_000), *range(0x10000, 0x1C350)]))
    actual = prepare([write(tmp_path / "a", characters)], tmp_path / "out", tokenizer="char")
    assert actual.dtype == "uint32" and actual.tokens == 70_000
    ids, _ = actual.windows(torch.tensor([40_000]), 10)
    assert ids[0].tolist() == list(range(40_000, 40_010))


def used(folder: Path, megabytes: int) -> int:
    """Prepare a text of so many MiB and draw batches of it; the peak of memory so far, in MiB."""
    text, out = folder / f"{megabytes}.txt", folder / str(megabytes)
    with text.open("w") as file:
        for _ in range(megabytes << 14):
            file.write("all work and no play makes a dull boy, they said, and went out.\n")
    task = LanguageTask(prepare([text], out, tokenizer="char", documents="line"), 512)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        task.draw("train", 64, generator)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def memory(folder: str) -> tuple[int, int]:
    used(Path(folder), 3)  # what is allocated once
    return used(Path(folder), 4), used(Path(folder), 14)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """The ids of 10 MiB more are 20 MiB, and far more as Python's numbers."""
    small, large = run_alone(f"{__file__}:memory", folder=str(tmp_path))
    assert large - small < 8


def test_a_folder_is_whole_or_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparing, "BATCH", 64)
    text, out = write(tmp_path / "text", "a line\n" * 5000), tmp_path / "out"
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        assert total == 35_000
        seen.append(done)
        if done == total:
            raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "PART", 64)
    with pytest.raises(KeyboardInterrupt):
        prepare([text], out, tokenizer="char", progress=stop)
    assert seen == sorted(seen) and len(seen) > 1
    assert sorted(tmp_path.iterdir()) == [text]
    with pytest.raises(DataError, match=r"there is no prepared text .* has no prepared\.json"):
        PreparedText.open(out)
    # What a killed call has left is removed, and what another folder's has is not.
    for name in (".out", ".other"):
        write(tmp_path / f"{name}.{'0' * 16}.partial" / "tokens.bin", "half")
    actual = prepare([text], out, tokenizer="char")
    assert read(actual)[0] == actual.tokenizer.encode("a line\n" * 5000)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        f".other.{'0' * 16}.partial",
        "out",
        "text",
    ]
    assert len(list(out.iterdir())) == 4
    command = ["prepare", "--text", str(text), "--tokenizer", "char", "--out"]
    assert main([*command, str(out)]) == 1
    assert "out holds something already: choose another folder" in capsys.readouterr().err

    options = ["--documents", "line"]
    monkeypatch.setattr(metrics, "LINE_INTERVAL", 0.0)
    assert main([*command, str(tmp_path / "lines"), *options]) == 0
    written = capsys.readouterr()
    assert written.out.startswith("30,000 tokens of 5,000 documents in")
    begin = f"tokenizing {text} into {tmp_path / 'lines'}\n"
    assert written.err.startswith(begin) and written.err.endswith("35,000 of 35,000 bytes\n")
    rename = Mock(side_effect=[OSError(28, "No space left"), KeyboardInterrupt])
    monkeypatch.setattr(preparing.os, "rename", rename)
    assert main([*command, str(tmp_path / "next")]) == 1
    assert "next: No space left; nothing is left" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "next")]) == 130
    error = capsys.readouterr().err
    assert (
        "interrupted after 35,000 of 35,000 bytes; nothing is left; run the same command" in error
    )


BROKEN = {
    "fine": b"abc\n",
    "start": codecs.BOM_UTF8 + b"\xe4bc\n",
    "later": b"abc\n" * 5000 + b"a\xff\xfe\n",
    "end": "a\ufffdb".encode() + "€".encode()[:2],
}


def test_files_that_are_not_utf8(tmp_path):
    """An error that names the byte and leaves nothing; or replaced."""
    files = []
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    for file, offset, byte in ((files[1], 3, "e4"), (files[2], 20001, "ff"), (files[3], 5, "e2")):
        message = f"{file} is not UTF-8: byte 0x{byte} at offset {offset}: --errors replace"
        with pytest.raises(DataError, match=message):
            prepare([files[0], file], tmp_path / "out", tokenizer="char")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    actual = prepare(files, tmp_path / "replaced", tokenizer="char", errors="replace")
    assert texts_of(actual) == [x.decode("utf-8-sig", "replace") for x in BROKEN.values()]


@pytest.mark.parametrize(
    ("fields", "places", "message"),
    [
        ({"tokens": 12}, (13,), "tokens.bin is truncated: it has 26 bytes, expected 24"),
        ({"dtype": "int8"}, (13,), "it says 13 tokens of 1 documents in int8"),
        ({"tokens": "many"}, (13,), "tokens must be an integer"),
        ({"vocab_size": 3}, (13,), "tokenizer.json has 5 ids, expected 3"),
        ({"format": "other"}, (13,), "prepared.json is not of format"),
        ({"documents": 3}, (13,), "documents.bin is truncated: it has 8 bytes, expected 24"),
        ({"documents": 3}, (2, 1, 13), "documents.bin is corrupt: the ends of documents do not"),
        ({"documents": 3}, (0, 2, 13), "documents.bin is corrupt: the ends of documents do not"),
        ({"documents": 3}, (2, 4, 14), "documents.bin is corrupt: it ends at 14 of 13"),
    ],
)
def test_a_damaged_folder_is_named(fields, places, message, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_ENDS_AT_ONCE", 1)
    prepare([write(tmp_path / "a", "abcdeabcdeabc")], tmp_path / "out", tokenizer="char")
    path = tmp_path / "out" / "prepared.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (tmp_path / "out" / "documents.bin").write_bytes(array("q", places).tobytes())
    with pytest.raises(DataError, match=f"prepared text .*out: .*{re.escape(message)}"):
        PreparedText.open(tmp_path / "out")


def test_wrong_arguments_are_named(tmp_path):
    text, out = write(tmp_path / "a", "some text\n" * 40), tmp_path / "o"
    write(tmp_path / "none", "\n\n")
    (tmp_path / "empty").mkdir()
    for texts, folder, options, message in (
        ([], out, {}, "texts must name a file, got none"),
        ([tmp_path / "empty"], out, {}, "texts must name a file, got "),
        (
            [text],
            out,
            {"documents": "page"},
            "documents must be 'file', 'line' or 'paragraph'",
        ),
        ([text], out, {"errors": "skip"}, "errors must be 'strict' or 'replace', got 'skip'"),
        ([tmp_path / "b"], out, {}, "cannot read text file"),
        ([text], tmp_path, {}, "holds something already: choose another folder"),
        ([tmp_path / "none"], out, {"documents": "line", "tokenizer": "bpe"}, "the text is empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(texts, folder, **{"tokenizer": "char", **options})
    assert not out.exists()


def test_the_fingerprint_is_of_ids_documents_and_tokenizer(tmp_path):
    """Texts with the same ids by other tokenizers, and the same text in other documents."""
    found = set()
    for text, unit in (("ab\ncd\n", "line"), ("ef\ngh\n", "line"), ("ab\ncd\n", "file")):
        folder = tmp_path / str(len(found))
        made = prepare([write(tmp_path / "a", text)], folder, tokenizer="char", documents=unit)
        found.add(made.fingerprint)
    assert len(found) == 3


@pytest.fixture
def task(tmp_path: Path) -> LanguageTask:
    lines = "".join(f"{'abcdefg'[i % 7] * (1 + i % 5)}\n" for i in range(200))
    path = write(tmp_path / "a", lines)
    return LanguageTask(prepare([path], tmp_path / "o", tokenizer="char", documents="line"), 16)


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


def test_a_text_that_is_too_short_is_named(tmp_path):
    text = prepare([write(tmp_path / "a", "abcd" * 10)], tmp_path / "o", tokenizer="char")
    with pytest.raises(DataError, match=r"it has 36 tokens for training and 4 for validation.* 41"):
        LanguageTask(text, 40)
    assert replace(text, tokens=30_000_000).counts == (29_000_000, 1_000_000)


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
        ({"tokenizer": "bpe"}, "prepared data replace a text and a tokenizer"),
        ({"text": (str(tmp_path / "a"),)}, "prepared data replace a text"),
    ):
        wrong = Options(sizes, steps, {"prepared": str(tmp_path / "o"), **data})
        with pytest.raises(ValueError, match=message):
            train(wrong, tmp_path / "wrong")
    with pytest.raises(ValueError, match="prepared is no option of task masked"):
        train(Options(data={"prepared": "x"}, kind="masked"), tmp_path / "wrong")
