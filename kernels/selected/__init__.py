"""Attention over lists of key blocks (block-sparse attention)."""
