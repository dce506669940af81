"""Compile kernels for GPUs that are not there, and read what the compilers made."""
