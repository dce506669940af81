"""Placeholder while the first slice is being built."""
