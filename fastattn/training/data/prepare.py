"""Tokenize text files to token files part by part, in constant memory."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...generation.request import items
from ...models.fields import check_type
from ..tokenizers import (
    TOKENIZER_KINDS,
    CharacterTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    train_tokenizer,
)
from .prepared import DOCUMENTS, FORMAT, MANIFEST, TOKENIZER, TOKENS, PreparedText
from .text import DataError

Unit = Literal["file", "line", "paragraph"]  # of a document
Errors = Literal["strict", "replace"]  # for bytes that are not UTF-8
# Characters that tokenizers other than "char" are trained on, of a part, and encoded at once: a
# batch has many parts, as each core encodes one.
SAMPLE, PART, BATCH = 10_000_000, 1 << 15, 1 << 21


def prepare(
    texts: Sequence[str | Path],
    out_dir: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 1024,
    documents: Unit = "file",
    errors: Errors = "strict",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PreparedText:
    """Write the ids of text files into a folder that `PreparedText` reads.

    The folder appears when all is written; an interrupted call leaves nothing, and the next one
    removes what a killed one has left. The tokenizer's end token, if any, follows every document.

    Args:
        texts: paths of UTF-8 files, and of folders, whose files are all taken, by name, but hidden
            ones; links are followed; a byte order mark is dropped.
        out_dir: the folder; it must not be there, or be empty.
        tokenizer: one of `TOKENIZER_KINDS`, trained on the first 10 MB of the text ("char" on all
            of it), or a path or name, as for `load_tokenizer`.
        vocab_size: target number of ids of a trained tokenizer; ignored for "char".
        documents: unit of a document: "file", "line" (not empty) or "paragraph" (ended by an empty
            line). With the last two, line breaks of other systems (CR LF, CR) become LF.
        errors: of a file that is not UTF-8: "strict" = DataError; "replace" = wrong bytes become
            U+FFFD.
        progress: called with the bytes done and the bytes in total.

    Raises:
        ValueError: documents or errors has another value, or texts names no file.
        DataError: a file is unreadable or not UTF-8; all are empty; or out_dir holds something.
        TokenizerError: as `train_tokenizer` and `load_tokenizer`, or a text cannot be encoded.
    """
    check_type("documents", documents, Unit)
    check_type("errors", errors, Errors)
    files = _files(items("texts", "paths", texts))
    out = Path(out_dir).resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out_dir} holds something already: choose another folder, or remove it")
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 16}.partial"):
        shutil.rmtree(left, ignore_errors=True)
    folder = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    folder.mkdir(parents=True)
    parts, total = partial(_parts, files, documents, errors), sum(size for _, size in files)
    try:
        coder = _make_tokenizer(parts(), tokenizer, vocab_size, documents)
        coder.save(folder / TOKENIZER)
        fields = _write(folder, parts(), coder, lambda done: progress(done, total))
        (folder / MANIFEST).write_text(json.dumps({**FORMAT, **fields}, indent=2))
        os.rename(folder, out)
    except OSError as error:
        raise OSError(f"cannot write {out_dir}: {error.strerror}; nothing is left") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return PreparedText.open(out_dir)


def _files(texts: Sequence[str | Path]) -> list[tuple[Path, int]]:
    """List each file with its size, those of folders by name."""
    files: list[tuple[Path, int]] = []

    def stop(error: OSError) -> None:
        raise DataError(f"cannot read text file {error.filename}: {error.strerror}") from None

    for path in map(Path, texts):
        found = [] if path.is_dir() else [path]
        tree = os.walk(path, onerror=stop, followlinks=True) if path.is_dir() else ()
        for root, folders, names in tree:
            folders[:] = sorted(name for name in folders if name[0] != ".")
            found += [Path(root, name) for name in sorted(names) if name[0] != "."]
        try:
            files += [(file, file.stat().st_size) for file in found]
        except OSError as error:
            stop(error)
    if not files:
        raise ValueError(f"texts must name a file, got {', '.join(map(str, texts)) or 'none'}")
    return files


class _Part(NamedTuple):
    """Text of a document, whether the document ends with it, and the bytes read so far."""

    text: str
    last: bool
    done: int


def _parts(files: Sequence[tuple[Path, int]], documents: str, errors: str) -> Iterator[_Part]:
    before = 0
    for path, size in files:
        try:
            # Verbatim, or each line break as one LF.
            newline = "" if documents == "file" else None
            with path.open("rb") as content:
                file = io.TextIOWrapper(content, "utf-8-sig", errors, newline)
                try:
                    for text, last in _split(file, documents):
                        yield _Part(text, last, before + content.tell())
                except UnicodeDecodeError as error:
                    offset = content.tell() - len(error.object) + error.start
                    raise DataError(
                        f"text file {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at "
                        f"offset {offset}: --errors replace reads it as U+FFFD"
                    ) from None
        except OSError as error:
            raise DataError(f"cannot read text file {path}: {error.strerror}") from None
        before += size


def _split(file: Any, documents: str) -> Iterator[tuple[str, bool]]:
    """Yield parts of a file's documents, of whole lines or words, and whether a document ends."""
    lines: list[str] = []
    size, before = 0, "\n"
    for line in iter(partial(file.readline, PART), ""):
        # A line that is longer than a part comes in several.
        empty = documents != "file" and line == "\n" and before.endswith("\n")
        before = line
        if lines and (empty or size >= PART):
            text = "".join(lines)
            # A line that goes on is cut before a space, so that no word is.
            cut = len(text) if text.endswith("\n") else max(text.rfind(" ", 1), 0) or len(text)
            yield (text.removesuffix("\n"), True) if empty else (text[:cut], False)
            lines = [text[cut:]] if cut < len(text) else []
            size = len(text) - cut
        if not empty:
            lines.append(line)
            size += len(line)
        if documents == "line" and lines and line.endswith("\n"):
            yield "".join(lines)[:-1], True
            lines, size = [], 0
    if lines:
        text = "".join(lines)
        yield text if documents == "file" else text.removesuffix("\n"), True


