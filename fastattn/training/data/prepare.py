"""Text files to token files, a piece at a time, going on where an interrupted call has ended."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, get_args

from ...files.lock import LOCK, locked_folder
from ...files.replace import remove_partial, replacing
from ...models.fields import check_type, from_fields
from ..storage.manifest import entry_of_file, read_json
from ..tokenizers import (
    TOKENIZER_KINDS,
    CharacterTokenizer,
    Tokenizer,
    TokenizerError,
    from_json,
    load_tokenizer,
    train_tokenizer,
)
from .pieces import Errors, Piece, Source, not_utf8, read_pieces
from .prepared import (
    DOCUMENTS,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    TOKENS,
    VERSION,
    PreparedText,
)
from .text import DataError

# What ends a document; "file" has the end of its file alone.
SEPARATORS = {"file": b"", "line": b"\n", "paragraph": b"\n\n"}
# Of the text, for a tokenizer that is trained, other than "char".
SAMPLE_BYTES = 10_000_000
_PROGRESS = "progress.json"
# Bytes that are encoded at once, and between two marks. Opening a file takes as long as some more.
_BATCH_BYTES, _MARK_BYTES, _FILE_BYTES = 1 << 21, 1 << 24, 1 << 12


@dataclass
class Mark:
    """How far a text is prepared: so much is on disk for certain.

    Args:
        source, offset: the file that comes next, by its number, and the bytes of it that are done.
        tokens, documents: how many are written.
        ended: how many tokens end with the last document.
        empty: nothing of the next document was read yet.
        replaced: characters that stand for bytes that are no UTF-8.
        digest: of the text so far.
    """

    source: int = 0
    offset: int = 0
    tokens: int = 0
    documents: int = 0
    ended: int = 0
    empty: bool = True
    replaced: int = 0
    digest: str = ""


@dataclass
class Work:
    """Remaining work of an interrupted call, as stored in progress.json.

    Args:
        request: arguments of the call.
        skipped: numbers of the files that are left out; None = they are not checked yet.
        mark: how far it came.
    """

    request: dict[str, Any]
    skipped: list[int] | None
    mark: Mark

    def save(self, out_dir: Path) -> None:
        """Makes sure that another call goes on from here."""
        _replace(out_dir / _PROGRESS, json.dumps(asdict(self)))


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

    Files are read in pieces of 32 kB, cut where a document or else a line ends, and encoded 2 MB at
    a time on all cores, so that memory does not grow with the text. The same call goes on where an
    interrupted one has ended, and gives the same bytes: after KeyboardInterrupt from there, after a
    crash from 16 MB before at most. Where there is a finished one it changes nothing. A tokenizer's
    end token, where it has one, follows every document.

    Args:
        texts: paths of UTF-8 files; a byte order mark is dropped.
        out_dir: the folder; made if it is not there.
        tokenizer: one of `TOKENIZER_KINDS`, trained on the first 10 MB of the text ("char" on all
            of it), or a path, as for `load_tokenizer`.
        vocab_size: ids that a tokenizer that is trained aims at, but "char".
        documents: what one is: "file", "line" (that is not empty) or "paragraph", which an empty
            line ends.
        errors: what becomes of a file that is not UTF-8: "strict" = DataError, before anything is
            written; "replace" = wrong bytes become U+FFFD; "skip" = the file is left out. The
            result counts them.
        progress: told the bytes that are done, and those that there are.
        say: shows a line to the user.

    Raises:
        ValueError: documents or errors is none of these, or texts is empty.
        DataError: a file is missing, unreadable, not UTF-8, or has changed since an interrupted
            call; all are empty; or out_dir holds what another call has prepared.
        TokenizerError: as `train_tokenizer` and `load_tokenizer`, or a text cannot be encoded.
        LockedError: another call is writing out_dir.
    """
    for name, value, known in (
        ("documents", documents, tuple(SEPARATORS)),
        ("errors", errors, get_args(Errors)),
    ):
        if value not in known:
            choice = ", ".join(map(repr, known))
            raise ValueError(f"{name} must be one of {choice}, got {value!r}")
    if not texts:
        raise ValueError("texts must name a file, got none")
    out_dir, sources = Path(out_dir), [Source.of(path) for path in texts]
    listed = json.dumps([asdict(source) for source in sources])
    request = {
        "sources": {"files": len(sources), "sha256": _digest("", listed)},
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "documents": documents,
        "errors": errors,
    }
    with locked_folder(out_dir, say):
        work = _begin(out_dir, request)
        if work is not None:
            if work.skipped is None:
                work.skipped = _check(sources, errors, say)
                work.save(out_dir)
            left = _Texts(sources, set(work.skipped), SEPARATORS[documents], errors)
            coder = _tokenizer(out_dir, left, tokenizer, vocab_size)
            _write_all(out_dir, left, coder, work, progress)
    return PreparedText.open(out_dir)


