"""`fastattn tag` and `fastattn translate`: run trained encoders and encoder-decoders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SOURCES_AT_ONCE = 32


def add(commands: Any) -> None:
    """Add both commands to the parser's subcommands."""
    parser = commands.add_parser(
        "tag",
        help="tag words with a trained encoder",
        description="Write one word of a text a line, with its tag; an empty line ends "
        "a sentence. Words are Python's tokens for a model that was trained on the standard "
        "library, and words between spaces for others.",
    )
    parser.set_defaults(command=_tag)
    _add_input(parser)
    parser = commands.add_parser(
        "translate",
        help="translate texts with a trained encoder-decoder",
        description="Write the translations of all texts in order, one a line.",
    )
    parser.set_defaults(command=_translate)
    _add_input(parser, repeatable=True)
    parser.add_argument(
        "--beams",
        type=int,
        default=1,
        help="number of beams of a beam search (default: 1)",
    )
    parser.add_argument(
        "--truncate", action="store_true", help="cut texts that are too long for the model"
    )


def _add_input(parser: argparse.ArgumentParser, *, repeatable: bool = False) -> None:
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="folder of a run or of one checkpoint")
    one = parser.add_mutually_exclusive_group(required=True)
    if repeatable:
        one.add_argument("--text", action="append", help="a text; repeatable")
        one.add_argument("--file", metavar="FILE", help="UTF-8 file, one text a line")
    else:
        one.add_argument("--text", help="text to tag")
        one.add_argument("--file", metavar="FILE", help="UTF-8 file")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")


def _tag(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import load_trained
    from ..training.data.tagged_text import split_words
    from ..training.data.text import DataError, read_text_file
    from ..training.tasks.tagging import tag_words
    from ..training.train_config import resolve_device

    device = resolve_device(arguments.device)
    trained = load_trained(arguments.checkpoint, "tagger", device=device)
    name = "--text" if arguments.file is None else arguments.file
    text = arguments.text if arguments.file is None else read_text_file(Path(name))
    lines = list(split_words(text, name, python=trained.data["python"]))
    if not lines:
        raise DataError(f"{name}: there is no word to tag")
    for words in lines:
        tags = tag_words(
            trained.model,
            trained.tokenizer,
            words,
            tags=trained.data["tags"],
            context_length=trained.config.context_length,
        )
        rows = (f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True))
        sys.stdout.write("".join(rows) + "\n")
    return 0


def _translate(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import load_trained
    from ..training.tasks.translation import encode_texts, translate_tokens
    from ..training.train_config import resolve_device

    texts = list(_texts(arguments))
    device = resolve_device(arguments.device)
    trained = load_trained(arguments.checkpoint, "seq2seq", device=device)
    limit = trained.config.source_length
    sources = encode_texts(texts, trained.tokenizer, limit, truncate=arguments.truncate)
    for i in range(0, len(sources), _SOURCES_AT_ONCE):
        translations = translate_tokens(
            trained.model,
            trained.tokenizer,
            sources[i : i + _SOURCES_AT_ONCE],
            beams=arguments.beams,
        )
        # A translation must be one line.
        sys.stdout.writelines(f"{' '.join(text.split())}\n" for text in translations)
    return 0


def _texts(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield texts to translate, each with its file and line."""
    from ..files.text import read_lines

    if arguments.file is None:
        for i, text in enumerate(arguments.text, start=1):
            yield text, "--text" if len(arguments.text) == 1 else f"--text {i}"
        return
    for number, line in enumerate(read_lines(arguments.file), start=1):
        yield line, f"{arguments.file}:{number}"
