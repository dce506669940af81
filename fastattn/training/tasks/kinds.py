"""Registry of model kinds: task, configuration and constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...models.encoder import EncoderConfig, MaskedLM, Tagger
from ...models.gpt import GPT, GPTConfig
from ...models.seq2seq import Seq2Seq, Seq2SeqConfig


@dataclass(frozen=True)
class Kind:
    """Model and task, by their names in `fastattn train`.

    name: in checkpoints. title: for messages, with its article. use: the command for a trained one.
    config: the class of its configuration. build: makes the model from a configuration and facts
    about the data, a checkpoint's config["data"].
    """

    name: str
    title: str
    model: str
    task: str
    use: str
    config: Any
    build: Callable[[Any, Mapping[str, Any]], nn.Module]


_ALL = (
    Kind("gpt", "a GPT", "gpt", "language", "generate", GPTConfig, lambda x, _: GPT(x)),
    Kind(
        *("tagger", "a tagger", "encoder", "tagging", "tag", EncoderConfig),
        lambda x, data: Tagger(x, len(data["tags"])),
    ),
    Kind(
        *("masked", "a masked-token model", "encoder", "masked", "inspect", EncoderConfig),
        lambda x, _: MaskedLM(x),
    ),
    Kind(
        *("seq2seq", "an encoder-decoder", "seq2seq", "translation", "translate", Seq2SeqConfig),
        lambda x, _: Seq2Seq(x),
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}


def find_kind(model: str | None = None, task: str | None = None) -> Kind:
    """Find the kind of a model and a task; if only one is named, its first match.

    Raises:
        ValueError: there is no such model or task, or the model has no such task.
    """
    for name, value in (("model", model), ("task", task)):
        choices = list(dict.fromkeys(getattr(kind, name) for kind in _ALL))
        if value not in (None, *choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if model is None and task is None:
        model = "gpt"
    fitting = [kind for kind in _ALL if model in (None, kind.model) and task in (None, kind.task)]
    if not fitting:
        tasks = " or ".join(kind.task for kind in _ALL if kind.model == model)
        raise ValueError(f"model {model} has the task {tasks}, got task {task!r}")
    return fitting[0]
