"""Parts that launchers share: tiles, arguments, tables, launches that are cached."""

from .interpreter import mend

# Before any kernel is launched, whoever imports it.
mend()
