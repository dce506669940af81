"""Token files: what is prepared is read, in flat memory; batches of them, and a run on them."""

import codecs
import json
import os
import re
import resource
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_alone

from fastattn.cli.main import main
from fastattn.files.lock import LOCK, LockedError, locked
from fastattn.training.data import prepare as preparing
from fastattn.training.data import prepared
from fastattn.training.data.prepare import SEPARATORS, prepare
from fastattn.training.data.prepared import PreparedText
from fastattn.training.data.text import DataError
from fastattn.training.run import Options, train
from fastattn.training.tasks.task import LanguageTask

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "one äö\ntwo\n\nthree\n\n\nfour €\n"
DOCUMENTS = {
    "file": [TEXT],
    "line": ["one äö", "two", "three", "four €"],
    "paragraph": ["one äö\ntwo", "three", "four €\n"],
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def read(text: PreparedText) -> tuple[list[int], list[int]]:
    """All ids, and the document of each."""
    ids, documents = text.windows(torch.tensor([0]), text.tokens)
    return ids[0].tolist(), documents[0].tolist()


@pytest.mark.parametrize("documents", SEPARATORS)
@pytest.mark.parametrize("piece", [5, 7, 1 << 20])
def test_what_is_prepared_is_the_text(documents, piece, tmp_path, monkeypatch):
    """However it is cut into pieces, inside characters and line breaks too."""
    monkeypatch.setattr(preparing, "PIECE_BYTES", piece)
    monkeypatch.setattr(preparing, "_BATCH", 3 * piece)
    other = "b" + TEXT.replace("\n", "\r\n")
    files = [write(tmp_path / "a", "\ufeff" + TEXT), write(tmp_path / "b", other)]
    actual = prepare(files, tmp_path / "out", tokenizer="char", documents=documents)
    first = DOCUMENTS[documents]
    wanted = [*first, "b" + first[0], *first[1:]] if documents != "file" else [TEXT, other]
    assert actual.documents == len(wanted) and actual.dtype == "uint16"
    ids, numbers = read(actual)
    texts = [
        actual.tokenizer.decode([x for x, n in zip(ids, numbers, strict=True) if n == i])
        for i in range(len(wanted))
    ]
    assert texts == wanted
    actual.check()


def test_a_long_paragraph_is_cut_between_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "PIECE_BYTES", 16)
    text = "a long line\n" * 5 + "\n" + "another line\n" * 3
    pieces = [x.text for x in preparing.read_pieces(str(write(tmp_path / "a", text)), "\n\n")]
    assert "".join(pieces) == text and len(pieces) > 7
    assert all(a[-1:] == "\n" or b[:1] in ("\n", "") for a, b in pairwise(pieces))


def test_an_end_token_follows_each_document(tmp_path):
    path = write(tmp_path / "a", "some text\nmore text\n" * 30)
    actual = prepare([path], tmp_path / "out", tokenizer="wordpiece", documents="line")
    ids, numbers = read(actual)
    end = actual.tokenizer.special_id("end")
    last = [i for i, n in enumerate(numbers) if i + 1 == len(ids) or numbers[i + 1] != n]
    assert [i for i, x in enumerate(ids) if x == end] == last
    assert actual.documents == 60 == ids.count(end)


@pytest.mark.parametrize(("count", "dtype"), [(40_000, "uint16"), (70_000, "uint32")])
def test_ids_have_the_bits_that_they_need(count, dtype, tmp_path):
    characters = "".join(map(chr, [*range(0x4E00, 0x4E00 + 20_000), *range(0x10000, 0x1C350)]))
    path = write(tmp_path / "a", characters[:count])
    actual = prepare([path], tmp_path / "out", tokenizer="char")
    assert actual.dtype == dtype and actual.tokens == count
    ids, _ = actual.windows(torch.tensor([count - 10]), 10)
    assert ids[0].tolist() == list(range(count - 10, count))


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
    used(Path(folder), 1)  # what is allocated once
    return used(Path(folder), 2), used(Path(folder), 12)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """The ids of 10 MiB more are 20 MiB, and far more as Python's numbers."""
    small, large = run_alone(f"{__file__}:memory", folder=str(tmp_path))
    assert large - small < 8


