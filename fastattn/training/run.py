"""A training run as a folder: start one, or continue the one that is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models.gpt import GPT, GPTConfig
from .checkpoint import Checkpoint, CheckpointError, latest_checkpoint, load_checkpoint
from .config import TrainConfig, resolve_device
from .data import TextDataset, fingerprint, read_text_files, split_text, standard_library_text
from .metrics import CURVE_FILE, METRICS_FILE
from .progress import ProgressBar
from .tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from .trainer import Trainer, TrainResult

# What may differ when a run is continued: none of it changes what is computed from which numbers.
_CHANGEABLE = {
    *("device", "compile"),
    *("log_interval", "eval_interval", "eval_batches", "checkpoint_interval"),
}

_MODEL_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(GPTConfig)
    if field.default is not dataclasses.MISSING
}


@dataclass(frozen=True)
class DataConfig:
    """What text to learn from, and how to cut it into tokens.

    Args:
        text: paths of UTF-8 text files; none = the standard library's source text.
        tokenizer: "char", "bpe", or the path of a tokenizer's JSON file.
        vocab_size: ids that "bpe" aims at.
    """

    text: tuple[str, ...] = ()
    tokenizer: str = "char"
    vocab_size: int = 1024

    def read(self) -> str:
        """The whole text.

        Raises:
            DataError: a file is missing, empty or undecodable.
        """
        return read_text_files(self.text) if self.text else standard_library_text()

    def make_tokenizer(self, text: str) -> Tokenizer:
        """The tokenizer: characters of the whole text, merges of its training part alone.

        Raises:
            TokenizerError: the kind is unknown, or the file is unusable.
        """
        if self.tokenizer == "char":
            return train_tokenizer("char", text)
        if self.tokenizer == "bpe":
            return train_tokenizer("bpe", split_text(text)[0], vocab_size=self.vocab_size)
        return load_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class Options:
    """What a user has asked for; what is not named here keeps its default.

    Args:
        model: fields of `GPTConfig` but vocab_size, which the tokenizer gives.
        training: fields of `TrainConfig`.
        data: fields of `DataConfig`.
    """

    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def train(
    options: Options,
    out_dir: str | Path,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Trains a GPT on text, in a folder of its own.

    Args:
        options: what differs from the defaults. Where a run is continued its own configuration
            holds, and options may not contradict it.
        out_dir: the run's folder.
        resume: continue the run in out_dir; without one there, start it. A finished run is left as
            it is.
        should_stop: asked before every step; True ends the call with a checkpoint.
        say: shows a line to the user.

    Raises:
        CheckpointError: out_dir holds a run and resume is False, the run there is of another
            configuration or unreadable, or a checkpoint cannot be written.
        ValueError: an option is out of range, or the text is unusable (DataError, TokenizerError).
        TrainingError: the loss became infinite or NaN.
    """
    out_dir = Path(out_dir)
    _check_out_dir(out_dir, resume)
    found = latest_checkpoint(out_dir) if resume else None
    if resume and found is None:
        say(f"no checkpoint in {out_dir}: starting a new run")
    checkpoint = None if found is None else load_checkpoint(found)
    if checkpoint is not None:
        if source := checkpoint.state.get("imported"):
            raise CheckpointError(f"{found} comes from {source}: it is no run that could go on")
        options = _continued(options, checkpoint)
        if checkpoint.state["finished"]:
            loss = checkpoint.state["validation_loss"]
            say(f"the run in {out_dir} is finished: {checkpoint.step} steps")
            assert found is not None
            return TrainResult(checkpoint.step, True, found, loss, 0.0)
    trainer = _build(options, out_dir, checkpoint, say)
    try:
        return trainer.run(should_stop)
    finally:
        trainer.progress.close()


def _build(
    options: Options, out_dir: Path, checkpoint: Checkpoint | None, say: Callable[[str], None]
) -> Trainer:
    """Everything a run needs, checked as far as possible before anything is written."""
    config = TrainConfig.from_dict(options.training)
    data_config = DataConfig(**options.data)
    device = resolve_device(config.device)
    config.resolve_dtype(device)
    # Placeholder vocabulary: a wrong option should be reported before a long text is tokenized.
    GPTConfig.from_dict({"vocab_size": 1, **options.model})
    text = data_config.read()
    if checkpoint is None:
        tokenizer = data_config.make_tokenizer(text)
    else:
        tokenizer = checkpoint.tokenizer
        if checkpoint.config["data"]["fingerprint"] != fingerprint(text):
            raise CheckpointError(
                "the checkpoint is of another text: what its run was started on has changed"
            )
    model_config = GPTConfig(vocab_size=tokenizer.vocab_size, **options.model)
    dataset = TextDataset.from_text(text, tokenizer, model_config.context_length)
    torch.manual_seed(config.seed)
    model = GPT(model_config).to(device)
    step = 0 if checkpoint is None else checkpoint.step
    say(
        f"{model.num_parameters():,} parameters, vocabulary of {tokenizer.vocab_size:,}, "
        f"{len(dataset.train):,} training and {len(dataset.validation):,} validation tokens, "
        f"on {device}" + (f", from step {step}" if step else "")
    )
    return Trainer(
        model,
        dataset,
        tokenizer,
        config,
        out_dir,
        data_config=dataclasses.asdict(data_config),
        progress=ProgressBar(config.steps, step),
        resume_from=checkpoint,
    )


def _check_out_dir(out_dir: Path, resume: bool) -> None:
    if out_dir.exists() and not out_dir.is_dir():
        raise CheckpointError(f"the output folder {out_dir} is a file")
    if resume:
        return
    taken = latest_checkpoint(out_dir)
    for name in (METRICS_FILE, CURVE_FILE):
        if taken is None and (out_dir / name).exists():
            taken = out_dir / name
    if taken is not None:
        raise CheckpointError(
            f"{out_dir} holds a run already ({taken.name}): continue it with --resume, or choose "
            "another --out"
        )


def _continued(options: Options, checkpoint: Checkpoint) -> Options:
    """A run's own options, with what may change taken from the new ones."""
    merged: dict[str, dict[str, Any]] = {}
    for part in ("model", "training", "data"):
        saved = dict(checkpoint.config.get(part, {}))
        if part == "model":
            # Fields that the run's version did not have yet.
            saved = _MODEL_DEFAULTS | saved
        asked = getattr(options, part)
        for name, value in asked.items():
            value = list(value) if isinstance(value, tuple) else value
            if name not in _CHANGEABLE and saved.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint is of another configuration: its {name} is "
                    f"{saved.get(name)!r}, not {value!r}"
                )
        merged[part] = saved | {k: v for k, v in asked.items() if k in _CHANGEABLE}
    merged["model"].pop("vocab_size", None)
    merged["data"].pop("fingerprint", None)
    merged["data"]["text"] = tuple(merged["data"].get("text", ()))
    return Options(**merged)
