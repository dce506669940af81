"""UTF-8 text files."""

import io
from pathlib import Path


class DataError(ValueError):
    """Error: a text cannot be read or used."""


def read_text_file(path: Path) -> str:
    """Read a UTF-8 file, drop a byte order mark; DataError if unreadable, empty or not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read text file {path}: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text file {path} is not UTF-8: byte 0x{content[error.start]:02x} "
            f"at offset {error.start}"
        ) from None
    if not text.strip():
        raise DataError(f"text file {path} is empty")
    return text


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of a file, ended by LF, CR LF or CR; errors as `read_text_file`."""
    lines = io.StringIO(read_text_file(Path(path)), newline=None).read()
    return lines.removesuffix("\n").split("\n")
