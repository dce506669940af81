"""Attention over selected key blocks in torch."""
