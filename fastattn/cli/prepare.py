"""`fastattn prepare`: tokenize text files, for `fastattn train --data`."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from .main import INTERRUPTED, say


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "prepare",
        help="tokenize texts larger than memory, for fastattn train --data",
        description="Tokenize text files into token files, for fastattn train --data.",
    )
    parser.set_defaults(command=_prepare)
    add = parser.add_argument
    text = "UTF-8 text files, and folders of them"
    add("--text", nargs="+", required=True, metavar="PATH", help=text)
    add("--out", required=True, metavar="DIR", help="folder of the token files")
    text = (
        "tokenizer, as for fastattn train (default: bpe), trained on the first 10 MB of the text "
    )
    text += "(char: on all of it)"
    add("--tokenizer", default="bpe", metavar="NAME", help=text)
    text = "size of the vocabulary to train, except for char (default: 1024)"
    add("--vocab-size", type=int, default=1024, metavar="N", help=text)
    text = "a document, which attends only to itself: a file (default), a line, or a paragraph, "
    text += "which an empty line ends"
    add("--documents", choices=("file", "line", "paragraph"), default="file", help=text)
    text = (
        "a file that is not UTF-8: stop and leave nothing (strict, default), or read wrong bytes "
    )
    text += "as U+FFFD (replace)"
    add("--errors", choices=("strict", "replace"), default="strict", help=text)


def _prepare(arguments: argparse.Namespace) -> int:
    from ..training.data.prepare import prepare
    from ..training.metrics import Bar

    far = "the first bytes"

    def show(done: int, total: int) -> None:
        nonlocal far
        far = f"{done:,} of {total:,} bytes"
        bar.move(done, total, far)

    say(f"tokenizing {', '.join(arguments.text)} into {arguments.out}")
    bar = Bar(unit="B", unit_scale=True)
    names = ("tokenizer", "vocab_size", "documents", "errors")
    options = {name: getattr(arguments, name) for name in names}
    try:
        with closing(bar):
            made = prepare(arguments.text, arguments.out, progress=show, **options)
    except KeyboardInterrupt:
        say(f"fastattn: interrupted after {far}; nothing is left; run the same command again")
        return INTERRUPTED
    sys.stdout.write(
        f"{made.tokens:,} tokens of {made.documents:,} documents in {made.folder}, {made.dtype}\n"
        f"vocabulary of {made.tokenizer.vocab_size:,}, fingerprint {made.fingerprint}\n"
    )
    return 0