def _make_tokenizer(
    parts: Iterable[_Part], name: str, vocab_size: int, documents: str
) -> Tokenizer:
    if name not in TOKENIZER_KINDS:
        return load_tokenizer(name)
    characters: set[str] = set()
    sample: list[str] = []
    size = 0
    for part in parts:
        # The break between documents is no part of them.
        text = part.text + "\n" * (part.last and documents != "file")
        if name == "char":
            characters.update(text)
            continue
        sample.append(text)
        size += len(text)
        if size >= SAMPLE:
            break
    if name == "char":
        return CharacterTokenizer(characters)
    return train_tokenizer(name, "".join(sample)[:SAMPLE], vocab_size=vocab_size)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text) + 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _write(
    folder: Path, parts: Iterable[_Part], tokenizer: Tokenizer, progress: Callable[[int], None]
) -> dict[str, object]:
    """Write ids and ends of documents; return the manifest's fields."""
    try:
        end = [tokenizer.special_id("end")]
    except TokenizerError:
        end = []
    dtype, code = ("uint16", "H") if tokenizer.vocab_size <= 1 << 16 else ("uint32", "I")
    digest = hashlib.sha256(tokenizer.to_json().encode())
    tokens = documents = ended = 0
    with (folder / TOKENS).open("wb") as ids_file, (folder / DOCUMENTS).open("wb") as ends_file:
        for batch in _batches(parts):
            ids, ends = array(code), array("q")
            rows = tokenizer.encode_batch([part.text for part in batch])
            for part, row in zip(batch, rows, strict=True):
                ids.extend(row)
                # A document without a token is none.
                if part.last and tokens + len(ids) > ended:
                    ids.extend(end)
                    ended = tokens + len(ids)
                    ends.append(ended)
            for values, file in ((ids, ids_file), (ends, ends_file)):
                values.tofile(file)
                digest.update(values)
            tokens, documents = tokens + len(ids), documents + len(ends)
            if batch:
                progress(batch[-1].done)
    if tokens == 0:
        raise DataError("the text is empty: there is nothing to prepare")
    counts = {"dtype": dtype, "tokens": tokens, "documents": documents}
    return {**counts, "vocab_size": tokenizer.vocab_size, "fingerprint": digest.hexdigest()}
