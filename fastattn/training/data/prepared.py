"""Token files: memory-mapped ids of a text, and the ends of its documents.

A folder that `fastattn prepare` has made holds

    prepared.json     counts, and size and SHA-256 of the files below
    tokens.bin        the ids, little-endian uint16, or uint32 for more than 65536 ids
    documents.bin     little-endian int64: for each document how many ids end with it
    tokenizer.json    the tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.fields import check_type
from ..storage import CheckpointError, entry_of_file, file_in, read_json
from ..tokenizers import Tokenizer, from_json
from .text import DataError

TOKENS, DOCUMENTS, TOKENIZER, MANIFEST = (
    *("tokens.bin", "documents.bin", "tokenizer.json"),
    "prepared.json",
)
FORMAT, VERSION = "fastattn-prepared", 1
# Bytes an id by dtype, and the signed dtype that torch computes with.
DTYPES: Mapping[str, tuple[int, torch.dtype]] = {
    "uint16": (2, torch.int16),
    "uint32": (4, torch.int32),
}
DOCUMENT_BYTES = 8
_ENDS_AT_ONCE = 1 << 20

_FIELDS: Mapping[str, Any] = {
    "dtype": str,
    "tokens": int,
    "documents": int,
    "vocab_size": int,
    "fingerprint": str,
    "files": Mapping,
}


@dataclass(frozen=True)
class PreparedText:
    """Ids of a text in a folder, read from disk on demand.

    Args:
        folder: of the files.
        tokenizer: of the text.
        dtype: "uint16" or "uint32".
        tokens: number of ids, N.
        documents: number of documents.
        fingerprint: of text, tokenizer and documents.
        files: size in bytes and SHA-256 of each file.
        skipped: number of text files left out because they are not UTF-8.
        replaced: number of characters that replace bytes that are not UTF-8.
    """

    folder: Path
    tokenizer: Tokenizer
    dtype: str
    tokens: int
    documents: int
    fingerprint: str
    files: Mapping[str, Mapping[str, Any]]
    skipped: int = 0
    replaced: int = 0

    @classmethod
    def open(cls, folder: str | Path) -> PreparedText:
        """Opens a folder made by `fastattn prepare`, and checks sizes, counts and document ends.

        Raises:
            DataError: it is missing, unfinished or of another format, a file is truncated, or
                document ends do not rise.
        """
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            raise DataError(
                f"there is no prepared text in {folder}: it has no {MANIFEST}, which fastattn "
                "prepare writes last"
            )
        try:
            fields = _read_manifest(folder)
            text = file_in(folder, TOKENIZER).read_text(encoding="utf-8")
            tokenizer = from_json(text, source=str(folder / TOKENIZER))
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            raise DataError(f"prepared text {folder}: {error}") from None
        if tokenizer.vocab_size != fields["vocab_size"]:
            raise DataError(
                f"{folder / TOKENIZER} has {tokenizer.vocab_size} ids, the text was prepared with "
                f"{fields['vocab_size']}"
            )
        names = ("dtype", "tokens", "documents", "fingerprint", "files")
        counts = (fields.get(name, 0) for name in ("skipped", "replaced"))
        prepared = cls(folder, tokenizer, *(fields[name] for name in names), *counts)
        prepared._check_documents()
        return prepared

    def check(self) -> None:
        """Reads every file; raises DataError if its digest has changed since it was prepared."""
        for name, entry in self.files.items():
            if entry_of_file(self.folder / name)["sha256"] != entry["sha256"]:
                raise DataError(f"{self.folder / name} has changed: its SHA-256 is another one")

    def _check_documents(self) -> None:
        """Raises DataError unless every document ends behind the one before it, the last at N."""
        ends = _map(self.folder / DOCUMENTS, self.documents, torch.int64)
        done = before = 0
        for part in torch.split(ends, _ENDS_AT_ONCE):
            wrong = part.diff(prepend=torch.tensor([before], device="cpu")) <= 0
            if wrong.any():
                at = int(wrong.nonzero()[0])
                last = int(part[at - 1]) if at else before
                raise DataError(
                    f"{self.folder / DOCUMENTS} is corrupt: document {done + at} ends at "
                    f"{int(part[at])}, and the one before it at {last}"
                )
            done, before = done + len(part), int(part[-1])
        if before != self.tokens:
            raise DataError(
                f"{self.folder / DOCUMENTS} is corrupt: its last document ends at {before}, "
                f"and there are {self.tokens} ids"
            )

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens to train on, and for validation: the last tenth, a million at most."""
        # A tenth of a billion tokens would take long to evaluate and add little precision.
        validation = min(self.tokens // 10, 1_000_000)
        return self.tokens - validation, validation

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Windows of ids; only these are read.

        Args:
            starts: int64 [B], in [0, N - length].
            length: T.

        Returns:
            ids int64 [B, T], and their document numbers int32 [B, T], from 0 in each row.
        """
        size, signed = DTYPES[self.dtype]
        # One memory map a call: pages of a lasting map would count as this process's memory.
        ids = _map(self.folder / TOKENS, self.tokens, signed)
        ends = _map(self.folder / DOCUMENTS, self.documents, torch.int64)
        rows = [ids[start : start + length].long() for start in starts.tolist()]
        tokens = torch.stack(rows) & (256**size - 1)
        places = starts[:, None] + torch.arange(length, device="cpu")
        documents = torch.searchsorted(ends, places, right=True)
        return tokens, (documents - documents[:, :1]).int()


def _map(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Raises DataError or CheckpointError on an unusable manifest or file."""
    path = file_in(folder, MANIFEST)
    fields = read_json(path)
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise DataError(
            f"{path} is not of format {FORMAT} {VERSION}: it says {fields.get('format')!r} "
            f"{fields.get('version')!r}"
        )
    try:
        for name, kind in _FIELDS.items():
            check_type(name, fields.get(name), kind)
        for name in ("tokens", "documents"):
            if fields[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {fields[name]}")
        for name in (TOKENS, DOCUMENTS, TOKENIZER):
            check_type(f"files.{name}", fields["files"].get(name), Mapping)
            for key, kind in (("bytes", int), ("sha256", str)):
                check_type(f"files.{name}.{key}", fields["files"][name].get(key), kind)
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from None
    if fields["dtype"] not in DTYPES:
        choices = " or ".join(DTYPES)
        raise DataError(f"{path} is corrupt: dtype must be {choices}, got {fields['dtype']!r}")
    sizes = {
        TOKENS: fields["tokens"] * DTYPES[fields["dtype"]][0],
        DOCUMENTS: fields["documents"] * DOCUMENT_BYTES,
        TOKENIZER: fields["files"][TOKENIZER]["bytes"],
    }
    for name, expected in sizes.items():
        size = file_in(folder, name).stat().st_size
        if size != expected:
            raise DataError(
                f"{folder / name} is truncated or changed: it has {size} bytes, expected {expected}"
            )
    return fields
