"""Shared parts of launchers: tiles, arguments, tables, cached launches."""

from .interpreter import mend

# Before any launch, whichever module is imported first.
mend()
