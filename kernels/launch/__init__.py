"""Shared parts of launchers: tiles, arguments, tables, cached launches."""

from .interpreter import patch_interpreter

# Before any launch, whichever module is imported first.
patch_interpreter()
