"""Start or resume a training run in its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files.lock import locked_folder
from ..models.encoder import EncoderConfig, MaskedLM, Tagger
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    config_of,
    kind_of,
    latest_checkpoint,
    load_checkpoint,
    load_trained,
)
from .distributed.degrees import Degrees, check_split, ranks_started
from .distributed.launcher import begun, restarted
from .distributed.ranks import Ranks
from .metrics import CURVE_FILE, METRICS_FILE, ProgressBar
from .tasks.kinds import KINDS, Kind
from .tasks.sources import DATA
from .tokenizers import Tokenizer, from_json
from .train_config import TrainConfig, resolve_device
from .trainer import Trainer, TrainResult
from .usage import check_memory

# Options that may change when a run resumes, as they do not change its results.
_CHANGEABLE = {
    *("device", "compile", "activation_checkpointing", "save_in_background"),
    *("log_interval", "eval_interval", "eval_batches", "checkpoint_interval"),
}
# Options that a tagger may change when it starts from a masked-token run, as they do not change the
# encoder's parameters.
_OWN_FIELDS = {"dropout", "attention_dropout", "label_smoothing"}


@dataclass(frozen=True)
class Options:
    """Options that the user has set; the others keep their defaults.

    Args:
        model: fields of the model's configuration except the vocabulary size, which the tokenizer
            sets; "preset" names a published configuration that the others change.
        training: fields of `TrainConfig`.
        data: fields of `DataConfig` for this kind.
        parallel: fields of `Degrees` for torchrun's ranks; not part of the run, which may resume
            with others.
        kind: of the model, see `tasks.kinds`; None = the resumed run's, or "gpt" for a new one.
    """

    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parallel: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
        options: changes to the defaults. A resumed run keeps its configuration, which options may
            not contradict.
        out_dir: the run's folder.
        resume: continue the run in out_dir, or start one if there is none. A finished run is left
            unchanged. A run restarted by torchrun is also continued.
        should_stop: called before every step; True ends the call with a checkpoint.
        say: shows a line to the user.

    Raises:
        CheckpointError: out_dir holds a run and resume is False, the run there is of another
            configuration or unreadable, or a checkpoint cannot be written.
        LockedError: another run is using out_dir, which rank 0 locks for the duration of the run.
        ValueError: an option is out of range, the data is unusable (DataError, TokenizerError), or
            the degrees do not fit (SplitError).
        TrainingError: the loss became infinite or NaN.
    """
    degrees = Degrees(**options.parallel)
    with ranks_for(degrees) as ranks, ExitStack() as stack:
        if not ranks.first:
            say = _silent
        folder = Path(out_dir)
        going_on = ranks.decided(lambda: _start_in(folder, resume, say, stack))
        return _train(options, folder, going_on, should_stop, say, ranks)


def _silent(text: str) -> None: ...


def ranks_for(degrees: Degrees) -> AbstractContextManager[Ranks]:
    """Ranks of this process group for the duration of the context; one process without torchrun."""
    if ranks_started() == 1:
        degrees.split(1)
        return nullcontext(Ranks())
    # One process does not need these imports.
    from .distributed.together import started

    return started(degrees)


def _train(
    options: Options,
    out_dir: Path,
    resume: bool,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
    ranks: Ranks,
) -> TrainResult:
    latest = ranks.decided(lambda: latest_checkpoint(out_dir)) if resume else None
    if resume and latest is None:
        say(f"no checkpoint in {out_dir}: starting a new run")
    together = ranks.split.size > 1
    # With several ranks, each reads its part later.
    device = "meta" if together else "cpu"
    checkpoint = None if latest is None else load_checkpoint(latest, device=device)
    if checkpoint is not None:
        if source := checkpoint.state.get("imported"):
            raise CheckpointError(f"{latest} comes from {source}: it is no run that could go on")
        options = _continued(options, checkpoint, kind_of(checkpoint))
        if checkpoint.require("state", "finished"):
            loss = checkpoint.require("state", "validation_loss")
            say(f"the run in {out_dir} is finished: {checkpoint.step} steps")
            assert latest is not None
            scores = checkpoint.state.get("scores", {})
            return TrainResult(checkpoint.step, True, latest, loss, 0.0, scores)
    trainer = _build(options, out_dir, checkpoint, latest if together else checkpoint, say, ranks)
    try:
        return trainer.run(should_stop)
    finally:
        trainer.progress.close()


