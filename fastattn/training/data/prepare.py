"""Text files to token files, a piece at a time, going on where an interrupted call has ended."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...models.fields import check_type
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
PIECE_BYTES = 1 << 20
# Of the text, for a tokenizer that is trained, other than "char".
SAMPLE_BYTES = 10_000_000
_PROGRESS = "progress.json"
_PIECES_A_MARK = 16


@dataclass(frozen=True)
class Source:
    """A text file that is prepared, as it was when that began."""

    path: str
    size: int
    modified_ns: int


@dataclass
class Mark:
    """How far a text is prepared: so much is on disk for certain.

    Args:
        source, offset: the file that comes next, by its number, and the bytes of it that are done.
        tokens, documents: how many are written.
        ended: how many tokens end with the last document.
        digest: of the text so far.
    """

    source: int = 0
    offset: int = 0
    tokens: int = 0
    documents: int = 0
    ended: int = 0
    digest: str = ""


def prepare(
    texts: Sequence[str | Path],
    out_dir: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 1024,
    documents: str = "file",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PreparedText:
    """Writes the ids of text files into a folder that `PreparedText` reads.

    A file is read and encoded in pieces of about a megabyte, cut where a document or else a line
    ends, so that memory does not grow with it. The same call goes on where an interrupted one has
    ended, and gives the same bytes; where there is a finished one it changes nothing. A tokenizer's
    end token, where it has one, follows every document.

    Args:
        texts: paths of UTF-8 files; a byte order mark is dropped.
        out_dir: the folder; made if it is not there.
        tokenizer: one of `TOKENIZER_KINDS`, trained on the first 10 MB of the text ("char" on all
            of it), or a path, as for `load_tokenizer`.
        vocab_size: ids that a tokenizer that is trained aims at, but "char".
        documents: what one is: "file", "line" (that is not empty) or "paragraph", which an empty
            line ends.
        progress: told the bytes that are done, and those that there are.

    Raises:
        ValueError: documents is none of these, or texts is empty.
        DataError: a file is missing, unreadable, not UTF-8, or has changed since an interrupted
            call; all are empty; or out_dir holds what another call has prepared.
        TokenizerError: as `train_tokenizer` and `load_tokenizer`, or a text cannot be encoded.
    """
    if documents not in SEPARATORS:
        known = ", ".join(map(repr, SEPARATORS))
        raise ValueError(f"documents must be one of {known}, got {documents!r}")
    if not texts:
        raise ValueError("texts must name a file, got none")
    out_dir, sources = Path(out_dir), [_source(Path(path)) for path in texts]
    request = {
        "sources": [asdict(source) for source in sources],
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "documents": documents,
    }
    mark = _begin(out_dir, request)
    if mark is not None:
        coder = _tokenizer(out_dir, sources, tokenizer, vocab_size)
        _write_all(out_dir, sources, SEPARATORS[documents], coder, mark, request, progress)
    return PreparedText.open(out_dir)


def _source(path: Path) -> Source:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None
    return Source(str(path.resolve()), found.st_size, found.st_mtime_ns)


def _begin(out_dir: Path, request: dict[str, Any]) -> Mark | None:
    """Where to go on; None where there is nothing left to do."""
    out_dir.mkdir(parents=True, exist_ok=True)
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
            return Mark(**found["mark"])
        (out_dir / _PROGRESS).unlink(missing_ok=True)
        return None
    if any(out_dir.iterdir()):
        strange = min(path.name for path in out_dir.iterdir())
        # A tokenizer alone is what a call has left that was interrupted before its first mark.
        if strange not in (TOKENIZER, _partial(TOKENIZER), _partial(_PROGRESS)):
            raise DataError(f"{out_dir} is no folder for prepared text: it holds {strange}")
    _replace(out_dir / _PROGRESS, json.dumps({"request": request, "mark": asdict(Mark())}))
    (out_dir / TOKENIZER).unlink(missing_ok=True)
    return Mark()


def _partial(name: str) -> str:
    return f".{name}.writing"


def _replace(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the new one, whatever happens."""
    partial = path.with_name(_partial(path.name))
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _tokenizer(out_dir: Path, sources: list[Source], name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer, the same after an interruption."""
    path = out_dir / TOKENIZER
    if path.exists():
        return from_json(path.read_text(encoding="utf-8"), source=str(path))
    if name not in TOKENIZER_KINDS:
        made = load_tokenizer(name)
    elif name == "char":
        found: set[str] = set()
        for piece in _all_pieces(sources, b""):
            found.update(piece)
        made = CharacterTokenizer("".join(sorted(found)))
    else:
        sample: list[str] = []
        size = 0
        for piece in _all_pieces(sources, b""):
            sample.append(piece)
            size += len(piece)
            if size >= SAMPLE_BYTES:
                break
        made = train_tokenizer(name, "".join(sample)[:SAMPLE_BYTES], vocab_size=vocab_size)
    _replace(path, made.to_json())
    return made


def _all_pieces(sources: list[Source], separator: bytes) -> Iterator[str]:
    for source in sources:
        for _, piece in _pieces(source, 0, separator):
            yield piece


def _pieces(source: Source, offset: int, separator: bytes) -> Iterator[tuple[int, str]]:
    """What is left of a file in pieces, each with the offset behind it."""
    path = Path(source.path)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while piece := _next_piece(file, separator or b"\n"):
                begin, offset = offset, offset + len(piece)
                if begin == 0:
                    piece = piece.removeprefix(b"\xef\xbb\xbf")
                yield offset, piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text file {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{offset - len(error.object) + error.start}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None


def _next_piece(file: BinaryIO, separator: bytes) -> bytes:
    """The next bytes of a file, cut behind the last separator among them, or else a character."""
    content = file.read(PIECE_BYTES)
    if len(content) < PIECE_BYTES:
        return content
    end = content.rfind(separator) + len(separator)
    if end < len(separator):
        # Line breaks at the end may be the first half of a separator.
        end = len(content.rstrip(b"\n"))
        if end == len(content):
            # Of a character of several bytes all but the first are 0b10xxxxxx.
            while end > len(content) - 4 and content[end - 1] & 0xC0 == 0x80:
                end -= 1
            end -= content[end - 1] >= 0xC0
    file.seek(end - len(content), os.SEEK_CUR)
    return content[:end]


def _write_all(
    out_dir: Path,
    sources: list[Source],
    separator: bytes,
    tokenizer: Tokenizer,
    mark: Mark,
    request: dict[str, Any],
    progress: Callable[[int, int], None],
) -> None:
    """Writes everything behind a mark, and the manifest."""
    total, before = sum(source.size for source in sources), 0
    mark.digest = mark.digest or _digest(request["documents"], tokenizer.to_json())
    writer = _Writer(out_dir, tokenizer, separator.decode(), mark)
    with writer:
        for i, source in enumerate(sources):
            if i >= mark.source:
                offset = mark.offset if i == mark.source else 0
                mark.source = i
                for n, (done, piece) in enumerate(_pieces(source, offset, separator)):
                    writer.add(piece)
                    mark.offset = done
                    progress(before + done, total)
                    if n % _PIECES_A_MARK == _PIECES_A_MARK - 1:
                        writer.flush()
                        state = {"request": request, "mark": asdict(mark)}
                        _replace(out_dir / _PROGRESS, json.dumps(state))
                writer.end_document()
                mark.source, mark.offset = i + 1, 0
                if _source(Path(source.path)) != source:
                    raise DataError(f"text file {source.path} changed while it was prepared")
            before += source.size
        writer.flush()
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
        "request": request,
        "files": {name: entry_of_file(out_dir / name) for name in (TOKENS, DOCUMENTS, TOKENIZER)},
    }
    _replace(out_dir / MANIFEST, json.dumps(fields, indent=2))
    (out_dir / _PROGRESS).unlink()


def _digest(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode("utf-8")).hexdigest()


class _Writer:
    """Appends the ids of texts, and ends of documents, to the two files, behind a mark."""

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, separator: str, mark: Mark) -> None:
        self._tokenizer, self._separator, self._mark = tokenizer, separator, mark
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

    def add(self, text: str) -> None:
        """Goes on with the text of a file."""
        self._mark.digest = _digest(self._mark.digest, text)
        if self._separator and self._mark.tokens == self._mark.ended:
            text = text.lstrip("\n")
        parts = re.split(f"{self._separator}+", text) if self._separator else [text]
        *ended, last = self._tokenizer.encode_batch(parts)
        for ids in ended:
            self._write(ids)
            self.end_document()
        self._write(last)

    def end_document(self) -> None:
        """Ends a document, if it has any token."""
        mark = self._mark
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
        self._mark.tokens += len(ids)
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
