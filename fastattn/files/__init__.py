"""Files shared by processes: atomic replacement, and locks that a crash releases."""
