"""Cases: calls of attention, their tensors, implementations, the check before timing."""
