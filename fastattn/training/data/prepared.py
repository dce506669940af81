"""Token files: memory-mapped ids of a text, and the ends of its documents.

A folder that `fastattn prepare` has made holds

    prepared.json     counts and fingerprint
    tokens.bin        the ids, uint16, or uint32 for more than 65536 ids
    documents.bin     int64: for each document how many ids end with it
    tokenizer.json    the tokenizer
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.fields import check_type
from ..tokenizers import Tokenizer, load_tokenizer
from .text import DataError

TOKENS, DOCUMENTS, TOKENIZER = "tokens.bin", "documents.bin", "tokenizer.json"
MANIFEST, FORMAT = "prepared.json", {"format": "fastattn-prepared", "version": 1}
# Bytes an id by dtype, and the signed dtype that torch computes with.
_DTYPES = {"uint16": (2, torch.int16), "uint32": (4, torch.int32)}
_FIELDS = {"dtype": str, "tokens": int, "documents": int, "fingerprint": str}
_ENDS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class PreparedText:
    """Ids of a text in a folder, read from disk on demand.

    Args:
        folder: of the files.
        tokenizer: of the text.
        dtype: "uint16" or "uint32".
        tokens: number of ids, N.
        documents: number of documents.
        fingerprint: of ids, tokenizer and documents.
    """

    folder: Path
    tokenizer: Tokenizer
    dtype: str
    tokens: int
    documents: int
    fingerprint: str

    @classmethod
    def open(cls, folder: str | Path) -> PreparedText:
        """Open a folder made by `fastattn prepare`; check sizes, counts and document ends.

        Raises:
            DataError: it is missing or has another format, a file is truncated, or document ends do
                not rise.
        """
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            raise DataError(f"there is no prepared text in {folder}: it has no {MANIFEST}")
        try:
            fields: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if not isinstance(fields, dict) or not FORMAT.items() <= fields.items():
                raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
            for name, kind in {**_FIELDS, "vocab_size": int}.items():
                check_type(name, fields.get(name), kind)
            tokenizer = load_tokenizer(folder / TOKENIZER)
            made = cls(folder, tokenizer, **{name: fields[name] for name in _FIELDS})
            made._check(fields["vocab_size"])
        except (OSError, ValueError) as error:
            raise DataError(f"prepared text {folder}: {error}") from None
        return made

    def _check(self, vocab_size: int) -> None:
        """Raise ValueError unless the files fit the counts, and document ends rise to N."""
        if self.tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"{TOKENIZER} has {self.tokenizer.vocab_size} ids, expected {vocab_size}"
            )
        if self.dtype not in _DTYPES or min(self.tokens, self.documents) < 1:
            counts = f"{self.tokens} tokens of {self.documents} documents in {self.dtype}"
            raise ValueError(f"{MANIFEST} is corrupt: it says {counts}")
        sizes = {TOKENS: self.tokens * _DTYPES[self.dtype][0], DOCUMENTS: self.documents * 8}
        for name, expected in sizes.items():
            if (size := (self.folder / name).stat().st_size) != expected:
                raise ValueError(f"{name} is truncated: it has {size} bytes, expected {expected}")
        before = torch.zeros(1, dtype=torch.int64, device="cpu")
        ends = self._map(DOCUMENTS, self.documents, torch.int64)
        for part in torch.split(ends, _ENDS_AT_ONCE):
            if (part.diff(prepend=before) <= 0).any():
                raise ValueError(f"{DOCUMENTS} is corrupt: the ends of documents do not rise")
            before = part[-1:]
        if int(before) != self.tokens:
            raise ValueError(f"{DOCUMENTS} is corrupt: it ends at {int(before)} of {self.tokens}")

    @property
    def counts(self) -> tuple[int, int]:
        """Count the tokens for training, and for validation: the last tenth, at most a million."""
        # A tenth of a billion tokens would take long to evaluate and add little precision.
        validation = min(self.tokens // 10, 1_000_000)
        return self.tokens - validation, validation

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Read windows of ids, and nothing else.

        Args:
            starts: int64 [B], in [0, N - length].
            length: T.

        Returns:
            ids int64 [B, T], and their document numbers int32 [B, T], from 0 in each row.
        """
        size, signed = _DTYPES[self.dtype]
        # One memory map a call: pages of a lasting map would count as this process's memory.
        ids = self._map(TOKENS, self.tokens, signed)
        ends = self._map(DOCUMENTS, self.documents, torch.int64)
        rows = [ids[start : start + length].long() for start in starts.tolist()]
        tokens = torch.stack(rows) & (256**size - 1)
        places = starts[:, None] + torch.arange(length, device="cpu")
        documents = torch.searchsorted(ends, places, right=True)
        return tokens, (documents - documents[:, :1]).int()

    def _map(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self.folder / name), shared=False, size=count, dtype=dtype)
