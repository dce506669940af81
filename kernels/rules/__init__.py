"""The rules, each stated once: functions of @triton.jit that kernels are made of."""
