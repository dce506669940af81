"""The kernels as torch operators, and the eager path around the dispatcher."""
