"""The kinds of models that checkpoints hold, and how each is built again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.encoder import EncoderConfig, MaskedLM, Tagger
from ..models.gpt import GPT, GPTConfig
from ..models.seq2seq import Seq2Seq, Seq2SeqConfig
from .checkpoint import Checkpoint, CheckpointError, check_build, load_checkpoint, restore_model
from .tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Kind:
    """A model and its task.

    Args:
        name: in checkpoints.
        title: for people, with its article.
        model, task: what `fastattn train` calls them.
        use: the command for a trained one.
        config: the class of its configuration.
        build: makes the model of a configuration and of what is known of its data, which
            `Checkpoint.config` keeps under "data".
    """

    name: str
    title: str
    model: str
    task: str
    use: str
    config: Any
    build: Callable[[Any, Mapping[str, Any]], nn.Module]


def _gpt(config: GPTConfig, data: Mapping[str, Any]) -> nn.Module:
    return GPT(config)


def _tagger(config: EncoderConfig, data: Mapping[str, Any]) -> nn.Module:
    return Tagger(config, len(data["tags"]))


def _masked(config: EncoderConfig, data: Mapping[str, Any]) -> nn.Module:
    return MaskedLM(config)


def _seq2seq(config: Seq2SeqConfig, data: Mapping[str, Any]) -> nn.Module:
    return Seq2Seq(config)


_ALL = (
    Kind("gpt", "a GPT", "gpt", "language", "generate", GPTConfig, _gpt),
    Kind("tagger", "a tagger", "encoder", "tagging", "tag", EncoderConfig, _tagger),
    Kind("masked", "a masked-token model", "encoder", "masked", "inspect", EncoderConfig, _masked),
    Kind(
        "seq2seq",
        "an encoder-decoder",
        "seq2seq",
        "translation",
        "translate",
        Seq2SeqConfig,
        _seq2seq,
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}


def find_kind(model: str | None = None, task: str | None = None) -> Kind:
    """The kind of a model and a task; the first task of a model, or the model of a task, by itself.

    Raises:
        ValueError: there is no such model or task, or the model has no such task.
    """
    for name, value in (("model", model), ("task", task)):
        known = list(dict.fromkeys(getattr(kind, name) for kind in _ALL))
        if value not in (None, *known):
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if model is None and task is None:
        model = "gpt"
    fitting = [kind for kind in _ALL if model in (None, kind.model) and task in (None, kind.task)]
    if not fitting:
        tasks = " or ".join(kind.task for kind in _ALL if kind.model == model)
        raise ValueError(f"model {model} has the task {tasks}, got task {task!r}")
    return fitting[0]


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds, ready for use.

    Args:
        kind: of the model.
        model: in evaluation mode.
        config: of the model.
        tokenizer: of its texts.
        data: what it was trained on, as the run has kept it.
    """

    kind: Kind
    model: Any
    config: Any
    tokenizer: Tokenizer
    data: Mapping[str, Any]


def kind_of(checkpoint: Checkpoint) -> Kind:
    """The kind that a checkpoint says it is of; one that says nothing is a GPT.

    Raises:
        CheckpointError: this version has no such kind.
    """
    name = checkpoint.config.get("kind", "gpt")
    if name not in KINDS:
        raise CheckpointError(
            f"{checkpoint.source} is of kind {name!r}, this fastattn has {', '.join(KINDS)}"
        )
    return KINDS[name]


def load_trained(path: str | Path, *kinds: str, device: torch.device | str = "cpu") -> Trained:
    """Builds the model of a checkpoint, in evaluation mode.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        kinds: names of the kinds that will do; none = any.
        device: where the model goes.

    Raises:
        CheckpointError: as `load_checkpoint`, or the checkpoint is of another kind, or its parts do
            not belong together.
    """
    checkpoint = load_checkpoint(path, device=device, training=False)
    kind = kind_of(checkpoint)
    if kinds and kind.name not in kinds:
        wanted = " or ".join(KINDS[name].title for name in kinds)
        raise CheckpointError(
            f"checkpoint {path} holds {kind.title}, {wanted} is needed: see fastattn {kind.use}"
        )
    config = config_of(checkpoint)
    if kind.name == "tagger":
        for name in ("tags", "python"):
            checkpoint.require("config", "data", name)
    data = checkpoint.config.get("data", {})
    check_build(lambda: kind.build(config, data), checkpoint)
    model = kind.build(config, data).to(device)
    check_tokenizer(checkpoint.tokenizer, config, checkpoint.source)
    restore_model(model, checkpoint)
    return Trained(kind, model.eval(), config, checkpoint.tokenizer, data)


def config_of(checkpoint: Checkpoint) -> Any:
    """The configuration of a checkpoint's model.

    Raises:
        CheckpointError: it is of no known kind, or its configuration is missing or unusable.
    """
    fields = checkpoint.require("config", "model")
    try:
        config = kind_of(checkpoint).config.from_dict(fields)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.source} has no usable model config: {error}") from None
    for name in ("num_layers", "num_decoder_layers"):
        layers = getattr(config, name, None) or 0
        if layers > len(checkpoint.model):
            raise CheckpointError(
                f"{checkpoint.source} has no usable model config: {name} is {layers}, "
                f"and there are {len(checkpoint.model)} parameters"
            )
    return config


def check_tokenizer(tokenizer: Tokenizer, config: Any, owner: str) -> None:
    """The model has an embedding for every id of the tokenizer.

    Raises:
        CheckpointError: it has not: the tokenizer belongs to another model.
    """
    for name in ("vocab_size", "source_vocab_size", "target_vocab_size"):
        known = getattr(config, name, tokenizer.vocab_size)
        if tokenizer.vocab_size > known:
            raise CheckpointError(
                f"{owner} has a tokenizer that does not belong to it: of {tokenizer.vocab_size} "
                f"ids, its model's {name} is {known}"
            )
