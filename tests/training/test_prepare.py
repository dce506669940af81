"""Token files: what is prepared is read, in flat memory, and an interruption changes nothing."""

import json
import os
import re
import resource
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import arm, fork, status_of
from gloo_ranks import run_alone
from nightly import gate_cases

from fastattn.cli.main import main
from fastattn.files.lock import LOCK, LockedError, locked
from fastattn.training.data import pieces, prepared
from fastattn.training.data import prepare as preparing
from fastattn.training.data.prepare import SEPARATORS, prepare
from fastattn.training.data.prepared import PreparedText
from fastattn.training.data.text import DataError
from fastattn.training.tasks.prepared import PreparedTask
from fastattn.training.tokenizers import CharacterTokenizer

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
@pytest.mark.parametrize("piece", [5, 7, 16, 1 << 20])
def test_what_is_prepared_is_the_text(documents, piece, tmp_path, monkeypatch):
    """However it is cut into pieces, inside characters too."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    monkeypatch.setattr(preparing, "_BATCH_BYTES", 3 * piece)
    files = [write(tmp_path / "a", "\ufeff" + TEXT), write(tmp_path / "b", "b" + TEXT)]
    found = prepare(files, tmp_path / "out", tokenizer="char", documents=documents)
    first = DOCUMENTS[documents]
    wanted = [*first, "b" + first[0], *first[1:]]
    assert found.documents == len(wanted) and found.dtype == "uint16"
    ids, numbers = read(found)
    texts = [
        found.tokenizer.decode([x for x, n in zip(ids, numbers, strict=True) if n == i])
        for i in range(len(wanted))
    ]
    assert texts == wanted
    found.check()


def test_an_end_token_follows_each_document(tmp_path):
    path = write(tmp_path / "a", "some text\nmore text\n" * 30)
    found = prepare([path], tmp_path / "out", tokenizer="wordpiece", documents="line")
    ids, numbers = read(found)
    end = found.tokenizer.special_id("end")
    last = [i for i, n in enumerate(numbers) if i + 1 == len(ids) or numbers[i + 1] != n]
    assert [i for i, x in enumerate(ids) if x == end] == last
    assert found.documents == 60 == ids.count(end)


@pytest.mark.parametrize(("count", "dtype"), [(40_000, "uint16"), (70_000, "uint32")])
def test_ids_have_the_bits_that_they_need(count, dtype, tmp_path):
    characters = "".join(map(chr, [*range(0x4E00, 0x4E00 + 20_000), *range(0x10000, 0x1C350)]))
    path = write(tmp_path / "a", characters[:count])
    found = prepare([path], tmp_path / "out", tokenizer="char")
    assert found.dtype == dtype and found.tokens == count
    ids, _ = found.windows(torch.tensor([count - 10]), 10)
    assert ids[0].tolist() == list(range(count - 10, count))


def used(folder: Path, megabytes: int) -> int:
    """Prepare a text of so many MiB and draw batches of it; the peak of memory so far, in MiB."""
    text, out = folder / f"{megabytes}.txt", folder / str(megabytes)
    with text.open("w") as file:
        for _ in range(megabytes << 14):
            file.write("all work and no play makes a dull boy, they said, and went out.\n")
    task = PreparedTask(prepare([text], out, tokenizer="char", documents="line"), 512)
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


def kills(folder: str) -> int:
    """Prepare a text in processes that are killed at their n-th file operation, and again."""
    base = Path(folder)
    text = write(base / "text", "".join(f"line {i} of a text\n" for i in range(60)))
    pieces.PIECE_BYTES, preparing._BATCH_BYTES, preparing._MARK_BYTES = 64, 64, 128

    def call(out: Path, n: int = 0) -> None:
        arm(n, under=str(out))
        prepare([text], out, tokenizer="bpe", documents="line")

    def contents(out: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in out.iterdir()}

    prepare([text], base / "whole", tokenizer="bpe", documents="line")
    for n in range(1, 200, gate_cases([3], [1])[-1]):
        killed = status_of(fork(partial(call, base / str(n), n)))
        assert status_of(fork(partial(call, base / str(n)))) == 0, n
        assert contents(base / str(n)) == contents(base / "whole"), n
        if killed == 0:
            return n - 1
        assert killed == -9, killed
    return 0


def test_a_call_goes_on_where_a_killed_one_has_ended(tmp_path):
    assert run_alone(f"{__file__}:kills", folder=str(tmp_path)) >= 20


@pytest.fixture(params=["one file", "many"])
def lines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> list[Path]:
    """1000 lines of 7 bytes, in files, of which 64 bytes are read at once."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    if request.param == "one file":
        return [write(tmp_path / "text", "a line\n" * 1000)]
    return [write(tmp_path / f"text{i:03d}", "a line\n" * 5) for i in range(200)]


