"""Tokenize text files to token files piece by piece, in constant memory."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ...files.lock import LOCK, locked_folder
from ...files.replace import remove_partial, replacing
from ...models.fields import check_type
from ..storage import entry_of_file, read_json
from ..tokenizers import (
    TOKENIZER_KINDS,
    CharacterTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    train_tokenizer,
)
from .prepared import DOCUMENTS, FORMAT, MANIFEST, TOKENIZER, TOKENS, VERSION, PreparedText
from .text import DataError

Errors = Literal["strict", "replace", "skip"]
# Separator that ends a document; "file": only the end of the file.
SEPARATORS = {"file": "", "line": "\n", "paragraph": "\n\n"}
# Characters that tokenizers other than "char" are trained on.
SAMPLE = 10_000_000
# Bytes read at once. A batch has many pieces, as each core encodes one.
PIECE_BYTES = 1 << 15
# Characters encoded at once; opening a file costs as much time as _FILE_COST characters.
_BATCH, _FILE_COST = 1 << 21, 1 << 12
_REPLACEMENT = "\ufffd"


def prepare(
    texts: Sequence[str | Path],
    out_dir: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 1024,
    documents: str = "file",
    errors: Errors = "strict",
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> PreparedText:
    """Writes the ids of text files into a folder that `PreparedText` reads.

    Files are read in pieces of 32 kB, cut where a document or else a line ends, and encoded two
    million characters at a time on all cores. An interrupted call leaves nothing; the next call
    replaces the files of a killed one. A finished folder is left unchanged. The tokenizer's end
    token, if any, follows every document.

    Args:
        texts: paths of UTF-8 files; a byte order mark is dropped.
        out_dir: the folder; made if it is not there.
        tokenizer: one of `TOKENIZER_KINDS`, trained on the first 10 MB of the text ("char" on all
            of it), or a path, as for `load_tokenizer`.
        vocab_size: target number of ids of a trained tokenizer; ignored for "char".
        documents: unit of a document: "file", "line" (not empty) or "paragraph" (ended by an empty
            line). With the last two, line breaks of other systems (CR LF, CR) become LF.
        errors: treatment of a file that is not UTF-8: "strict" = DataError; "replace" = wrong bytes
            become U+FFFD; "skip" = leave the file out. The result counts them.
        progress: called with the bytes done and the bytes in total.
        say: shows a line to the user.

    Raises:
        ValueError: documents or errors has another value, or texts is empty.
        DataError: a file is missing, unreadable or not UTF-8; all are empty; or out_dir holds the
            result of another call.
        TokenizerError: as `train_tokenizer` and `load_tokenizer`, or a text cannot be encoded.
        LockedError: another call is writing out_dir.
    """
    for name, value, allowed in (
        ("documents", documents, tuple(SEPARATORS)),
        ("errors", errors, get_args(Errors)),
    ):
        if value not in allowed:
            choice = ", ".join(map(repr, allowed))
            raise ValueError(f"{name} must be one of {choice}, got {value!r}")
    if not texts:
        raise ValueError("texts must name a file, got none")
    out_dir, stats = Path(out_dir), [(str(Path(path).resolve()), *_stat(path)) for path in texts]
    request = {
        "sources": {
            "files": len(texts),
            "sha256": hashlib.sha256(json.dumps(stats).encode()).hexdigest(),
        },
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "documents": documents,
        "errors": errors,
    }
    with locked_folder(out_dir, say):
        if not _is_finished(out_dir, request):
            if errors == "skip":
                say(f"checking that {len(texts):,} files are UTF-8")
            files = [(path, size) for path, size, _ in stats if errors != "skip" or _is_utf8(path)]
            with _all_or_nothing(out_dir):
                source = _Texts(files, SEPARATORS[documents], errors)
                coder = _make_tokenizer(source, tokenizer, vocab_size)
                _write(out_dir, source, coder, request, len(texts) - len(files), progress)
    return PreparedText.open(out_dir)


def _stat(path: str | Path) -> tuple[int, int]:
    """Size of a file, and when it was changed."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns


