"""The `fastattn` command, one file a command."""

from .main import main as main
