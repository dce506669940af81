"""Findings about the kernels on this very device: stored, read, shared among ranks."""

from .ranks import share

__all__ = ["share"]
