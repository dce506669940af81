"""Attention over the key blocks that lists name: block-sparse attention."""