def test_a_call_that_goes_on_reads_only_the_rest(lines, tmp_path, monkeypatch):
    """From where an interrupt came; the check of the files is not repeated either."""
    monkeypatch.setattr(preparing, "_BATCH_BYTES", 64)
    first: list[int] = []
    rest: list[int] = []
    said: list[str] = []

    def stop(done: int, total: int) -> None:
        assert total == 7000
        first.append(done)
        if done > 3000:
            raise KeyboardInterrupt

    def note(done: int, total: int) -> None:
        rest.append(done)

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(lines, out, tokenizer="char", progress=stop, say=said.append)
    assert said == [f"checking that {len(lines)} files are UTF-8"]
    with pytest.raises(DataError, match=r"there is no prepared text .* has no prepared\.json"):
        PreparedText.open(out)
    found = prepare(lines, out, tokenizer="char", progress=note, say=said.append)
    assert len(said) == 1
    assert first[-1] < rest[0] < first[-1] + 128 and rest[-1] == 7000
    assert read(found)[0] == found.tokenizer.encode("a line\n" * 1000)
    assert found.documents == len(lines)
    # A finished one is left as it is.
    before = (out / "tokens.bin").stat().st_mtime_ns
    assert prepare(lines, out, tokenizer="char").fingerprint == found.fingerprint
    assert (out / "tokens.bin").stat().st_mtime_ns == before


def test_an_interrupt_within_a_batch_leaves_the_mark_before_it(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_BATCH_BYTES", 150)
    real = preparing._Writer.end_document
    left = [0 if len(lines) == 1 else 70]

    def end_document(writer: preparing._Writer) -> None:
        real(writer)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing._Writer, "end_document", end_document)
        prepare(lines, tmp_path / "out", tokenizer="char")
    found = prepare(lines, tmp_path / "out", tokenizer="char")
    assert read(found)[0] == found.tokenizer.encode("a line\n" * 1000)
    assert found.fingerprint == prepare(lines, tmp_path / "new", tokenizer="char").fingerprint


def test_a_text_that_changes_meanwhile_is_named(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_BATCH_BYTES", 64)

    def change_it(done: int, total: int) -> None:
        os.utime(lines[-1], ns=(0, done))

    with pytest.raises(DataError, match="changed while it was prepared"):
        prepare(lines, tmp_path / "out", tokenizer="char", progress=change_it)


def test_marks_come_by_bytes_of_all_files(lines, tmp_path, monkeypatch):
    """A call that is killed loses a bounded part, of however many files; a file counts as some."""
    saved: list[tuple[int, int]] = []
    batches: list[int] = []
    save, encode = preparing.Work.save, CharacterTokenizer.encode_batch

    def noted(work: preparing.Work, out_dir: Path) -> None:
        saved.append((work.mark.source, work.mark.offset))
        save(work, out_dir)

    def encode_batch(self: CharacterTokenizer, texts: list[str]) -> list[list[int]]:
        batches.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(preparing.Work, "save", noted)
    monkeypatch.setattr(CharacterTokenizer, "encode_batch", encode_batch)
    prepare(lines, tmp_path / "out", tokenizer="char")
    # All at once, on all cores: `tokenizers` gives each a text of a batch.
    assert batches == [112 if len(lines) == 1 else 200] and saved == [(0, 0)]
    saved.clear()
    for name, size in (("_BATCH_BYTES", 64), ("_MARK_BYTES", 1000), ("_FILE_BYTES", 15)):
        monkeypatch.setattr(preparing, name, size)
    prepare(lines, tmp_path / "again", tokenizer="char")
    assert len(saved) == (7 if len(lines) == 1 else 11)
    assert saved == sorted(saved) and saved[0] == (0, 0)


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
    "start": b"\xe4bc\n",
    "later": b"abc\n" * 20 + b"a\xff\xfe\n",
    # Ends within a character; and holds U+FFFD, which is one like any other.
    "end": "a\ufffdb".encode() + "€".encode()[:2],
}


