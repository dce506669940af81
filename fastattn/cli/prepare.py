"""`fastattn prepare`: text files to token files, for `fastattn train --data`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .main import say


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "prepare",
        help="make token files of texts, for training on more text than fits in memory",
        description="Make token files of text files, for fastattn train --data.",
    )
    parser.set_defaults(command=_prepare)
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE", help="UTF-8 text files")
    text = "file of paths, one a line, -: standard input; for more files than a command line "
    text += "holds"
    add("--files-from", metavar="FILE", help=text)
    add("--out", required=True, metavar="DIR", help="folder of the token files")
    text = "tokenizer as of fastattn train (default: bpe), trained on the first 10 MB of the text "
    text += "(char: on all of it)"
    add("--tokenizer", default="bpe", metavar="NAME", help=text)
    text = "size of the vocabulary to train, except for char (default: 1024)"
    add("--vocab-size", type=int, default=1024, metavar="N", help=text)
    text = "unit of a document, which attends only to itself: a file (default), a line, or a "
    text += "paragraph, which an empty line ends"
    add("--documents", choices=("file", "line", "paragraph"), default="file", help=text)
    text = (
        "files that are not UTF-8: stop and leave nothing (strict, default), read wrong bytes as "
    )
    text += "U+FFFD (replace), or leave the file out (skip)"
    add("--errors", choices=("strict", "replace", "skip"), default="strict", help=text)
    text = "without --text: compare the token files in --out with their digests"
    add("--check", action="store_true", help=text)


def _prepare(arguments: argparse.Namespace) -> int:
    listed = arguments.files_from is not None
    if arguments.check == (listed or bool(arguments.text)):
        raise ValueError("prepare takes --text FILE ..., --files-from FILE or both, or --check")
    texts = [*(arguments.text or ()), *(_listed(arguments.files_from) if listed else ())]
    from ..training.data.prepare import prepare
    from ..training.data.prepared import PreparedText

    if arguments.check:
        made = PreparedText.open(arguments.out)
        made.check()
    else:
        from ..training.extras import find_extra

        tqdm = find_extra("tqdm") if sys.stderr.isatty() else None
        bar = None if tqdm is None else tqdm.tqdm(unit="B", unit_scale=True, dynamic_ncols=True)
        with nullcontext() if bar is None else bar:

            def show(done: int, total: int) -> None:
                if bar is not None:
                    bar.total = total
                    bar.update(done - bar.n)

            made = prepare(
                texts,
                arguments.out,
                tokenizer=arguments.tokenizer,
                vocab_size=arguments.vocab_size,
                documents=arguments.documents,
                errors=arguments.errors,
                progress=show,
                say=say,
            )
    sys.stdout.write(
        f"{made.tokens:,} tokens of {made.documents:,} documents in {made.folder}, {made.dtype}\n"
        f"vocabulary of {made.tokenizer.vocab_size:,}, fingerprint {made.fingerprint}\n"
    )
    if made.skipped:
        sys.stdout.write(f"{made.skipped:,} files that are not UTF-8 left out\n")
    if made.replaced:
        sys.stdout.write(f"{made.replaced:,} characters in place of bytes that are not UTF-8\n")
    return 0


def _listed(path: str) -> list[str]:
    """The paths in a file, one a line, in the file system's encoding."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the list of files {path}: {error.strerror}") from None
    paths = [os.fsdecode(line) for line in content.splitlines() if line]
    if not paths:
        raise ValueError(f"the list of files {path} is empty")
    return paths
