"""Files that several processes may write: atomic replacement, and locks that a crash ends."""