def _check(sources: list[Source], errors: Errors, say: Callable[[str], None]) -> list[int]:
    """Numbers of the files to leave out."""
    if errors == "replace":
        return []
    say(f"checking that {len(sources):,} files are UTF-8")
    found = not_utf8(sources)
    if found and errors == "strict":
        first, *others = found.values()
        further = f", and {len(others):,} more are not" if others else ""
        raise DataError(f"{first}{further}: --errors replace or --errors skip goes on without")
    return list(found)


def _begin(out_dir: Path, request: dict[str, Any]) -> Work | None:
    """Find the work that is left to do, or None."""
    for name in (MANIFEST, _PROGRESS):
        if not (out_dir / name).exists():
            continue
        found = read_json(out_dir / name)
        check_type("request", found.get("request"), Mapping)
        for key, value in request.items():
            if found["request"].get(key) != value:
                raise DataError(
                    f"{out_dir} holds what another call has prepared, or the text has changed "
                    f"since ({key} differs): choose another folder, or remove it"
                )
        if name == _PROGRESS:
            check_type("skipped", found.get("skipped"), Sequence[int])
            return Work(request, found["skipped"], from_fields(Mark, found.get("mark", {})))
        (out_dir / _PROGRESS).unlink(missing_ok=True)
        return None
    out_dir.mkdir(parents=True, exist_ok=True)
    # A call that was killed before it wrote anything has left it.
    remove_partial(out_dir / _PROGRESS)
    if strange := sorted(path.name for path in out_dir.iterdir() if path.name != LOCK):
        raise DataError(f"{out_dir} is no folder for prepared text: it holds {strange[0]}")
    return Work(request, None, Mark())


def _replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


@dataclass(frozen=True)
class _Texts:
    """The files to prepare, without those that are skipped."""

    sources: Sequence[Source]
    skipped: Collection[int]
    separator: bytes
    errors: Errors

    @property
    def sizes(self) -> list[int]:
        """Bytes of each; none of those that are skipped."""
        return [0 if i in self.skipped else x.size for i, x in enumerate(self.sources)]

    def after(self, source: int = 0, offset: int = 0) -> Iterator[tuple[int, Piece]]:
        """Read on from a place: pieces, each with the number of its file."""
        for i in range(source, len(self.sources)):
            if i in self.skipped:
                continue
            begin = offset if i == source else 0
            separator = self.separator or b"\n"
            for piece in read_pieces(self.sources[i], begin, separator, self.errors):
                if piece.last:
                    self.sources[i].check_unchanged()
                yield i, piece


