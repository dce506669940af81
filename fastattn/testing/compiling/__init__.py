"""Cross-compile kernels for absent GPUs, and parse the compilers' output."""
