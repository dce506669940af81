"""`fastattn import-hf`, `export-hf`, `import-nanogpt`: convert checkpoints."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the commands to the parser's subcommands."""
    parser = commands.add_parser(
        "import-hf",
        help="convert a Hugging Face GPT-2 to a checkpoint",
        description="Convert a GPT-2 that Hugging Face transformers saved, a folder with "
        "config.json, model.safetensors and a tokenizer, to a checkpoint.",
    )
    parser.set_defaults(command=_import_hf)
    parser.add_argument("folder", metavar="DIR", help="folder of the GPT-2")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the new run")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer's JSON file (default: that of DIR)"
    )

    parser = commands.add_parser("export-hf", help="convert a checkpoint to a Hugging Face GPT-2")
    parser.set_defaults(command=_export_hf)
    text = "folder of a run or of one checkpoint"
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help=text)
    parser.add_argument("folder", metavar="DIR", help="folder to write")

    parser = commands.add_parser(
        "import-nanogpt",
        help="convert nanoGPT's ckpt.pt to a checkpoint",
        description="Convert nanoGPT's ckpt.pt to a checkpoint, running no code from the file.",
    )
    parser.set_defaults(command=_import_nanogpt)
    parser.add_argument("file", metavar="FILE", help="ckpt.pt")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the new run")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--tokenizer", metavar="FILE", help="a tokenizer's JSON, such as GPT-2's")
    text = "text that a character model was trained on"
    one.add_argument("--text", metavar="FILE", help=text)


def _import_hf(arguments: argparse.Namespace) -> int:
    from ..training.convert import import_hf

    made = import_hf(arguments.folder, arguments.out, tokenizer=arguments.tokenizer)
    sys.stdout.write(f"checkpoint {made}\n")
    return 0


def _export_hf(arguments: argparse.Namespace) -> int:
    from ..training.convert import export_hf

    sys.stdout.write(f"model {export_hf(arguments.checkpoint, arguments.folder)}\n")
    return 0


def _import_nanogpt(arguments: argparse.Namespace) -> int:
    from ..training.convert import import_nanogpt

    made = import_nanogpt(
        arguments.file, arguments.out, tokenizer=arguments.tokenizer, text=arguments.text
    )
    sys.stdout.write(f"checkpoint {made}\n")
    return 0