def _tokenizer(out_dir: Path, texts: _Texts, name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer, the same after an interruption."""
    path = out_dir / TOKENIZER
    if path.exists():
        return from_json(path.read_text(encoding="utf-8"), source=str(path))
    if name not in TOKENIZER_KINDS:
        made = load_tokenizer(name)
    elif name == "char":
        found: set[str] = set()
        for _, piece in texts.after():
            found.update(piece.text)
        made = CharacterTokenizer("".join(sorted(found)))
    else:
        sample: list[str] = []
        size = 0
        for _, piece in texts.after():
            sample.append(piece.text)
            size += len(piece.text)
            if size >= SAMPLE_BYTES:
                break
        made = train_tokenizer(name, "".join(sample)[:SAMPLE_BYTES], vocab_size=vocab_size)
    _replace(path, made.to_json())
    return made


def _batches(pieces: Iterator[tuple[int, Piece]]) -> Iterator[tuple[list[tuple[int, Piece]], int]]:
    """Pieces to encode at once, with what they cost in bytes."""
    batch: list[tuple[int, Piece]] = []
    cost = 0
    for i, piece in pieces:
        batch.append((i, piece))
        cost += len(piece.text) + piece.last * _FILE_BYTES
        if cost >= _BATCH_BYTES:
            yield batch, cost
            batch, cost = [], 0
    if batch:
        yield batch, cost


def _write_all(
    out_dir: Path,
    texts: _Texts,
    tokenizer: Tokenizer,
    work: Work,
    progress: Callable[[int, int], None],
) -> None:
    """Writes everything behind the mark of `work`, and the manifest."""
    first, sizes = work.mark, texts.sizes
    before = list(accumulate(sizes, initial=0))
    first.digest = first.digest or _digest(work.request["documents"], tokenizer.to_json())
    with _Writer(out_dir, tokenizer, texts.separator.decode(), replace(first)) as writer:
        unsaved = 0
        try:
            for batch, cost in _batches(texts.after(first.source, first.offset)):
                writer.add(batch)
                work.mark = replace(writer.mark)
                unsaved += cost
                i, piece = batch[-1]
                progress(before[i] + piece.end, before[-1])
                if unsaved >= _MARK_BYTES:
                    writer.flush()
                    work.save(out_dir)
                    unsaved = 0
        except KeyboardInterrupt:
            writer.flush()
            work.save(out_dir)
            raise
        writer.flush()
    mark = work.mark
    if mark.tokens == 0:
        raise DataError("the text is empty: there is nothing to prepare")
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": writer.dtype,
        "tokens": mark.tokens,
        "documents": mark.documents,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": mark.digest,
        "skipped": len(texts.skipped),
        "replaced": mark.replaced,
        "request": work.request,
        "files": {name: entry_of_file(out_dir / name) for name in (TOKENS, DOCUMENTS, TOKENIZER)},
    }
    _replace(out_dir / MANIFEST, json.dumps(fields, indent=2))
    for name in (TOKENIZER, MANIFEST, _PROGRESS):
        remove_partial(out_dir / name)
    (out_dir / _PROGRESS).unlink()


def _digest(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode("utf-8")).hexdigest()


class _Writer:
    """Appends the ids of texts, and ends of documents, to the two files, behind a mark.

    mark: how far it is; it is ahead of the disk until `flush`.
    """

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, separator: str, mark: Mark) -> None:
        self._tokenizer, self._separator, self.mark = tokenizer, separator, mark
        self.dtype, self._code = (
            ("uint16", "H") if tokenizer.vocab_size <= 1 << 16 else ("uint32", "I")
        )
        try:
            self._end: list[int] = [tokenizer.special_id("end")]
        except TokenizerError:
            self._end = []
        self._tokens = _open_at(out_dir / TOKENS, mark.tokens * array(self._code).itemsize)
        self._documents = _open_at(out_dir / DOCUMENTS, mark.documents * array("q").itemsize)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._documents.close()

    def add(self, batch: Sequence[tuple[int, Piece]]) -> None:
        """Goes on with pieces of files, which are encoded at once, on all cores."""
        parts = [self._parts(piece) for _, piece in batch]
        encoded = iter(self._tokenizer.encode_batch([part for each in parts for part in each]))
        for (i, piece), each in zip(batch, parts, strict=True):
            for n in range(len(each)):
                if n > 0:
                    self.end_document()
                self._write(next(encoded))
            if piece.last:
                self.end_document()
            self.mark.source, self.mark.offset = (i + 1, 0) if piece.last else (i, piece.end)
            self.mark.replaced += piece.replaced

    def _parts(self, piece: Piece) -> list[str]:
        """The texts of a piece: the first goes on with a document, each other begins one."""
        mark, text = self.mark, piece.text
        mark.digest = _digest(mark.digest, text)
        if self._separator and mark.empty:
            text = text.lstrip("\n")
        parts = re.split(f"{self._separator}+", text) if self._separator else [text]
        # A separator has ended it, or nothing of it was read before either.
        mark.empty = piece.last or (not parts[-1] and (len(parts) > 1 or mark.empty))
        return parts

    def end_document(self) -> None:
        """Ends a document, if it has any token."""
        mark = self.mark
        if mark.tokens == mark.ended:
            return
        self._write(self._end)
        mark.documents, mark.ended = mark.documents + 1, mark.tokens
        self._documents.write(_little("q", [mark.ended]))

    def flush(self) -> None:
        for file in (self._tokens, self._documents):
            file.flush()
            os.fsync(file.fileno())

    def _write(self, ids: Sequence[int]) -> None:
        self.mark.tokens += len(ids)
        self._tokens.write(_little(self._code, ids))


def _little(code: str, values: Sequence[int]) -> bytes:
    found = array(code, values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _open_at(path: Path, size: int) -> BinaryIO:
    """A file to append to, without what was written behind its mark."""
    file = path.open("r+b" if path.exists() else "xb")
    file.seek(0, os.SEEK_END)
    if file.tell() < size:
        file.close()
        raise DataError(f"{path} is truncated: remove its folder and prepare the text again")
    file.truncate(size)
    file.seek(size)
    return file