def _build(
    options: Options,
    out_dir: Path,
    checkpoint: Checkpoint | None,
    resume_from: Checkpoint | Path | None,
    say: Callable[[str], None],
    ranks: Ranks,
) -> Trainer:
    """Build a trainer; check as much as possible before anything is written."""
    kind = KINDS[options.kind or "gpt"]
    config = TrainConfig.from_dict(options.training)
    data = DATA[kind.name]
    _check_names(options.data, data.defaults, f"task {kind.task}")
    data_config = data.config(options.data)
    device = ranks.device(config.device)
    config.resolve_dtype(device)
    fields = _model_fields(kind, options.model)
    pretrained = None
    if checkpoint is None and (start_from := data_config.start_from):
        if "tokenizer" in options.data:
            raise ValueError("start_from brings its own tokenizer: name no other one")
        pretrained = Pretrained(start_from)
        fields = pretrained.fields(fields)
    # Placeholder vocabulary: a wrong option should be reported before a long text is tokenized.
    placed = _model_config(kind, fields, 1)
    check_split(ranks.split, config, placed, kind)
    if checkpoint is None:
        length = getattr(placed, "context_length", None) or placed.target_length
        check_memory(
            *(lambda of: kind.build(of, {"tags": ("",)}), placed, device),
            tokens=config.batch_size * length, ranks=ranks.split.size,
        )  # fmt: skip
    # Before slow work, so that the reader of a pipe sees progress.
    prepared = data_config.prepared
    if prepared and "tokenizer" in options.data and checkpoint is None:
        raise ValueError("prepared data bring their own tokenizer: name no other one")
    named = (*data_config.text, *data_config.validation, prepared)
    files = ", ".join(filter(None, named))
    say(f"training {kind.title} in {out_dir}, on {files or 'data of this Python installation'}")
    source = data.read(data_config)
    if checkpoint is None:
        # Rank 0's for all, as training a tokenizer in threads is not deterministic.
        tokenizer = (
            pretrained.tokenizer
            if pretrained
            else from_json(ranks.decided(lambda: source.make_tokenizer().to_json()))
        )
    else:
        tokenizer = checkpoint.tokenizer
        if checkpoint.require("config", "data", "fingerprint") != source.fingerprint:
            raise CheckpointError(
                f"{checkpoint.source} is of another text (its fingerprint differs): what its run "
                "was started on has changed"
            )
    model_config = _model_config(kind, fields, tokenizer.vocab_size)
    task = source.make_task(tokenizer, model_config)
    torch.manual_seed(config.seed)
    model = kind.build(model_config, source.facts).to(device)
    if pretrained is not None:
        pretrained.give(model)
    step = 0 if checkpoint is None else checkpoint.step
    say(
        f"{sum(x.numel() for x in model.parameters()):,} parameters, "
        f"vocabulary of {tokenizer.vocab_size:,}, {task.extent}, "
        f"on {device}"
        + (f" of {ranks.split.size} ranks: {ranks.split}" if ranks.split.size > 1 else "")
        + (f", from step {step}" if step else "")
    )
    return Trainer(
        model,
        task,
        tokenizer,
        config,
        out_dir,
        data_config={**data.fields(data_config), **source.facts},
        kind=kind.name,
        progress=ProgressBar(config.steps, step) if ranks.first else None,
        resume_from=resume_from,
        ranks=ranks,
    )


def _check_names(options: Mapping[str, Any], allowed: Container[str], owner: str) -> None:
    for name in options:
        if name not in allowed:
            raise ValueError(f"{name} is no option of {owner}")


