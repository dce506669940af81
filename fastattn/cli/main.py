"""The `fastattn` command.

Each subcommand imports torch itself, so that wrong options are reported at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..missing import REMOVED

INTERRUPTED = 130  # exit status of a command stopped by Ctrl-C
# The file that adds each command, loaded only for the one that runs.
_FILES = {
    "prepare": "prepare",
    "train": "train",
    "generate": "generate",
    "tag": "tasks",
    "translate": "tasks",
    "inspect": "inspect",
    "info": "info",
    "verify": "verify",
    "tune": "tune",
    "bench": "bench",
    "import-hf": "convert",
    "export-hf": "convert",
    "import-nanogpt": "convert",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; default: the process's own.

    Returns:
        0 = done, 1 = an error, reported in one line on stderr, 2 = wrong options, 130 = stopped by
        Ctrl-C.
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        arguments = build_parser(words[0] if words else None).parse_args(argv)
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
        for word in args or ():
            command = self.prog.partition(" ")[2]
            option = word.partition("=")[0]
            if instead := REMOVED.get(f"{command} {option}"):
                self.error(f"{option} was removed: {instead}")
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hints = [self._hint(word) for word in unknown if word.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        for action in self._actions:
            # An empty path would be the current folder.
            if action.metavar in ("DIR", "FILE") and getattr(parsed, action.dest, None) == "":
                name = "/".join(action.option_strings) or action.dest
                self.error(f"argument {name}: a path must not be empty (.: the current folder)")
        return parsed, unknown

    def _hint(self, word: str) -> str:
        """Suggest an option for an unknown one."""
        option = word.partition("=")[0]
        if closest := difflib.get_close_matches(option, self._option_string_actions, 1, 0.7):
            return f"; the closest to {option} is {closest[0]}"
        if "--set" in self._option_string_actions:
            return f"; a field of the model: --set {option[2:].replace('-', '_')}=VALUE"
        return ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all where there is no such."""
    parser = _Parser(
        prog="fastattn", description="Fused attention in Triton, with small transformers."
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    files = [_FILES[command]] if command in _FILES else dict.fromkeys(_FILES.values())
    for file in files:
        importlib.import_module(f"..{file}", __name__).add(commands)
    return parser


def say(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