def test_an_interrupted_call_leaves_nothing_and_a_killed_one_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_BATCH", 64)
    monkeypatch.setattr(preparing, "PIECE_BYTES", 64)
    text, out = write(tmp_path / "text", "a line\n" * 1000), tmp_path / "out"
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        assert total == 7000
        seen.append(done)
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([text], out, tokenizer="char", progress=stop)
    assert seen == sorted(seen) and len(seen) > 1 and not out.exists()
    with pytest.raises(DataError, match=r"there is no prepared text .* has no prepared\.json"):
        PreparedText.open(out)
    out.mkdir()
    partial = f".{prepared.MANIFEST}.{'0' * 16}.partial"
    for name in (prepared.TOKENS, prepared.DOCUMENTS, prepared.TOKENIZER, partial):
        write(out / name, "what a kill has left" * 2000)
    actual = prepare([text], out, tokenizer="char")
    assert read(actual)[0] == actual.tokenizer.encode("a line\n" * 1000)
    # A finished one is left as it is.
    before = (out / "tokens.bin").stat().st_mtime_ns
    assert prepare([text], out, tokenizer="char").fingerprint == actual.fingerprint
    assert (out / "tokens.bin").stat().st_mtime_ns == before
    assert len(list(out.iterdir())) == 4


def test_one_call_at_a_time_writes_a_folder(tmp_path):
    text = write(tmp_path / "a", "some text\n" * 40)
    with (
        locked(tmp_path / "out" / LOCK),
        pytest.raises(LockedError, match=f"out is in use .held by process {os.getpid()} on "),
    ):
        prepare([text], tmp_path / "out", tokenizer="char")
    assert prepare([text], tmp_path / "out", tokenizer="char").tokens == 400


BROKEN = {
    "fine": b"abc\n",
    "start": codecs.BOM_UTF8 + b"\xe4bc\n",
    "later": b"abc\n" * 20 + b"a\xff\xfe\n",
    # Ends within a character; and holds U+FFFD, which is one like any other.
    "end": "a\ufffdb".encode() + "€".encode()[:2],
}


def test_files_that_are_not_utf8(tmp_path, monkeypatch, capsys):
    """An error that leaves nothing; or replaced, or left out, and counted."""
    monkeypatch.setattr(preparing, "PIECE_BYTES", 7)
    files = []
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    for file, offset, byte in ((files[1], 3, "e4"), (files[2], 81, "ff"), (files[3], 5, "e2")):
        message = f"{file} is not UTF-8: byte 0x{byte} at offset {offset}: --errors replace or"
        with pytest.raises(DataError, match=message):
            prepare([files[0], file], tmp_path / "out", tokenizer="char")
    assert not (tmp_path / "out").exists()
    whole = "".join(content.decode("utf-8-sig", "replace") for content in BROKEN.values())
    actual = prepare(files, tmp_path / "replaced", tokenizer="char", errors="replace")
    assert actual.tokenizer.decode(read(actual)[0]) == whole
    assert (actual.replaced, actual.skipped, actual.documents) == (4, 0, 4)
    actual = prepare(files, tmp_path / "skipped", tokenizer="char", errors="skip")
    assert actual.tokenizer.decode(read(actual)[0]) == "abc\n"
    assert (actual.replaced, actual.skipped, actual.documents) == (0, 3, 1)
    arguments = ["--tokenizer", "char", "--out", str(tmp_path / "command"), "--errors", "skip"]
    assert main(["prepare", "--text", *map(str, files), *arguments]) == 0
    assert "3 files that are not UTF-8 left out\n" in capsys.readouterr().out


def test_files_from_a_list(tmp_path, capsys, monkeypatch):
    for name in "abc":
        write(tmp_path / name, f"text {name}\n")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "list", "b\n\nc\n")
    out = ["--tokenizer", "char", "--out", "out"]
    assert main(["prepare", "--text", "a", "--files-from", "list", *out]) == 0
    actual = PreparedText.open("out")
    assert actual.tokenizer.decode(read(actual)[0]) == "text a\ntext b\ntext c\n"
    write(tmp_path / "empty", "\n")
    for name, message in (("none", "cannot read the list of files none"), ("empty", "is empty")):
        assert main(["prepare", "--files-from", name, "--out", "other"]) == 1
        assert message in capsys.readouterr().err


