"""Users' @triton.jit functions as Python: run on stand-ins for Triton's values, differentiated."""
