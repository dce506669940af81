"""Findings about the kernels on this device: stored, read, shared among ranks."""

from .ranks import share

__all__ = ["share"]