def _is_finished(out_dir: Path, request: dict[str, object]) -> bool:
    """Whether the folder already holds this request's result; DataError if another's."""
    remove_partial(out_dir / MANIFEST)
    if not (out_dir / MANIFEST).exists():
        # A killed call leaves token files, its tokenizer beside them.
        ours = (LOCK, TOKENS, DOCUMENTS, TOKENIZER) if (out_dir / TOKENS).exists() else (LOCK,)
        held = sorted(out_dir.iterdir()) if out_dir.is_dir() else []
        if strange := [x.name for x in held if x.name not in ours or x.is_symlink()]:
            raise DataError(f"{out_dir} is no folder for prepared text: it holds {strange[0]}")
        return False
    done: Any = read_json(out_dir / MANIFEST).get("request")
    check_type("request", done, Mapping)
    for key, value in request.items():
        if done.get(key) != value:
            raise DataError(
                f"{out_dir} holds what another call has prepared, or the text has changed since "
                f"({key} differs): choose another folder, or remove it"
            )
    return True


@contextmanager
def _all_or_nothing(out_dir: Path) -> Iterator[None]:
    """On an error or interrupt, remove this call's files."""
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for name in (TOKENS, DOCUMENTS, TOKENIZER):
            (out_dir / name).unlink(missing_ok=True)
        raise


class _NotUTF8(DataError):
    """A text file is not UTF-8."""


class Piece(NamedTuple):
    """A part of a text file, without a byte order mark at the file's beginning.

    done: bytes of the file read so far. last: the file ends here; the piece may be empty.
    replaced: number of characters that replace bytes that are not UTF-8.
    """

    text: str
    done: int
    last: bool
    replaced: int


def read_pieces(path: str, separator: str = "", errors: Errors = "strict") -> Iterator[Piece]:
    """Read a file; pieces end with a separator where they have one.

    Without a separator the text is verbatim, else each of its line breaks is one LF.
    """
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace" if errors == "replace" else "strict")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=bool(separator))
    kept, before, done, last = "", b"", 0, False
    try:
        with open(path, "rb") as file:
            while not last:
                content = file.read(PIECE_BYTES)
                done, last = done + len(content), not content
                new = decoder.decode(content, last)
                own = (before + content).count(_REPLACEMENT.encode())
                text, before = kept + new, content[-2:]
                end = len(text) if last else _cut(text, separator or "\n")
                kept = text[end:]
                yield Piece(text[:end], done, last, new.count(_REPLACEMENT) - own)
    except UnicodeDecodeError as error:
        offset = done - len(error.object) + error.start
        raise _NotUTF8(
            f"text file {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{offset}: --errors replace or --errors skip goes on without"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None


def _cut(text: str, separator: str) -> int:
    """Position after the last separator, or else after the last line."""
    end = text.rfind(separator) + len(separator)
    if end < len(separator):
        # Line breaks at the end may be the first half of a separator.
        whole = text.rstrip("\n")
        end = whole.rfind("\n") + 1 or len(whole)
    return end


def _is_utf8(path: str) -> bool:
    try:
        return all(True for _ in read_pieces(path))
    except _NotUTF8:
        return False


class _Texts(NamedTuple):
    """The files to prepare, each with its size."""

    files: Sequence[tuple[str, int]]
    separator: str
    errors: Errors

    def pieces(self) -> Iterator[Piece]:
        """Pieces of all files; `done` counts over all files."""
        before = 0
        for path, size in self.files:
            for piece in read_pieces(path, self.separator, self.errors):
                yield piece._replace(done=before + piece.done)
            before += size

    def batches(self) -> Iterator[list[Piece]]:
        """Pieces to encode at once."""
        batch: list[Piece] = []
        cost = 0
        for piece in self.pieces():
            batch.append(piece)
            cost += len(piece.text) + piece.last * _FILE_COST
            if cost >= _BATCH:
                yield batch
                batch, cost = [], 0
        if batch:
            yield batch


def _make_tokenizer(texts: _Texts, name: str, vocab_size: int) -> Tokenizer:
    if name not in TOKENIZER_KINDS:
        return load_tokenizer(name)
    if name == "char":
        characters: set[str] = set()
        for piece in texts.pieces():
            characters.update(piece.text)
        return CharacterTokenizer(characters)
    sample: list[str] = []
    size = 0
    for piece in texts.pieces():
        sample.append(piece.text)
        size += len(piece.text)
        if size >= SAMPLE:
            break
    return train_tokenizer(name, "".join(sample)[:SAMPLE], vocab_size=vocab_size)


def _write(
    out_dir: Path,
    texts: _Texts,
    tokenizer: Tokenizer,
    request: dict[str, object],
    skipped: int,
    progress: Callable[[int, int], None],
) -> None:
    """Writes all files, the manifest last."""
    digest = hashlib.sha256((str(request["documents"]) + tokenizer.to_json()).encode())
    replaced, total = 0, sum(size for _, size in texts.files)
    with _Writer(out_dir, tokenizer, texts.separator) as writer:
        for batch in texts.batches():
            writer.add(batch)
            digest.update("".join(piece.text for piece in batch).encode())
            replaced += sum(piece.replaced for piece in batch)
            progress(batch[-1].done, total)
    if writer.tokens == 0:
        raise DataError("the text is empty: there is nothing to prepare")
    tokenizer.save(out_dir / TOKENIZER)
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": writer.dtype,
        "tokens": writer.tokens,
        "documents": writer.documents,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": digest.hexdigest(),
        "skipped": skipped,
        "replaced": replaced,
        "request": request,
        "files": {name: entry_of_file(out_dir / name) for name in (TOKENS, DOCUMENTS, TOKENIZER)},
    }
    with replacing(out_dir / MANIFEST) as file:
        json.dump(fields, file, indent=2)


