"""Kernels of forward-mode AD."""
