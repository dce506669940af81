"""The `fastattn` command. Each of its commands is a thin call into the packages.

Torch and what needs it are imported by the command that uses them, so that wrong options are
answered at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from .cli_bench import add_bench
from .cli_convert import add_convert
from .cli_generate import add_generate

_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; default: the process's own.

    Returns:
        0 = done, 1 = an error that one line on stderr tells, 2 = wrong options, 130 = stopped by
        Ctrl-C.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:
        # The reader has left. What is still buffered must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        _say(f"fastattn: error: {' '.join(str(error).split())}")
        return 1
    except KeyboardInterrupt:
        _say("fastattn: interrupted")
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastattn", description="Fused attention in Triton, with a small GPT.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    add_generate(commands)
    info = commands.add_parser("info", help="show devices, backends and versions")
    info.set_defaults(command=_info)
    add_bench(commands)
    add_convert(commands)
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a GPT on text files",
        description="Train a GPT on text. Without --text the corpus is the source text of this "
        "Python's standard library.",
        # An option that is not given must not contradict the run that --resume continues.
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=_train)
    run = parser.add_argument_group("run")
    run.add_argument("--out", default="runs/gpt", help="the run's folder (runs/gpt)")
    run.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="continue the run in --out with its own options; start it if there is none",
    )
    # A dest is the options' part and field that fastattn.training.run.Options keeps them under.
    data = parser.add_argument_group("text")
    data.add_argument(
        "--text", dest="data.text", nargs="+", type=os.path.abspath, metavar="FILE", help="UTF-8"
    )
    data.add_argument(
        "--tokenizer", dest="data.tokenizer", help="char (default), bpe or a tokenizer's JSON file"
    )
    data.add_argument("--vocab-size", dest="data.vocab_size", type=int, help="for bpe (1024)")
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))


def _add_model_options(group: Any) -> None:
    def add(option: str, field: str, text: str, to: Any = group, **keywords: Any) -> None:
        to.add_argument(option, dest=f"model.{field}", help=text, **keywords)

    add("--layers", "num_layers", "(4)", type=int)
    add("--heads", "num_heads", "query heads (4)", type=int)
    add("--kv-heads", "num_kv_heads", "key/value heads (as many as query heads)", type=int)
    add("--embed-dim", "embed_dim", "width (128)", type=int)
    add("--context", "context_length", "tokens (64)", type=int)
    one = group.add_mutually_exclusive_group()
    known = ("learned", "rotary", "alibi")
    add("--positions", "positions", "(learned)", to=one, choices=known)
    text = "the same as --positions alibi: lower scores in proportion to the distance"
    add("--alibi", "positions", text, to=one, action="store_const", const="alibi")
    add("--window", "window", "keys a token sees, itself included (all)", type=int)
    add("--keep-first", "keep_first", "first keys that stay visible beside --window (0)", type=int)
    add("--softcap", "softcap", "bound of the attention scores (none)", type=float)
    add("--sinks", "sinks", "learn a share of attention that goes nowhere", action="store_true")
    add("--qk-norm", "qk_norm", "normalise queries and keys", action="store_true")
    add("--dropout", "dropout", "of embeddings and outputs of layers (0)", type=float)
    add("--attention-dropout", "attention_dropout", "of attention weights (0)", type=float)
    add("--bias", "bias", "give linear layers and norms a bias", action="store_true")


def _add_training_options(group: Any) -> None:
    def add(option: str, field: str, text: str, **keywords: Any) -> None:
        group.add_argument(option, dest=f"training.{field}", help=text, **keywords)

    add("--steps", "steps", "optimizer steps (2000)", type=int)
    add("--batch", "batch_size", "windows a forward pass (12)", type=int)
    add("--accumulate", "accumulation", "forward passes a step (1)", type=int)
    add("--lr", "learning_rate", "highest learning rate (3e-3)", type=float)
    add("--min-lr", "min_learning_rate", "learning rate at the end (a tenth)", type=float)
    add("--warmup", "warmup_steps", "steps of rising learning rate (5 %% of steps)", type=int)
    add("--weight-decay", "weight_decay", "(0.1)", type=float)
    add("--grad-clip", "grad_clip", "largest gradient norm, 0 = any (1)", type=float)
    add("--seed", "seed", "(0)", type=int)
    add("--device", "device", "auto (default), cpu, cuda or cuda:<index>")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", "dtype", "of activations (auto)", choices=dtypes)
    add("--compile", "compile", "use torch.compile", action="store_true")
    add("--log-every", "log_interval", "steps (10)", type=int)
    add("--eval-every", "eval_interval", "steps (250)", type=int)
    add("--save-every", "checkpoint_interval", "steps (500)", type=int)


def _train(arguments: argparse.Namespace) -> int:
    from .training.checkpoint import latest_checkpoint
    from .training.run import Options, train

    parts: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "data": {}}
    for name, value in vars(arguments).items():
        part, _, field = name.partition(".")
        if field:
            parts[part][field] = tuple(value) if isinstance(value, list) else value
    try:
        with _stop_signals() as stop:
            result = train(
                Options(**parts), arguments.out, resume=arguments.resume, should_stop=stop, say=_say
            )
    except KeyboardInterrupt:
        _say(f"interrupted: {latest_checkpoint(arguments.out) or 'nothing'} is kept")
        return _INTERRUPTED
    if not result.finished:
        _say(
            f"stopped at step {result.step}: {result.checkpoint} is kept; "
            f"fastattn train --out {arguments.out} --resume goes on"
        )
        return _INTERRUPTED
    sys.stdout.write(f"validation loss {result.validation_loss:.4f} over the whole split\n")
    if result.tokens_per_second:
        sys.stdout.write(f"{result.tokens_per_second:,.0f} tokens/s while training\n")
    sys.stdout.write(f"checkpoint {result.checkpoint}\n")
    sys.stdout.write(f"loss curve {os.path.join(arguments.out, 'loss.png')}\n")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    import torch

    from . import explain

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


class _Stop:
    """Asked for by a first signal and granted between two steps; a second signal is at once."""

    def __init__(self) -> None:
        self._asked = self._heard = False

    def __call__(self) -> bool:
        self._heard = True
        return self._asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked or not self._heard:
            raise KeyboardInterrupt
        self._asked = True
        # On a terminal the cursor stands behind the progress bar.
        start = "\n" if sys.stderr.isatty() else ""
        _say(f"{start}stopping after this step (once more to stop at once)")


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turns Ctrl-C and SIGTERM into a stop between two steps, while the block runs."""
    stop = _Stop()
    before = {
        number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
