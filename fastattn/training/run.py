"""Start or resume a training run in its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files.lock import locked_folder
from ..models.fields import from_fields
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    Trained,
    latest_checkpoint,
    load_checkpoint,
    load_trained,
)
from .metrics import CURVE_FILE, METRICS_FILE, ProgressBar
from .ranks import Ranks, started
from .tasks.kinds import KINDS, Kind
from .tasks.sources import SOURCES, Source
from .tokenizers import Tokenizer, from_json
from .train_config import DataConfig, TrainConfig, resolve_dtype
from .trainer import Trainer, TrainResult
from .usage import check_memory

# Options that a resumed run may change, as they leave the steps that are done what they were.
_CHANGEABLE = {
    *("steps", "device", "compile", "activation_checkpointing", "fsdp"),
    *("log_interval", "eval_interval", "eval_batches", "checkpoint_interval"),
}
# Options that a tagger may change when it starts from a masked-token run, as they do not change the
# encoder's parameters.
_OWN_FIELDS = {"dropout", "attention_dropout", "label_smoothing"}


@dataclass(frozen=True)
class Options:
    """Options set by the user; the others keep their defaults.

    Args:
        model: fields of the model's configuration except the vocabulary size, which the tokenizer
            sets; "preset" names a published configuration that the others change.
        training: fields of `TrainConfig`.
        data: fields of `DataConfig` for this kind.
        kind: of the model, see `tasks.kinds`; None = the resumed run's, or "gpt" for a new one.
    """

    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str | None = None


def train(
    options: Options,
    out_dir: str | Path,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Train a model in its own folder, on all ranks that torchrun has started.

    Args:
        options: changes to the defaults. A resumed run keeps its configuration; options may
            change the number of steps, and others that do not change the results.
        out_dir: the run's folder.
        resume: continue the run in out_dir, or start one if there is none. A finished run is left
            unchanged, unless it is given more steps.
        should_stop: called before every step; True ends the call with a checkpoint.
        say: prints a line.

    Raises:
        CheckpointError: out_dir holds a run and resume is False, the run there has a different
            configuration or is unreadable, or a checkpoint cannot be written.
        LockedError: another run is using out_dir, which rank 0 locks for the duration of the run.
        ValueError: an option is out of range, or the data is unusable (DataError, TokenizerError).
        TrainingError: the loss became infinite or NaN.
    """
    folder = Path(out_dir)
    with started() as ranks, ExitStack() as stack:
        if not ranks.first:
            say = _silent
        ranks.decided(lambda: _start_in(folder, resume, say, stack))
        latest = ranks.decided(lambda: latest_checkpoint(folder)) if resume else None
        if resume and latest is None:
            say(f"no checkpoint in {folder}: starting a new run")
        checkpoint = None if latest is None else load_checkpoint(latest)
        if checkpoint is not None:
            options = _continued(options, checkpoint)
            steps, results = options.training["steps"], checkpoint.config.get("results")
            if checkpoint.step == steps and results:
                say(f"the run in {folder} is finished: {steps} steps")
                assert latest is not None
                return TrainResult(steps, True, latest, **results)
        trainer = _build(options, folder, checkpoint, ranks, say)
        try:
            return trainer.run(should_stop)
        finally:
            trainer.progress.close()


def _silent(text: str) -> None: ...


def _build(
    options: Options,
    folder: Path,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    say: Callable[[str], None],
) -> Trainer:
    """Build a trainer; check as much as possible before anything slow, and write nothing."""
    kind = KINDS[options.kind or "gpt"]
    config = TrainConfig.from_dict(options.training)
    data = _data_config(kind, options.data)
    device = ranks.device(config.device)
    resolve_dtype(config.dtype, device)
    pretrained = None
    if checkpoint is None and data.start_from is not None:
        pretrained = load_trained(data.start_from, "masked")
    fields = _model_fields(kind, options.model, pretrained)
    if checkpoint is None:
        _check_size(kind, fields, config, device, ranks)
    # Before slow work, so that the reader of a pipe sees progress.
    named = ", ".join(filter(None, (*data.text, *data.validation, data.prepared)))
    say(f"training {kind.title} in {folder}, on {named or 'data of this Python installation'}")
    source = SOURCES[kind.name][0](data)
    tokenizer = _tokenizer(source, checkpoint, pretrained, ranks)
    model_config = _model_config(kind, fields, tokenizer.vocab_size)
    task = source.make_task(tokenizer, model_config)
    torch.manual_seed(config.seed)
    model = kind.build(model_config, source.facts).to(device)
    if pretrained is not None:
        model.get_submodule("encoder").load_state_dict(pretrained.model.encoder.state_dict())
    step = 0 if checkpoint is None else checkpoint.step
    say(
        f"{sum(x.numel() for x in model.parameters()):,} parameters, vocabulary of "
        f"{tokenizer.vocab_size:,}, {task.extent}, on {device}"
        + (f" and {ranks.size - 1} more ranks" if ranks.size > 1 else "")
        + (f", from step {step}" if step else "")
    )
    return Trainer(
        model,
        task,
        tokenizer,
        config,
        folder,
        data_config={**_fields_of(kind, data), **source.facts},
        kind=kind.name,
        progress=ProgressBar(config.steps, step) if ranks.first else None,
        resume_from=checkpoint,
        ranks=ranks,
    )


