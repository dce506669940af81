"""Text files in pieces of a bounded size, each a whole number of characters."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from .text import DataError

# Texts are encoded one a core: many pieces make up a batch.
PIECE_BYTES = 1 << 15
_CHECK_BYTES = 1 << 20
Errors = Literal["strict", "replace", "skip"]
# What becomes of bytes that are no UTF-8.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Source:
    """A text file that is prepared, as it was when that began."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: str | Path) -> Source:
        """The file at a path."""
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read text file {path}: {error.strerror}") from None
        return cls(str(Path(path).resolve()), found.st_size, found.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raises DataError if the file is another one by now."""
        if Source.of(self.path) != self:
            raise DataError(f"text file {self.path} changed while it was prepared")


@dataclass(frozen=True)
class Piece:
    """A part of a text file.

    Args:
        text: of it; a byte order mark at the file's beginning is left out.
        end: the offset behind it in the file, in bytes.
        last: nothing of the file follows. The last piece may be empty.
        replaced: how many characters of the text stand for bytes that are no UTF-8.
    """

    text: str
    end: int
    last: bool
    replaced: int


def read_pieces(
    source: Source, offset: int = 0, separator: bytes = b"\n", errors: Errors = "strict"
) -> Iterator[Piece]:
    """Read a file from an offset on; pieces end with a separator where they have one."""
    path = source.path
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            last = False
            while not last:
                content = _next_bytes(file, separator)
                begin, offset = offset, offset + len(content)
                last = offset >= source.size or not content
                if begin == 0:
                    content = content.removeprefix(codecs.BOM_UTF8)
                text = content.decode("utf-8", "replace" if errors == "replace" else "strict")
                replaced = text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
                yield Piece(text, offset, last, replaced)
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, error, offset - len(error.object))) from None
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None


def _next_bytes(file: BinaryIO, separator: bytes) -> bytes:
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


def not_utf8(sources: Sequence[Source]) -> dict[int, str]:
    """Which files are not UTF-8: by number, the sentence that says where.

    All are read, a part at a time.
    """
    found = {}
    for i, source in enumerate(sources):
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        try:
            with open(source.path, "rb") as file:
                while content := file.read(_CHECK_BYTES):
                    offset += len(content)
                    decoder.decode(content)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            found[i] = _not_utf8(source.path, error, offset - len(error.object))
        except OSError as error:
            raise DataError(f"cannot read text file {source.path}: {error.strerror}") from None
    return found


def _not_utf8(path: str, error: UnicodeDecodeError, begin: int) -> str:
    """The sentence about a file's first wrong byte. begin: offset of the bytes of the error."""
    at = f"byte 0x{error.object[error.start]:02x} at offset {begin + error.start}"
    return f"text file {path} is not UTF-8: {at}"
