"""`fastattn train`: train a GPT, an encoder or an encoder-decoder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..training.train_config import DataConfig, TrainConfig
from .main import INTERRUPTED, say

MODELS = ("gpt", "encoder", "seq2seq")
TASKS = ("language", "tagging", "masked", "translation")
# Options for fields of the model's configuration; --set sets the others.
_MODEL = {
    "--preset": (
        "preset",
        "published configuration, such as gpt2-small; options override it",
    ),
    "--layers": ("num_layers", "number of layers (default: 4)"),
    "--heads": ("num_heads", "query heads (default: 4)"),
    "--kv-heads": ("num_kv_heads", "key/value heads (default: --heads)"),
    "--embed-dim": ("embed_dim", "width of the model (default: 128)"),
    "--hidden-dim": ("hidden_dim", "width of the MLP (default: 4 x --embed-dim)"),
    "--context": ("context_length", "gpt, encoder: tokens of the context (default: 64)"),
    "--decoder-layers": (
        "num_decoder_layers",
        "seq2seq: decoder layers (default: --layers)",
    ),
    "--source-length": ("source_length", "seq2seq: tokens of the source (default: 64)"),
    "--target-length": ("target_length", "seq2seq: tokens of the target (default: 64)"),
    "--dropout": ("dropout", "dropout of embeddings and layer outputs (default: 0)"),
    "--positions": (
        "positions",
        "learned (default), sinusoidal, rotary, alibi, scalar, content, transformer_xl or none",
    ),
    "--window": (
        "window",
        "sliding window, the token itself included (default: all keys)",
    ),
    "--block": ("block", "order of norm, attention and MLP: pre (default), post or parallel"),
    "--norm": ("norm", "layernorm (default) or rmsnorm"),
    "--ffn": (
        "activation",
        "MLP activation: relu, gelu (default), gelu_tanh, geglu or swiglu",
    ),
}


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "train",
        help="train a GPT, an encoder or an encoder-decoder",
        description="Train a model. Without --text the data are this Python's standard "
        "library: its source text to continue (gpt) or to fill in (encoder, masked), its tokens "
        "with their tags (encoder, tagging), its docstrings with the names of their functions "
        "(seq2seq). Under torchrun --nproc-per-node N -m fastattn train ... batches are split over "
        "the ranks.",
        # No defaults here: a missing option must not contradict a resumed run.
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=_train)
    run = parser.add_argument_group("run")
    run.add_argument("--model", choices=MODELS, help="kind of model (default: gpt)")
    run.add_argument(
        "--task",
        choices=TASKS,
        help="task of an encoder: tagging (default) or masked; other models have one task",
    )
    run.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/<model>)")
    run.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="continue the run in --out with its saved options, to --steps if given; start a run "
        "if there is none",
    )
    _add_settings(parser.add_argument_group("data"), "data", DataConfig)
    model = parser.add_argument_group("model")
    for option, (field, help) in _MODEL.items():
        name = option[2:].upper()
        model.add_argument(option, dest=f"model.{field}", metavar=name, type=_value, help=help)
    model.add_argument(
        "--set",
        dest="set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another field of the model's configuration, such as softcap=30 or sinks=true; "
        "repeatable",
    )
    _add_settings(parser.add_argument_group("training"), "training", TrainConfig)


def _add_settings(group: Any, part: str, config: type) -> None:
    """Add an option for each field of a configuration, with the field's help and type."""
    kinds = get_type_hints(config)
    for field in dataclasses.fields(config):
        about, kind = field.metadata, kinds[field.name]
        flag = about["flag"] or "--" + field.name.replace("_", "-")
        name, how = about["path"] or flag[2:].upper(), {"help": about["help"]}
        if kind is bool:
            how["action"] = "store_true"
        else:
            if field.default not in (None, ()):
                how["help"] += f" (default: {field.default})"
            kinds_of = (kind, *get_args(kind))
            one = next((x for x in (int, float) if x in kinds_of), str)
            how |= {"type": os.path.abspath if about["path"] else one, "metavar": name}
            how |= {"nargs": "+"} if field.default == () else {}
            if texts := [x for x in kinds_of if get_origin(x) is Literal]:
                how["choices"], how["metavar"] = get_args(texts[0]), None
        group.add_argument(flag, dest=f"{part}.{field.name}", **how)


def _value(text: str) -> Any:
    """Parse a JSON value; other text is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _options(chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort options by part and field, from dests such as "training.steps"."""
    parts: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "data": {}}
    for name, value in chosen.items():
        part, _, field = name.partition(".")
        if field:
            parts[part][field] = tuple(value) if isinstance(value, list) else value
    for text in chosen["set"]:
        field, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set must be FIELD=VALUE, such as tie_weights=false, got {text!r}")
        if field in parts["model"]:
            raise ValueError(f"{field} is set twice, the second time by --set {text}")
        parts["model"][field] = _value(value)
    return parts


def _train(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import latest_checkpoint
    from ..training.run import Options, train

    chosen = vars(arguments)
    kind = None
    if "model" in chosen or "task" in chosen:
        from ..training.tasks.kinds import find_kind

        kind = find_kind(chosen.get("model"), chosen.get("task"))
    out = chosen.get("out", os.path.join("runs", "gpt" if kind is None else kind.model))
    options = Options(**_options(chosen), kind=None if kind is None else kind.name)
    first = os.environ.get("RANK", "0") == "0"
    try:
        with _Stop() as stop:
            result = train(options, out, resume=arguments.resume, should_stop=stop, say=say)
    except KeyboardInterrupt:
        if first:
            say(f"interrupted: {latest_checkpoint(out) or 'nothing'} is kept")
        return INTERRUPTED
    if not result.finished:
        if first:
            say(
                f"stopped at step {result.step}: {result.checkpoint} is kept; "
                f"fastattn train --out {out} --resume continues it"
            )
        return INTERRUPTED
    if first:
        lines = [f"validation loss {result.validation_loss:.4f} over the whole split"]
        lines += _score_lines(result.scores)
        if result.tokens_per_second:
            lines.append(f"{result.tokens_per_second:,.0f} tokens/s while training")
        lines += [f"checkpoint {result.checkpoint}", f"loss curve {os.path.join(out, 'loss.png')}"]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _score_lines(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per figure; figures by tag follow their name."""
    for name, value in scores.items():
        title = _SCORE_TITLES.get(name, name)
        if isinstance(value, Mapping):
            width = max(map(len, value))
            yield f"{title}:"
            yield from (f"  {key:{width}} {figure:.4f}" for key, figure in value.items())
        else:
            yield f"{title} {value:.4f}" if isinstance(value, float) else f"{title} {value}"


_SCORE_TITLES = {
    "majority": "accuracy of the most frequent tag alone",
    "macro_f1": "mean F1",
    "f1": "F1 of each tag",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "pairs": "pairs translated for these scores:",
}


class _Stop:
    """Stop training between two steps after a first Ctrl-C or SIGTERM, at once after a second."""

    def __init__(self) -> None:
        self._asked = self._heard = False

    def __enter__(self) -> _Stop:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        self._heard = True
        return self._asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        together = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if (self._asked and not together) or not self._heard:
            raise KeyboardInterrupt
        self._asked = True
        if together:
            return  # torchrun repeats signals, and sends them to all ranks; rank 0 reports
        # On a terminal the cursor is after the progress bar.
        start = "\n" if sys.stderr.isatty() else ""
        say(f"{start}stopping after this step (once more to stop at once)")
