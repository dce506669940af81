"""`fastattn verify`: the kernels held to the error budget on the device where they run."""

from .verdicts import Finding as Finding
from .verification import verify as verify

__all__ = ["Finding", "verify"]
