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
from ..missing import REMOVED, find_extra, installing

INTERRUPTED = 130  # exit status of a command stopped by Ctrl-C
# The file of each command; only that of the command that runs is imported.
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
    """Run one command; without a command, show the help.

    Args:
        argv: arguments without the program's name; default: the process's own.

    Returns:
        0 = done, 1 = an error, reported in one line on stderr, 2 = wrong options, 130 = stopped by
        Ctrl-C.
    """
    try:
        words = (sys.argv[1:] if argv is None else argv) or ["--help"]
        arguments = build_parser(words[0]).parse_args(words)
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
    """Reports a wrong word in one line, with the closest valid one.

    Help is coloured on a terminal where rich-argparse is installed, or by Python 3.14.
    """

    def __init__(self, **options: Any) -> None:
        if rich := find_extra("rich_argparse"):
            options["formatter_class"] = rich.RichHelpFormatter
        super().__init__(**options)

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(x) for x in action.choices]
            closest = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {closest[0]!r}?" if closest else f"choose {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice {value!r}: {hint}")

    def _hint(self, word: str) -> str:
        """Suggest an option for an unknown one."""
        option = word.partition("=")[0]
        if closest := difflib.get_close_matches(option, self._option_string_actions, 1, 0.7):
            return f": did you mean {closest[0]}?"
        if "--set" in self._option_string_actions:
            return f"; a field of the model: --set {option[2:].replace('-', '_')}=VALUE"
        return ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Missing(argparse.Action):
    """An option whose package is not installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} {self.help}")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of one command, or of all commands where it names none."""
    parser = _Parser(
        prog="fastattn",
        description="Check and tune fused attention kernels; train and run small transformers.",
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="fastattn")
    files = [_FILES[command]] if command in _FILES else dict.fromkeys(_FILES.values())
    for file in files:
        importlib.import_module(f"..{file}", __name__).add(commands)
    if command not in _FILES:  # it needs all commands, and its import takes as long as they
        _add_completion(parser, commands)
    return parser


def _add_completion(parser: _Parser, commands: Any) -> None:
    shtab = find_extra("shtab")
    if shtab is None:
        text = f"needs the package shtab: {installing('gpt')}"
        parser.add_argument("--print-completion", metavar="SHELL", action=_Missing, help=text)
        return
    shtab.add_argument_to(parser, help="print a script that completes commands and options")
    paths = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE}
    for action in (x for one in commands.choices.values() for x in one._actions):
        if action.metavar in paths:
            action.complete = paths[action.metavar]


def say(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