class _Writer:
    """Writes the ids of texts, and ends of documents, to the two files, and counts both."""

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, separator: str) -> None:
        self._tokenizer, self._separator = tokenizer, separator
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        try:
            self._end: list[int] = [tokenizer.special_id("end")]
        except TokenizerError:
            self._end = []
        self.tokens = self.documents = self._ended = 0
        self._empty = True  # the next document has no text yet
        self._files = [(out_dir / name).open("wb") for name in (TOKENS, DOCUMENTS)]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def add(self, batch: Sequence[Piece]) -> None:
        """Encode pieces of files together, on all cores, and write their ids."""
        parts = [self._parts(piece) for piece in batch]
        encoded = iter(self._tokenizer.encode_batch([part for each in parts for part in each]))
        for piece, each in zip(batch, parts, strict=True):
            for n in range(len(each)):
                if n > 0:
                    self._end_document()
                self._write(next(encoded))
            if piece.last:
                self._end_document()

    def _parts(self, piece: Piece) -> list[str]:
        """Texts of a piece: the first continues a document, each other begins one."""
        text = piece.text
        if self._separator and self._empty:
            text = text.lstrip("\n")
        parts = re.split(f"{self._separator}+", text) if self._separator else [text]
        # The document ended with a separator, or was empty.
        self._empty = piece.last or (not parts[-1] and (len(parts) > 1 or self._empty))
        return parts

    def _end_document(self) -> None:
        """Ends a document, if it has any token."""
        if self.tokens == self._ended:
            return
        self._write(self._end)
        self.documents, self._ended = self.documents + 1, self.tokens
        self._files[1].write(_little("int64", [self._ended]))

    def _write(self, ids: Sequence[int]) -> None:
        self.tokens += len(ids)
        self._files[0].write(_little(self.dtype, ids))


def _little(dtype: str, values: Sequence[int]) -> bytes:
    import numpy as np

    return np.array(values, np.dtype(dtype).newbyteorder("<")).tobytes()