def _model_fields(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the model's config without the vocabulary's; from the preset, if named."""
    chosen = {name: value for name, value in options.items() if name != "preset"}
    _check_names(chosen, _field_names(kind.config), f"model {kind.model}")
    preset = options.get("preset")
    if preset is None:
        return chosen
    placeholders = dict.fromkeys(_vocabulary_fields(kind), 1)
    fields = kind.config.preset(preset, **placeholders).to_dict()
    return {name: fields[name] for name in fields if name not in placeholders} | chosen


def _model_config(kind: Kind, fields: Mapping[str, Any], vocab_size: int) -> Any:
    return kind.config.from_dict({**dict.fromkeys(_vocabulary_fields(kind), vocab_size), **fields})


def _vocabulary_fields(kind: Kind) -> list[str]:
    return [name for name in _field_names(kind.config) if name.endswith("vocab_size")]


def _field_names(config_class: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def _start_in(out_dir: Path, resume: bool, say: Callable[[str], None], stack: ExitStack) -> bool:
    """Lock the folder for this run; whether to look for a run there, as torchrun's restarts do."""
    resume = resume or restarted(str(out_dir))
    if out_dir.exists() and not out_dir.is_dir():
        raise CheckpointError(f"the output folder {out_dir} is a file")
    stack.enter_context(locked_folder(out_dir, say))
    there = [latest_checkpoint(out_dir), out_dir / METRICS_FILE, out_dir / CURVE_FILE]
    taken = [path for path in there if path is not None and path.exists()]
    if taken and not resume:
        raise CheckpointError(
            f"{out_dir} holds a run already ({taken[0].name}): continue it with --resume, or "
            "choose another --out"
        )
    begun(str(out_dir))
    return resume


def _continued(options: Options, checkpoint: Checkpoint, kind: Kind) -> Options:
    """Options of a saved run, with the changeable ones taken from the new call."""
    if options.kind not in (None, kind.name):
        raise CheckpointError(
            f"{checkpoint.source} is of another configuration: it holds {kind.title}, "
            f"not {KINDS[options.kind].title}"
        )
    options = dataclasses.replace(options, model=_model_fields(kind, options.model))
    _check_saved(options, checkpoint, kind)
    merged: dict[str, dict[str, Any]] = {}
    for part in ("model", "training", "data"):
        saved = dict(checkpoint.config.get(part, {}))
        if part == "model":
            saved = config_of(checkpoint).to_dict()
        chosen = getattr(options, part)
        for name, value in chosen.items():
            value = list(value) if isinstance(value, tuple) else value
            if name not in _CHANGEABLE and saved.get(name) != value:
                raise CheckpointError(
                    f"{checkpoint.source} is of another configuration: its {name} is "
                    f"{saved.get(name)!r}, not {value!r}"
                )
        merged[part] = saved | {k: v for k, v in chosen.items() if k in _CHANGEABLE}
    for name in _vocabulary_fields(kind):
        merged["model"].pop(name, None)
    merged["data"] = _data_fields(kind, merged["data"])
    return Options(**merged, parallel=options.parallel, kind=kind.name)


def _check_saved(options: Options, checkpoint: Checkpoint, kind: Kind) -> None:
    """Raise CheckpointError if an option of a saved run is of a wrong type or out of range."""
    config_of(checkpoint)
    data, part = checkpoint.config.get("data", {}), "training"
    try:
        training = TrainConfig.from_dict(checkpoint.config.get("training", {}))
        if "device" not in options.training:
            training.resolve_dtype(resolve_device(training.device))
        part = "data"
        DATA[kind.name].config(_data_fields(kind, data))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.source} has no usable {part} config: {error}") from None


def _data_fields(kind: Kind, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run's "data" that `DataConfig` takes; the rest are facts about the data."""
    defaults = DATA[kind.name].defaults
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in saved.items()
        if name in defaults
    }


class Pretrained:
    """The encoder of a trained masked-token model, from a folder of a run or of a checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it holds another kind of model.
    """

    def __init__(self, path: str | Path) -> None:
        trained = load_trained(path, "masked")
        assert isinstance(trained.model, MaskedLM)
        self._path, self._encoder = path, trained.model.encoder
        self._config: EncoderConfig = trained.config
        self.tokenizer: Tokenizer = trained.tokenizer

    def fields(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The encoder's configuration with the run's own options, without the vocabulary."""
        fields = self._config.to_dict()
        del fields["vocab_size"]
        for name, value in chosen.items():
            if name not in _OWN_FIELDS and fields[name] != value:
                raise CheckpointError(
                    f"the encoder in {self._path} is of another configuration: its {name} is "
                    f"{fields[name]!r}, not {value!r}"
                )
        return {**fields, **chosen}

    def give(self, model: nn.Module) -> None:
        """Copy the encoder's parameters into a model with these `fields`."""
        assert isinstance(model, Tagger)
        model.encoder.load_state_dict(self._encoder.state_dict())
