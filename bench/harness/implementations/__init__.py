"""The implementations of attention that are measured side by side."""
