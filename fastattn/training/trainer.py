"""The training loop: AdamW, clipping, accumulation, AMP, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from . import metrics
from .checkpoint import Checkpoint, CheckpointError, latest_checkpoint
from .data.text import TextDataset
from .distributed.ranks import Ranks
from .storage import checkpoint_path, local
from .tasks.task import Batch, LanguageTask, Task
from .tokenizers.base import Tokenizer
from .train_config import TrainConfig
from .usage import Usage


class TrainingError(FloatingPointError):
    """Training stopped because a loss, a weight or an AdamW moment is NaN or infinite."""


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
        tokens_per_second: of this call's training steps, without evaluation, checkpoints and, if
            there are others, the first step, which compiles.
    """

    step: int
    finished: bool
    checkpoint: Path
    validation_loss: float | None
    tokens_per_second: float
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Trainer:
    """Trains a model on a task, and writes checkpoints and metrics to a folder.

    On a CPU, runs with the same seed, versions, machine and number of threads are bitwise equal,
    also if stopped and resumed. Seeds torch's global generator, for dropout; to repeat the weights
    too, seed before the model is built.

    Args:
        model: on the training device, equal on every rank. It has a `config` with `to_dict`, and
            returns (logits, loss) for the task's batches.
        data: a task, or a text for next-token prediction.
        tokenizer: of the data, saved in the checkpoints.
        config: training settings.
        out_dir: folder for checkpoints, metrics.jsonl and loss.png; of this run alone.
        data_config: description of the data, JSON values, saved in the checkpoints.
        kind: kind of the model, saved in the checkpoints; see `fastattn.training.tasks.kinds`.
        progress: the display.
        resume_from: a checkpoint of this run to resume from, or its folder.
        ranks: process group; each rank makes a trainer with equal arguments, which shards the model
            in place. Batches do not depend on the split.

    Raises:
        ValueError: config does not suit the device.
        CheckpointError: resume_from is of another configuration.
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
        if isinstance(data, TextDataset):
            data = LanguageTask(data, self.model_config.context_length)
        self.model, self.task, self.tokenizer, self.config = model, data, tokenizer, config
        self.out_dir = Path(out_dir)
        self.data_config, self.kind = dict(data_config or {}), kind
        self.progress = metrics.Progress() if progress is None else progress
        self.device = next(model.parameters()).device
        self.dtype = config.resolve_dtype(self.device)
        self.ranks = Ranks() if ranks is None else ranks
        parameters = sum(x.numel() for x in model.parameters())
        size = self.ranks.split.size
        self._usage = Usage(self.model_config, parameters, size, self.device, self.dtype)
        self._forward = self.ranks.prepare(model, config)
        self.optimizer = make_optimizer(model, config)
        scaled = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.step = 0
        self._own: Path | None = None  # the checkpoint of this state or an earlier one of this run
        self._batches = torch.Generator().manual_seed(config.seed)
        self._loss_sum = torch.zeros((), device=self.device)
        self._loss_count = 0
        self._speed = metrics.Speed()
        torch.manual_seed(config.seed)
        if resume_from is not None:
            source = Path(resume_from) if isinstance(resume_from, str) else resume_from
            self._restore(self.ranks.restore(source, model, self.optimizer))

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainResult:
        """Train to the last step, or until should_stop(), called before every step, is true.

        Then write a checkpoint and draw the loss curve. A second call goes on from there.

        Raises:
            TrainingError: a loss, a weight or a moment is infinite or NaN. Nothing of that state is
                written: the last checkpoint stays.
            CheckpointError: out_dir holds another run's checkpoint, or a later one than this state.
            CheckpointError, OSError: out_dir cannot be written, such as on a full disk.
        """
        config, first = self.config, self.step
        self.ranks.decided(self._check_folder)
        self._save()
        self.ranks.decided(lambda: metrics.truncate_metrics(self.out_dir, first))
        self.model.train()
        self._speed.start()
        while self.step < config.steps and not self.ranks.agree(should_stop()):
            self._train_step()
            last = self.step == config.steps
            if last or self.step % config.log_interval == 0:
                self._log()
            if not last and self.step % config.eval_interval == 0:
                with self._speed.paused():
                    self._record_validation(self.estimate_loss(), "estimate")
            if not last and self.step % config.checkpoint_interval == 0:
                with self._speed.paused():
                    self._save()
            if not last and self.step == first + 1:
                self._speed.start()
        speed = self._speed.mean()
        finished = self.step == config.steps
        loss = self.validation_loss() if finished else None
        scores = self.scores() if finished else {}
        if loss is not None and self.step > first:
            self._record_validation(loss, "whole split", scores)
        path = self._save(loss, scores)
        if self.ranks.first:  # last: without it nothing is lost
            records = metrics.read_metrics(self.out_dir)
            metrics.draw_loss_curve(records, self.out_dir / metrics.CURVE_FILE)
        self.ranks.wait()
        return TrainResult(self.step, finished, path, loss, speed, scores)

    def validation_loss(self) -> float:
        """Mean cross-entropy over the whole validation split, in nats per token."""
        return self._mean_loss(self.task.validation(self.config.batch_size))

    def estimate_loss(self) -> float:
        """Mean cross-entropy over eval_batches random batches of the validation split.

        Always the same batches, so that estimates are comparable; training's generators do not
        advance.
        """
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        return self._mean_loss(
            self.task.draw("validation", config.batch_size, generator)
            for _ in range(config.eval_batches)
        )

    def scores(self) -> dict[str, Any]:
        """The task's validation scores besides the loss."""
        with self._evaluating(), self._autocast():
            return self.task.scores(self.model, self.config.batch_size)

    def _train_step(self) -> None:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(self.step)
        for i in range(config.accumulation):
            batch = self.ranks.draw(self.task, config.batch_size, self._batches)
            self._speed.count(batch.num_tokens)
            last = i == config.accumulation - 1
            with self.ranks.part(batch, self.device) as part:
                with self._autocast():
                    loss = self.ranks.loss(self._forward, part)
                share = self.scaler.scale(loss / config.accumulation)
                self.ranks.backward(self.model, share, last=last)
            self._loss_sum += loss.detach()
            self._loss_count += 1
        if config.grad_clip > 0:
            self.scaler.unscale_(self.optimizer)
            self.ranks.clip(self.model, config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _mean_loss(self, batches: Iterable[Batch]) -> float:
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with self._evaluating(), self._autocast():
            for batch in batches:
                targets = batch.num_targets
                with self.ranks.part(batch, self.device) as part:
                    total += self.ranks.loss(self.model, part).double() * targets
                count += targets
        loss = float(self.ranks.total(total)) / count
        self._check_finite("validation loss", loss)
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with self.ranks.evaluating(self.model), torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def _autocast(self) -> torch.autocast:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if enabled else None, enabled=enabled)

    def _log(self) -> None:
        loss = float(self.ranks.total(self._loss_sum)) / self._loss_count
        self._check_finite("training loss", loss)
        figures = self._usage.figures(self._speed.lap())
        record = {
            "step": self.step,
            "loss": loss,
            "learning_rate": self.config.learning_rate_at(self.step - 1),
            **figures,
        }
        self._append(record)
        self.progress.advance(self.step, loss=loss, **figures)
        self._loss_sum.zero_()
        self._loss_count = 0

    def _record_validation(
        self, loss: float, how: str, scores: Mapping[str, Any] | None = None
    ) -> None:
        record = {"step": self.step, "validation_loss": loss}
        self._append({**record, "scores": scores} if scores else record)
        prefix = f"step {self.step}/{self.config.steps}"
        self.progress.note(f"{prefix}: validation loss {loss:.4f} ({how})")

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.ranks.first:
            metrics.append_metrics(self.out_dir, record)

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
            held = [local(x) for x in tensors if x.is_floating_point()]
            held = [x for x in held if x.numel()] or [torch.zeros((), device=self.device)]
            norm = nn.utils.get_total_norm(held, math.inf)
            self._check_finite(f"largest {name}", float(self.ranks.total(norm.double())))

    def _check_folder(self) -> None:
        """Refuse a folder whose newest checkpoint is not the one that this run goes on from."""
        newest = latest_checkpoint(self.out_dir)
        if newest is not None and not self._is_own(newest):
            raise CheckpointError(
                f"{self.out_dir} holds a trained model already ({newest.name}), and this run at "
                f"step {self.step} does not go on from it: pass resume_from={str(newest)!r}, or "
                "choose another out_dir"
            )

    def _is_own(self, path: Path) -> bool:
        return self._own is not None and self._own.resolve() == path.resolve()

    def _save(
        self, validation_loss: float | None = None, scores: Mapping[str, Any] | None = None
    ) -> Path:
        final = checkpoint_path(self.out_dir, self.step)
        if self._is_own(final):
            return final
        loss_sum = self.ranks.total(self._loss_sum)
        self._check_finite("training loss", float(loss_sum))
        self._check_state()
        training = self.ranks.optimizer_tensors(self.model, self.optimizer)
        training["random.batches"] = self._batches.get_state()
        training["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            training["random.cuda"] = torch.cuda.get_rng_state(self.device)
        training["loss_sum"] = loss_sum
        checkpoint = Checkpoint(
            step=self.step,
            model=self.ranks.model_tensors(self.model),
            training=training,
            tokenizer=self.tokenizer,
            config={
                "kind": self.kind,
                "model": self.model_config.to_dict(),
                "training": self.config.to_dict(),
                "data": {**self.data_config, "fingerprint": self.task.fingerprint},
            },
            state={
                "finished": self.step == self.config.steps,
                "validation_loss": validation_loss,
                "loss_count": self._loss_count,
                "scaler": self.scaler.state_dict(),
                **({"scores": scores} if scores else {}),
            },
        )
        background = self.config.save_in_background
        self._own = self.ranks.save(self.out_dir, checkpoint, background=background)
        return self._own

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved, state = checkpoint.training, checkpoint.state
        try:
            self._batches.set_state(saved["random.batches"])
            torch.set_rng_state(saved["random.cpu"])
            if self.device.type == "cuda" and "random.cuda" in saved:
                torch.cuda.set_rng_state(saved["random.cuda"], self.device)
            self._loss_sum.copy_(self.ranks.share(saved["loss_sum"]))
            self._loss_count = state["loss_count"]
            if self.scaler.is_enabled() and state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
        except KeyError as error:
            raise CheckpointError(f"{checkpoint.source} has no entry {error}") from None
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.source} has an unusable state: {error}") from None
        self.step, self._own = checkpoint.step, checkpoint.folder


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW, with weight decay on matrices and embeddings alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for kind, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        for group in _by_mesh(kind).values()
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> Mapping[Any, list[nn.Parameter]]:
    """Parameters by the mesh of their shards; None = not sharded.

    A torch operation on several DTensors needs them on one mesh.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    return by_mesh
