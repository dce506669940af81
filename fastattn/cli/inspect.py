"""`fastattn inspect`: draw a trained model's attention weights."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "inspect",
        help="draw the attention weights of a trained model",
        description="Draw the attention weights of every layer and head over a text into a PNG "
        "file, a row per query.",
    )
    parser.set_defaults(command=_inspect)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="folder of a run or of one checkpoint")
    add("--text", required=True, help="input of the model; the source of an encoder-decoder")
    text = "encoder-decoders: output of the decoder (default: its greedy translation)"
    add("--target", metavar="TEXT", help=text)
    add("--out", required=True, metavar="FILE", help="PNG file to write")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")


def _inspect(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import load_trained
    from ..training.maps import attention_maps, draw_maps
    from ..training.train_config import resolve_device

    device = resolve_device(arguments.device)
    trained = load_trained(arguments.checkpoint, device=device)
    maps = attention_maps(trained, arguments.text, target=arguments.target)
    draw_maps(maps, arguments.out)
    heads = sum(len(one.weights) for one in maps)
    sys.stdout.write(f"{heads} heads of {len(maps)} layers in {arguments.out}\n")
    return 0
