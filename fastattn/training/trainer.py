"""Training loop: AdamW, clipping, accumulation, autocast, evaluation, checkpoints, resuming."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from ..checks import check_is
from ..files.text import DataError
from ..missing import import_extra
from ..models.model_config import TransformerConfig
from ..models.stack import evaluating
from . import metrics
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    check_tokenizer,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from .data.text import TextDataset
from .ranks import Ranks, full_state, load_full_state
from .tasks.kinds import KINDS
from .tasks.task import Batch, LanguageTask, Task
from .tokenizers import Tokenizer
from .train_config import TrainConfig, resolve_dtype
from .usage import Usage


class TrainingError(FloatingPointError):
    """Error: a loss, a weight or an AdamW moment is NaN or infinite."""


@dataclass(frozen=True)
class TrainResult:
    """Outcome of `Trainer.run`.

    Args:
        step: optimizer steps done in total.
        finished: whether that is the last one.
        checkpoint: folder of the checkpoint that holds this state.
        validation_loss: mean cross-entropy over the whole validation split in nats per token;
            None unless finished.
        scores: the task's further figures over the validation split; empty unless finished.
        tokens_per_second: of this call's steps without evaluation and checkpoints; without the
            first step, which compiles, if there are others.
    """

    step: int
    finished: bool
    checkpoint: Path
    validation_loss: float | None = None
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens_per_second: float = 0.0


class Trainer:
    """Trains a model on a task, and writes checkpoints, metrics.jsonl and loss.png to a folder.

    Randomness depends on seed, step and rank alone: a resumed run equals an uninterrupted one,
    bitwise on a CPU with the same versions and number of threads. To repeat the initial weights
    too, seed before the model is built.

    Args:
        model: on the training device, equal on every rank. It has a `config` with `to_dict`, and
            returns (logits, loss) for the task's batches.
        data: a task, or a text for next-token prediction.
        tokenizer: of the data, saved in the checkpoints.
        config: settings.
        out_dir: folder of this run alone.
        data_config: description of the data, JSON values, saved in the checkpoints.
        kind: kind of the model, saved in the checkpoints; see `fastattn.training.tasks.kinds`.
        progress: the display.
        resume_from: a checkpoint of this run, or its folder.
        ranks: the process group, from `ranks.started`.

    Raises:
        TypeError: data, config or the model's configuration has a different class.
        ValueError: there is no such kind, or config does not suit the device or the ranks.
        CheckpointError: resume_from has another model, or the tokenizer has ids past the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TextDataset | Task,
        tokenizer: Tokenizer,
        config: TrainConfig,
        out_dir: str | Path,
        *,
        data_config: Mapping[str, Any] | None = None,
        kind: str = "gpt",
        progress: metrics.Progress | None = None,
        resume_from: Checkpoint | str | Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model_config = cast(Any, model.config)
        check_tokenizer(tokenizer, self.model_config, "the run")
        check_is("data", data, TextDataset, Task)
        check_is("config", config, TrainConfig)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if isinstance(self.model_config, TransformerConfig):
            check_is(f"model.config of kind {kind!r}", self.model_config, KINDS[kind].config)
        if isinstance(data, TextDataset):
            data = LanguageTask(data, self.model_config.context_length)
        self.model, self.task, self.tokenizer, self.config = model, data, tokenizer, config
        self.out_dir = Path(out_dir)
        self.data_config, self.kind = dict(data_config or {}), kind
        self.progress = metrics.Progress() if progress is None else progress
        self.device = next(model.parameters()).device
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.ranks = Ranks() if ranks is None else ranks
        self.step = 0
        self._own: Path | None = None  # the newest checkpoint, if it is of this run
        self._loss_sum, self._loss_count = torch.zeros((), device=self.device), 0
        self._speed = metrics.Speed()
        self._usage = Usage(model, self.device, self.dtype, self.ranks.size)
        if isinstance(resume_from, str | Path):
            resume_from = load_checkpoint(resume_from)
        if resume_from is not None:
            resume_from.check_fits(model)
            model.load_state_dict(resume_from.model)
        self._forward = self.ranks.prepare(model, config, self.dtype)
        self.optimizer = make_optimizer(model, config)
        scaled = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        if resume_from is not None:
            self._restore(resume_from)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainResult:
        """Train to the last step, or until should_stop(), called before every step, is true.

        Then write a checkpoint and draw the loss curve. A second call continues.

        Raises:
            TrainingError: a loss, a weight or a moment is infinite or NaN. Nothing of that state is
                written: the last checkpoint stays.
            CheckpointError: out_dir holds another run's checkpoint, or a later one than this state.
            CheckpointError, OSError: out_dir cannot be written, such as on a full disk.
        """
        config, first = self.config, self.step
        self.ranks.decided(self._check_folder)
        self._save()
        if self.ranks.first:
            metrics.truncate_metrics(self.out_dir, first)
        self.model.train()
        self._speed = metrics.Speed()
        while self.step < config.steps and not self.ranks.agree(should_stop()):
            self._train_step()
            last = self.step == config.steps
            if last or self.step % config.log_interval == 0:
                self._log()
            with self._speed.paused():
                if not last and self.step % config.eval_interval == 0:
                    self._record_validation(self.estimate_loss(), "estimate")
                if not last and self.step % config.checkpoint_interval == 0:
                    self._save()
            if not last and self.step == first + 1:
                self._speed = metrics.Speed()
        rate = self._speed.mean()
        finished = self.step == config.steps
        results = self._results(record=self.step > first) if finished else {}
        path = self._save(results)
        if self.ranks.first:  # last: without it nothing is lost
            metrics.draw_loss_curve(self.out_dir)
        return TrainResult(self.step, finished, path, **results, tokens_per_second=rate)

    def validation_loss(self) -> float:
        """Compute the mean cross-entropy over the whole validation split, in nats per token."""
        return self._mean_loss(self.task.validation(self.config.batch_size))

    def estimate_loss(self) -> float:
        """Compute the mean cross-entropy over eval_batches random batches of the validation split.

        Always the same batches, so that estimates are comparable.
        """
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        return self._mean_loss(
            self.task.draw("validation", config.batch_size, generator)
            for _ in range(config.eval_batches)
        )

    def scores(self) -> dict[str, Any]:
        """Compute the task's validation scores besides the loss."""
        with self._evaluating(), self.ranks.evaluating(self.model):
            return self.task.scores(self.model, self.config.batch_size)

    def _train_step(self) -> None:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(self.step)
        batches = torch.Generator().manual_seed(_seed(config.seed, self.step))
        # torch.manual_seed notes a traceback for each kind of device that is not in use.
        generator: Any = torch.default_generator if self.device.type == "cpu" else torch
        generator.manual_seed(_seed(config.seed, self.step, self.ranks.rank))  # for dropout
        for i in range(config.accumulation):
            batch = self.task.draw("train", config.batch_size, batches)
            self._speed.count(batch.num_tokens)
            with self.ranks.accumulating(self._forward, last=i == config.accumulation - 1):
                with self._autocast():
                    loss = self.ranks.loss(self._forward, batch, self.device)
                # Ranks average gradients, and their losses are shares of a sum.
                share = self.scaler.scale(loss * (self.ranks.size / config.accumulation))
                share.backward()  # type: ignore[no-untyped-call]
            self._loss_sum += loss.detach()
            self._loss_count += 1
        if config.grad_clip > 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _mean_loss(self, batches: Iterable[Batch]) -> float:
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with self._evaluating():
            for batch in batches:
                targets = batch.num_targets
                total += self.ranks.loss(self.model, batch, self.device).double() * targets
                count += targets
        if not count:
            raise DataError("the validation split must have targets: documents have one token each")
        loss = float(self.ranks.total(total)) / count
        self._check_finite("validation loss", loss)
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with evaluating(self.model), torch.no_grad(), self._autocast():
            yield

    def _autocast(self) -> torch.autocast:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if enabled else None, enabled=enabled)

    def _results(self, *, record: bool) -> dict[str, Any]:
        """Compute the validation loss and the scores of a finished run."""
        self.progress.note("validating on the whole split")
        loss, scores = self.validation_loss(), self.scores()
        if record:
            self._record_validation(loss, "whole split", scores)
        return {"validation_loss": loss, "scores": scores}

    def _log(self) -> None:
        loss = float(self.ranks.total(self._loss_sum)) / self._loss_count
        self._check_finite("training loss", loss)
        figures = self._usage.figures(self._speed.lap())
        rate = self.config.learning_rate_at(self.step - 1)
        self._append({"loss": loss, "learning_rate": rate, **figures})
        self.progress.advance(self.step, loss=loss, **figures)
        self._loss_sum.zero_()
        self._loss_count = 0

    def _record_validation(
        self, loss: float, how: str, scores: Mapping[str, Any] | None = None
    ) -> None:
        self._append({"validation_loss": loss, **({"scores": scores} if scores else {})})
        prefix = f"step {self.step}/{self.config.steps}"
        self.progress.note(f"{prefix}: validation loss {loss:.4f} ({how})")

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.ranks.first:
            metrics.append_metrics(self.out_dir, {"step": self.step, **record})

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"the {name} is {value} at step {self.step}, so training has stopped; the "
                "last checkpoint is kept; a lower learning_rate may help"
            )

    def _check_state(self) -> None:
        """Check weights and moments: a gradient may be NaN where the loss is finite."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        for name, tensors in (("weight", self.model.state_dict().values()), ("moment", moments)):
            held = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
            held = [x for x in held if x.is_floating_point() and x.numel()]
            zero = torch.zeros((), device=self.device)
            largest = nn.utils.get_total_norm(held, math.inf) if held else zero
            total = self.ranks.total(largest.double())
            self._check_finite(f"largest {name}", float(total))

    def _check_folder(self) -> None:
        """Raise CheckpointError if the folder's newest checkpoint is not the one resumed from.

        Raises:
            ModuleNotFoundError: what the end of a run needs is not installed.
        """
        import_extra("safetensors", "a checkpoint")
        import_extra("matplotlib", "the loss curve")
        newest = latest_checkpoint(self.out_dir)
        if newest is not None and not self._is_own(newest):
            raise CheckpointError(
                f"{self.out_dir} holds a trained model already ({newest.name}), and this run at "
                f"step {self.step} does not continue it: pass resume_from={str(newest)!r}, or "
                "choose another out_dir"
            )

    def _is_own(self, path: Path) -> bool:
        return self._own is not None and self._own.resolve() == path.resolve()

    def _save(self, results: Mapping[str, Any] = MappingProxyType({})) -> Path:
        final = checkpoint_path(self.out_dir, self.step)
        if self._is_own(final):
            return final
        loss_sum = float(self.ranks.total(self._loss_sum))
        self._check_finite("training loss", loss_sum)
        self._check_state()
        model, optimizer = full_state(self.model, self.optimizer)
        checkpoint = Checkpoint(
            step=self.step,
            model=model,
            tokenizer=self.tokenizer,
            config={
                "kind": self.kind,
                "model": self.model_config.to_dict(),
                "training": self.config.to_dict(),
                "data": {**self.data_config, "fingerprint": self.task.fingerprint},
                "results": dict(results),
            },
            training={
                "optimizer": optimizer,
                "scaler": self.scaler.state_dict(),
                "loss": (loss_sum, self._loss_count),
            },
        )
        self._own = self.ranks.decided(lambda: save_checkpoint(self.out_dir, checkpoint))
        return self._own

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.training
        try:
            load_full_state(self.model, self.optimizer, saved["optimizer"])
            loss_sum, self._loss_count = saved["loss"]
            self._loss_sum.fill_(loss_sum if self.ranks.first else 0.0)
            if self.scaler.is_enabled() and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.source} has an unusable state: {error}") from None
        self.step, self._own = checkpoint.step, checkpoint.folder


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make fused AdamW, with weight decay on matrices and embeddings alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [x for x in parameters if x.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (float(config.beta1), float(config.beta2))
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def _seed(*numbers: int) -> int:
    """Derive a seed from all numbers."""
    return random.Random(repr(numbers)).getrandbits(63)