def test_files_that_are_not_utf8(tmp_path, monkeypatch, capsys):
    """All are found before anything is written; or replaced, or left out, and counted."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16)
    monkeypatch.setattr(pieces, "_CHECK_BYTES", 7)
    files = []
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    message = r"start is not UTF-8: byte 0xe4 at offset 0, and 2 more are not: --errors replace"
    with pytest.raises(DataError, match=message):
        prepare(files, tmp_path / "out", tokenizer="char")
    for file, offset, byte in ((files[2], 81, "ff"), (files[3], 5, "e2")):
        with pytest.raises(DataError, match=f"byte 0x{byte} at offset {offset}: --errors"):
            prepare([file], tmp_path / "out", tokenizer="char")
    assert not (tmp_path / "out").exists()
    whole = "".join(content.decode("utf-8", "replace") for content in BROKEN.values())
    found = prepare(files, tmp_path / "replaced", tokenizer="char", errors="replace")
    assert found.tokenizer.decode(read(found)[0]) == whole
    assert (found.replaced, found.skipped, found.documents) == (4, 0, 4)
    found = prepare(files, tmp_path / "skipped", tokenizer="char", errors="skip")
    assert found.tokenizer.decode(read(found)[0]) == "abc\n"
    assert (found.replaced, found.skipped, found.documents) == (0, 3, 1)
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
    found = PreparedText.open("out")
    assert found.tokenizer.decode(read(found)[0]) == "text a\ntext b\ntext c\n"
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
        (cut("tokens.bin"), "tokens.bin is truncated or changed: it has 25 bytes, 26 belong"),
        (cut("documents.bin"), "documents.bin is truncated or changed: it has 7 bytes"),
        (cut("tokenizer.json"), "tokenizer.json is truncated or changed"),
        (cut("prepared.json"), "prepared.json is not JSON"),
        (change(tokens=99), "tokens.bin is truncated or changed: it has 26 bytes, 198 belong"),
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
    known = "documents must be one of 'file', 'line', 'paragraph', got 'page'"
    for texts, folder, options, message in (
        ([], out, {}, "texts must name a file, got none"),
        ([text], out, {"documents": "page"}, known),
        ([text], out, {"errors": "ignore"}, "errors must be one of 'strict', 'replace', 'skip'"),
        ([tmp_path / "b"], out, {}, "cannot read text file"),
        ([text], tmp_path, {}, "is no folder for prepared text: it holds a"),
        ([tmp_path / "latin"], out, {}, "latin is not UTF-8: byte 0xe4 at offset 3"),
        ([tmp_path / "none"], tmp_path / "e", {"documents": "line"}, "the text is empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(texts, folder, **{"tokenizer": "char", **options})
    assert not out.exists()
    prepare([text], tmp_path / "out", tokenizer="char")
    with pytest.raises(DataError, match=r"what another call has prepared.*\(tokenizer differs\)"):
        prepare([text], tmp_path / "out", tokenizer="bpe")
    write(text, "another text\n" * 40)
    with pytest.raises(DataError, match=r"or the text has changed since \(sources differs\)"):
        prepare([text], tmp_path / "out", tokenizer="char")


def test_a_change_of_one_id_is_found(tmp_path, capsys):
    text, out = write(tmp_path / "a", "abcd" * 10), ["--out", str(tmp_path / "out")]
    assert main(["prepare", "--text", str(text), "--tokenizer", "char", *out]) == 0
    made = capsys.readouterr().out
    assert main(["prepare", "--check", *out]) == 0
    assert capsys.readouterr().out == made
    assert made.startswith("40 tokens of 1 documents in")
    for wrong in ([], ["--check", "--text", str(text)]):
        assert main(["prepare", *wrong, *out]) == 1
        assert "prepare takes --text FILE ..., --files-from FILE" in capsys.readouterr().err
    path = tmp_path / "out" / "tokens.bin"
    path.write_bytes(array("H", [3]).tobytes() + path.read_bytes()[2:])
    assert main(["prepare", "--check", *out]) == 1
    assert "tokens.bin has changed: its SHA-256 is another one" in capsys.readouterr().err
