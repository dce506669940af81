"""Operators of attention over selected key blocks."""
