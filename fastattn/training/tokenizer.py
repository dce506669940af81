"""The names of `fastattn.training.tokenizers` under its singular."""

from .tokenizers import *  # noqa: F403
from .tokenizers import __all__ as __all__
