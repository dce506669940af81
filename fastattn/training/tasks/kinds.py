"""Registry of model kinds: task, configuration and constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

Build = Callable[[Any, Mapping[str, Any]], nn.Module]


@dataclass(frozen=True)
class Kind:
    """Model and task, by their names in `fastattn train`.

    name: in checkpoints. title: for messages, with its article. use: the command for a trained one.
    load: imports the class of its configuration, and the function `build`.
    """

    name: str
    title: str
    model: str
    task: str
    use: str
    load: Callable[[], tuple[Any, Build]]

    @property
    def config(self) -> Any:
        """The class of its configuration."""
        return self.load()[0]

    def build(self, config: Any, data: Mapping[str, Any]) -> nn.Module:
        """Build the model; data: facts about the data, a checkpoint's config["data"]."""
        return self.load()[1](config, data)


def _gpt() -> tuple[Any, Build]:
    from ...models.gpt import GPT, GPTConfig

    return GPTConfig, lambda config, _: GPT(config)


def _tagger() -> tuple[Any, Build]:
    from ...models.encoder import EncoderConfig, Tagger

    return EncoderConfig, lambda config, data: Tagger(config, len(data["tags"]))


def _masked() -> tuple[Any, Build]:
    from ...models.encoder import EncoderConfig, MaskedLM

    return EncoderConfig, lambda config, _: MaskedLM(config)


def _seq2seq() -> tuple[Any, Build]:
    from ...models.seq2seq import Seq2Seq, Seq2SeqConfig

    return Seq2SeqConfig, lambda config, _: Seq2Seq(config)


_ALL = (
    Kind("gpt", "a GPT", "gpt", "language", "generate", _gpt),
    Kind("tagger", "a tagger", "encoder", "tagging", "tag", _tagger),
    Kind("masked", "a masked-token model", "encoder", "masked", "inspect", _masked),
    Kind("seq2seq", "an encoder-decoder", "seq2seq", "translation", "translate", _seq2seq),
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
