"""Shared @triton.jit functions of the kernels, one for each rule."""
