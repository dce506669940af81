"""The `fastattn` command. Each of its commands is a thin call into the packages.

Torch and what needs it are imported by the command that uses them, so that wrong options are
answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .bench import add_bench
from .convert import add_convert
from .generate import add_generate
from .inspect import add_inspect
from .tasks import add_tag, add_translate
from .train import INTERRUPTED, add_train, say
from .tune import add_tune
from .verify import add_verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; default: the process's own.

    Returns:
        0 = done, 1 = an error, reported in one line on stderr, 2 = wrong options, 130 = stopped by
        Ctrl-C.
    """
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:
        # The reader has left. What is still buffered must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        say(f"fastattn: error: {' '.join(str(error).split())}")
        return 1
    except KeyboardInterrupt:
        say("fastattn: interrupted")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastattn", description="Fused attention in Triton, with small transformers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_generate(commands)
    add_tag(commands)
    add_translate(commands)
    add_inspect(commands)
    info = commands.add_parser("info", help="show devices, backends and versions")
    info.set_defaults(command=_info)
    add_verify(commands)
    add_tune(commands)
    add_bench(commands)
    add_convert(commands)
    return parser


def _info(arguments: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    import torch

    from .. import explain

    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in ("fastattn", "torch", "triton", "einops", "tokenizers", "safetensors"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in (*devices, torch.device("cpu")):
        lines.append(f"{device}: {_device_name(device)}")
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype)
            try:
                why = str(explain(q, q, q, causal=True))
            except ValueError as error:
                why = str(error)
            lines += [f"  {str(dtype).removeprefix('torch.')}", *_indented(why, 4)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return (
        f"{properties.name}, compute capability {capability}, {properties.total_memory >> 20} MiB"
    )


def _indented(text: str, width: int) -> list[str]:
    return [" " * width + line for line in text.splitlines()]
