"""`fastattn verify`: check every kernel's accuracy on this device."""

from .verdicts import Finding as Finding
from .verification import verify as verify

__all__ = ["Finding", "verify"]