def _tokenizer(
    source: Source, checkpoint: Checkpoint | None, pretrained: Trained | None, ranks: Ranks
) -> Tokenizer:
    """Get the run's tokenizer, from a checkpoint or from the data.

    Raises:
        CheckpointError: the data have changed since the checkpoint was written.
    """
    if checkpoint is not None:
        if checkpoint.config["data"]["fingerprint"] != source.fingerprint:
            raise CheckpointError(
                f"{checkpoint.source} was trained on another text: the fingerprint of "
                "the data differs"
            )
        return checkpoint.tokenizer
    if pretrained is not None:
        return pretrained.tokenizer
    # Rank 0's for all, as training a tokenizer in threads is not deterministic.
    return from_json(ranks.decided(lambda: source.make_tokenizer().to_json()))


def _data_config(kind: Kind, options: Mapping[str, Any]) -> DataConfig:
    _check_names(options, _data_names(kind), f"task {kind.task}")
    chosen = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    return from_fields(DataConfig, chosen)


def _data_names(kind: Kind) -> set[str]:
    """Name the fields of `DataConfig` that a kind of model uses."""
    some = {name for _, names in SOURCES.values() for name in names}
    return {*_field_names(DataConfig)} - some | {*SOURCES[kind.name][1]}


def _fields_of(kind: Kind, data: DataConfig) -> dict[str, Any]:
    return {name: getattr(data, name) for name in sorted(_data_names(kind))}


def _check_names(options: Mapping[str, Any], allowed: Container[str], owner: str) -> None:
    for name in options:
        if name not in allowed:
            raise ValueError(f"{name} is no option of {owner}")


def _model_fields(
    kind: Kind, options: Mapping[str, Any], pretrained: Trained | None = None
) -> dict[str, Any]:
    """Get the model's config without the vocabulary's fields, from a preset or an encoder if named.

    Raises:
        CheckpointError: an option contradicts the pretrained encoder.
    """
    chosen = {name: value for name, value in options.items() if name != "preset"}
    free = {*_field_names(kind.config)}.difference(_vocabulary_fields(kind))
    _check_names(chosen, free, f"model {kind.model}")
    base = {}
    if preset := options.get("preset"):
        placeholders = dict.fromkeys(_vocabulary_fields(kind), 1)
        base = kind.config.preset(preset, **placeholders).to_dict()
    if pretrained is not None:
        base = pretrained.config.to_dict()
        for name, value in chosen.items():
            if name not in _OWN_FIELDS and base[name] != value:
                raise CheckpointError(
                    f"the pretrained encoder has {name}={base[name]!r}, got {value!r}: leave the "
                    "option out"
                )
    own = {name: x for name, x in base.items() if name not in _vocabulary_fields(kind)}
    return {**own, **chosen}


def _model_config(kind: Kind, fields: Mapping[str, Any], vocab_size: int) -> Any:
    return kind.config.from_dict({**dict.fromkeys(_vocabulary_fields(kind), vocab_size), **fields})


def _vocabulary_fields(kind: Kind) -> list[str]:
    return [name for name in _field_names(kind.config) if name.endswith("vocab_size")]


def _field_names(config_class: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def _check_size(
    kind: Kind, fields: Mapping[str, Any], config: TrainConfig, device: torch.device, ranks: Ranks
) -> None:
    """Check fields and sizes before a long text is tokenized."""
    placed = _model_config(kind, fields, 1)
    length = getattr(placed, "context_length", None) or placed.target_length
    check_memory(
        lambda of: kind.build(of, {"tags": ("",)}),
        placed,
        device,
        tokens=config.batch_size * length,
        ranks=ranks.size,
    )


def _start_in(folder: Path, resume: bool, say: Callable[[str], None], stack: ExitStack) -> None:
    """Lock the folder for this run; raise if it holds another run."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"the output folder {folder} is a file")
    stack.enter_context(locked_folder(folder, say))
    there = [latest_checkpoint(folder), folder / METRICS_FILE, folder / CURVE_FILE]
    taken = [path for path in there if path is not None and path.exists()]
    if taken and not resume:
        raise CheckpointError(
            f"{folder} holds a run already ({taken[0].name}): continue it with --resume, or "
            "choose another --out"
        )


def _continued(options: Options, checkpoint: Checkpoint) -> Options:
    """Get the options of a saved run, with the changeable ones from the new call.

    Raises:
        CheckpointError: an option contradicts the run, or the checkpoint was imported.
    """
    source, kind = checkpoint.source, checkpoint.kind
    if imported := checkpoint.config.get("imported"):
        raise CheckpointError(f"{source} was imported from {imported}: it has no run to continue")
    if options.kind not in (None, kind.name):
        raise CheckpointError(f"{source} holds {kind.title}, not {KINDS[options.kind].title}")
    saved = {
        "model": checkpoint.model_config.to_dict(),
        "training": dict(checkpoint.config["training"]),
        "data": {k: x for k, x in checkpoint.config["data"].items() if k in _data_names(kind)},
    }
    given = {"model": _model_fields(kind, options.model), "training": options.training}
    for part, chosen in {**given, "data": options.data}.items():
        for name, value in chosen.items():
            value = list(value) if isinstance(value, tuple) else value
            if name not in _CHANGEABLE and saved[part].get(name) != value:
                was = saved[part].get(name)
                raise CheckpointError(
                    f"{source} was started with {name}={was!r}, got {value!r}: leave the option "
                    "out to continue it, or choose another folder"
                )
            saved[part][name] = value
    for name in _vocabulary_fields(kind):
        del saved["model"][name]
    if (steps := saved["training"]["steps"]) < checkpoint.step:
        raise CheckpointError(f"{source} is beyond step {steps}: choose more --steps")
    return Options(**saved, kind=kind.name)
