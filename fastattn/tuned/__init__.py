"""Results of verification and tuning on this device: stored, read, shared among ranks."""

from .ranks import share

__all__ = ["share"]