def change(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "prepared.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def ends(*places: int) -> Callable[[Path], None]:
    """Other ends of as many documents, for which no count and no size is wrong."""

    def apply(folder: Path) -> None:
        (folder / "documents.bin").write_bytes(array("q", places).tobytes())
        change(documents=len(places))(folder)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("tokens.bin"), "tokens.bin is truncated or changed: it has 25 bytes, expected 26"),
        (cut("tokenizer.json"), "tokenizer.json is truncated or changed"),
        (cut("prepared.json"), "prepared.json is not JSON"),
        (change(tokens=99), "tokens.bin is truncated or changed: it has 26 bytes, expected 198"),
        (change(dtype="int8"), "dtype must be uint16 or uint32, got 'int8'"),
        (change(documents=0), "documents must be at least 1, got 0"),
        (ends(2, 1, 13), "documents.bin is corrupt: document 1 ends at 1, and the one before it"),
        (ends(0, 2, 13), "documents.bin is corrupt: document 0 ends at 0, and the one before it"),
        (ends(2, 4, 14), "its last document ends at 14, and there are 13 ids"),
        (change(tokens="many"), "prepared.json is corrupt: tokens"),
        (change(vocab_size=3), "has 5 ids, the text was prepared with 3"),
        (change(format="other"), "is not of format fastattn-prepared 1: it says 'other' 1"),
    ],
)
def test_a_damaged_folder_is_named(damage, message, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_ENDS_AT_ONCE", 1)
    prepare([write(tmp_path / "a", "abcdeabcdeabc")], tmp_path / "out", tokenizer="char")
    fine = PreparedText.open(tmp_path / "out")
    assert fine.tokenizer.vocab_size == 5
    damage(tmp_path / "out")
    with pytest.raises(DataError, match=re.escape(message)):
        PreparedText.open(tmp_path / "out")


def test_wrong_arguments_are_named(tmp_path):
    text, out = write(tmp_path / "a", "some text\n" * 40), tmp_path / "o"
    (tmp_path / "latin").write_bytes(b"abc\xe4bc")
    write(tmp_path / "none", "\n\n")
    (tmp_path / "t").mkdir()
    known = "documents must be one of 'file', 'line', 'paragraph', got 'page'"
    for texts, folder, options, message in (
        ([], out, {}, "texts must name a file, got none"),
        ([text], out, {"documents": "page"}, known),
        ([text], out, {"errors": "ignore"}, "errors must be one of 'strict', 'replace', 'skip'"),
        ([tmp_path / "b"], out, {}, "cannot read text file"),
        ([text], tmp_path, {}, "is no folder for prepared text: it holds a"),
        ([text], write(tmp_path / "t" / "tokenizer.json", "{}").parent, {}, "holds tokenizer.json"),
        ([tmp_path / "latin"], out, {}, "latin is not UTF-8: byte 0xe4 at offset 3"),
        ([tmp_path / "none"], tmp_path / "e", {"documents": "line"}, "the text is empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(texts, folder, **{"tokenizer": "char", **options})
    assert not out.exists()
    made = prepare([text], tmp_path / "out", tokenizer="char")
    with pytest.raises(DataError, match=r"what another call has prepared.*\(tokenizer differs\)"):
        prepare([text], tmp_path / "out", tokenizer="bpe")
    write(text, "text some\n" * 40)  # of as many bytes, and of the same characters
    os.utime(text, (0, 0))
    with pytest.raises(DataError, match=r"or the text has changed since \(sources differs\)"):
        prepare([text], tmp_path / "out", tokenizer="char")
    other = prepare([text], tmp_path / "other", tokenizer="char")
    assert other.tokens == made.tokens and other.fingerprint != made.fingerprint


def test_a_change_of_one_id_is_found(tmp_path, capsys):
    text, out = write(tmp_path / "a", "abcd\n" * 10), ["--out", str(tmp_path / "out")]
    options = ["--tokenizer", "char", "--documents", "line"]
    assert main(["prepare", "--text", str(text), *options, *out]) == 0
    made = capsys.readouterr().out
    assert main(["prepare", "--check", *out]) == 0
    assert capsys.readouterr().out == made
    assert made.startswith("40 tokens of 10 documents in")
    for wrong in ([], ["--check", "--text", str(text)]):
        assert main(["prepare", *wrong, *out]) == 1
        assert "prepare takes --text FILE ..., --files-from FILE" in capsys.readouterr().err
    path = tmp_path / "out" / "tokens.bin"
    path.write_bytes(array("H", [3]).tobytes() + path.read_bytes()[2:])
    assert main(["prepare", "--check", *out]) == 1
    assert "tokens.bin has changed: its SHA-256 is another one" in capsys.readouterr().err


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
        ({"tokenizer": "bpe"}, "prepared data bring their own tokenizer"),
        ({"text": (str(tmp_path / "a"),)}, "prepared data are in place of a text"),
    ):
        wrong = Options(sizes, steps, {"prepared": str(tmp_path / "o"), **data})
        with pytest.raises(ValueError, match=message):
            train(wrong, tmp_path / "wrong")
    with pytest.raises(ValueError, match="prepared is no option of task masked"):
        train(Options(data={"prepared": "x"}, kind="masked"), tmp_path / "wrong")
