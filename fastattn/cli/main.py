"""The `fastattn` command.

Each subcommand imports torch itself, so that wrong options are reported at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..removed import REMOVED
from .bench import add_bench
from .convert import add_convert
from .generate import add_generate
from .info import add_info
from .inspect import add_inspect
from .prepare import add_prepare
from .tasks import add_tag, add_translate
from .train import INTERRUPTED, add_train, say
from .tune import add_tune
from .verify import add_verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

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
        # The reader of the pipe has closed it. Drop the buffer, which exit would write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        say(f"fastattn: error: {' '.join(str(error).split())}")
        return getattr(error, "exit_status", 1)
    except KeyboardInterrupt:
        say("fastattn: interrupted")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line, with the closest valid one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hints = []
            for word in (word for word in unknown if word.startswith("--")):
                option = word.partition("=")[0]
                if instead := REMOVED.get(f"{self.prog.removeprefix('fastattn ')} {option}"):
                    hints += [f"; {option} was removed: {instead}"]
                    continue
                closest = difflib.get_close_matches(option, self._option_string_actions, 1)
                hints += [f"; the closest to {word} is {closest[0]}"] if closest else []
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        for action in self._actions:
            # An empty path would be the current folder.
            if action.metavar in ("DIR", "FILE") and getattr(parsed, action.dest, None) == "":
                name = "/".join(action.option_strings) or action.dest
                self.error(f"argument {name}: a path must not be empty (.: the current folder)")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastattn", description="Fused attention in Triton, with small transformers."
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_prepare(commands)
    add_train(commands)
    add_generate(commands)
    add_tag(commands)
    add_translate(commands)
    add_inspect(commands)
    add_info(commands)
    add_verify(commands)
    add_tune(commands)
    add_bench(commands)
    add_convert(commands)
    return parser
