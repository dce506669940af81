"""Degrees of data, parameter, context and tensor parallelism."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..tasks.kinds import Kind
    from ..train_config import TrainConfig

REST = "auto"
# Seconds that ranks wait for each other: enough for a first compilation or a slow disk.
TIMEOUT = 600.0
NAMES = ("dp", "fsdp", "cp", "tp")


class SplitError(ValueError):
    """The degrees do not fit the ranks or the model."""

    exit_status = 2  # of the command: wrong options


class Split(NamedTuple):
    """Sizes of the mesh dimensions, outermost first.

    dp: replicas of the parameters. fsdp: ranks that parameters, gradients and optimizer states are
    sharded over. Both share out the rows of a batch. cp: ranks that share the tokens of a row, by
    `fastattn.parallel`. tp: ranks that share heads and hidden features.
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self)

    @property
    def parts(self) -> int:
        """Number of parts of a batch's rows."""
        return self.dp * self.fsdp

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Number of parameter replicas, and of ranks that shard each.

        For parameters, ranks of cp are data ranks: as in torchtitan, they shard the parameters
        where fsdp does, and replicate them otherwise.
        """
        return (self.dp, self.fsdp * self.cp) if self.fsdp > 1 else (self.dp * self.cp, 1)

    def __str__(self) -> str:
        return " x ".join(f"{name} {n}" for name, n in zip(NAMES, self, strict=True) if n > 1)


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism as `fastattn train` takes them.

    Args:
        data_parallel: for `Split.dp`; "auto" = the remaining ranks, or 1 where those go to fsdp.
        fsdp: for `Split.fsdp`; "auto" = the remaining ranks.
        context_parallel, tensor_parallel: for `Split.cp` and `Split.tp`.
        timeout: seconds that a rank waits for another before it gives up.

    Raises:
        SplitError: a degree or the timeout is not positive.
    """

    data_parallel: int | str = REST
    fsdp: int | str = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise SplitError(f"timeout must be positive and finite, got {self.timeout}")
        for name, degree in self._degrees().items():
            may_rest = name in ("data_parallel", "fsdp")
            if degree == REST and may_rest:
                continue
            if not isinstance(degree, int) or degree < 1:
                wanted = f"at least 1{f' or {REST}' if may_rest else ''}"
                raise SplitError(f"{name} must be {wanted}, got {degree}")

    def _degrees(self) -> dict[str, int | str]:
        return {name: x for name, x in vars(self).items() if name != "timeout"}

    def split(self, ranks: int) -> Split:
        """The number of ranks along each kind of parallelism; or a SplitError."""
        dp, fsdp = self.data_parallel, self.fsdp
        if dp == REST and fsdp == REST:
            dp = 1
        fixed = [x for x in (dp, fsdp, self.context_parallel, self.tensor_parallel) if x != REST]
        rest = ranks // math.prod(map(int, fixed))
        split = Split(
            rest if dp == REST else int(dp),
            rest if fsdp == REST else int(fsdp),
            self.context_parallel,
            self.tensor_parallel,
        )
        if split.size != ranks:
            product = " x ".join(f"{name} {degree}" for name, degree in self._degrees().items())
            hint = "" if ranks > 1 else ": torchrun --nproc-per-node N -m fastattn train starts N"
            raise SplitError(
                f"the degrees must multiply to the {ranks} rank{'s' * (ranks > 1)} that there "
                f"{'are' if ranks > 1 else 'is'}, got {product}{hint}"
            )
        return split


def ranks_started() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process prints for the user (rank 0)."""
    return os.environ.get("RANK", "0") == "0" or ranks_started() == 1


def check_split(split: Split, training: TrainConfig, model: Any, kind: Kind) -> None:
    """Check that the split serves this run of a kind of model.

    Raises:
        SplitError: rows, tokens or heads are not divisible, or kind or options are not served.
    """
    if training.batch_size % split.parts:
        raise SplitError(
            f"batch_size must be divisible by the {split.parts} ranks of dp x fsdp, which share "
            f"its rows, got {training.batch_size}"
        )
    if split.size > 1 and training.dtype == "float16":
        raise SplitError("dtype must be 'float32' or 'bfloat16' on several ranks, got 'float16'")
    if split.cp > 1:
        if training.compile:
            # Traced by torch 2.13, `ContextParallel` calls itself without end.
            raise SplitError(f"compile must be False with context_parallel={split.cp}, got True")
        _check_context(split.cp, model, kind)


def _check_context(cp: int, model: Any, kind: Kind) -> None:
    if kind.name != "gpt":
        raise SplitError(
            f"context_parallel must be 1 for {kind.title}, whose rows are short or padded, got "
            f"{cp}: use data_parallel or fsdp"
        )
    if model.context_length % cp:
        raise SplitError(
            f"context_length must be divisible by context_parallel={cp}, got {model.context_length}"
        )
    for name, refused in (("relative_values", True), ("scoring", "additive")):
        if getattr(model, name) == refused:
            raise SplitError(f"context_parallel must be 1 with {name}={refused!r}, got {cp}")
