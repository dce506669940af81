"""Reading and splitting of text files, and their token tensors."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...checks import check_count
from ...files.text import DataError as DataError
from ...files.text import read_lines as read_lines
from ...files.text import read_text_file as read_text_file
from ..tokenizers.base import Tokenizer

# Parts of the standard library that are tests, tables or data.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data", "__pycache__", "site-packages", "dist-packages"),
}
_VALIDATION_FRACTION = 0.1


@dataclass(frozen=True)
class TextDataset:
    """Token ids of a text: int32 [N] of its first 90 %, to train on, and [M] of its last 10 %.

    fingerprint: SHA-256 of the text, in hexadecimal.
    """

    train: Tensor
    validation: Tensor
    fingerprint: str

    @classmethod
    def from_text(cls, text: str, tokenizer: Tokenizer, context_length: int) -> TextDataset:
        """Split and encode a text.

        Raises:
            DataError: a part is too short: training needs context_length + 1 tokens, validation
                two.
            TokenizerError: the tokenizer does not know a character of the text.
        """
        train, validation = (
            torch.tensor(tokenizer.encode(part), dtype=torch.int32, device="cpu")
            for part in split_text(text)
        )
        check_counts(len(train), len(validation), context_length)
        return cls(train, validation, fingerprint(text))

    @property
    def counts(self) -> tuple[int, int]:
        """Count the training and validation tokens."""
        return len(self.train), len(self.validation)

    @cached_property
    def _whole(self) -> Tensor:
        return torch.cat([self.train, self.validation])

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, None]:
        """Read windows, as `PreparedText.windows`, of one document."""
        return self._whole.unfold(0, length, 1)[starts].long(), None


def check_counts(train: int, validation: int, context_length: int) -> None:
    """Raise DataError if the parts are too short; see `TextDataset.from_text`."""
    check_count("context_length", context_length, 1)
    if train < context_length + 1 or validation < 2:
        raise DataError(
            f"the text is too short: it has {train} tokens for training and {validation} for "
            f"validation, but a context of {context_length} needs at least {context_length + 1} "
            "and 2"
        )


def read_text_files(paths: Iterable[str | Path]) -> str:
    """Read UTF-8 text files in order, with a line break after each but the last."""
    texts = [read_text_file(Path(path)) for path in paths]
    ended = [text if text.endswith("\n") else text + "\n" for text in texts[:-1]]
    return "".join(ended + texts[-1:])


def standard_library_text(max_characters: int = 2_000_000) -> str:
    """Read the source text of the standard library, a corpus without a download."""
    return "".join(standard_library_sources(max_characters).values())


def standard_library_sources(max_characters: int = 2_000_000) -> dict[str, str]:
    """Read the source text of the standard library, by file name.

    Takes whole ASCII files, without tests and tables, up to max_characters. A hash of their names
    orders the files, so that the last 10 % are of the same mix; one installation always gives the
    same text.

    Raises:
        DataError: the installation has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    }
    texts: dict[str, str] = {}
    total = 0
    for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest()):
        content = sources[name].read_bytes()
        if not content.isascii() or total + len(content) > max_characters:
            continue
        texts[name] = content.decode("ascii")
        total += len(content)
    if not texts:
        raise DataError(f"no Python source in {root}: name text files with --text")
    return texts


def split_text(text: str) -> tuple[str, str]:
    """Split a text: the first 90 % for training, the last 10 % for validation."""
    cut = int(len(text) * (1 - _VALIDATION_FRACTION))
    return text[:cut], text[cut:]


def fingerprint(text: str) -> str:
    """Compute the SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
