"""Training: tokenizers, data, tasks, training loop, checkpoints, attention maps."""

from typing import NoReturn

from ..missing import raise_missing


def __getattr__(name: str) -> NoReturn:
    raise_missing(__name__, name)
