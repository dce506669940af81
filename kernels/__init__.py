"""Triton kernels and their launchers; `fastattn.ops` is what calls them."""
