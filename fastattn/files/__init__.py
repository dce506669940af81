"""Files of several writers: atomic replacement, and locks that a crash releases."""
