"""Timing: one loop for all, and the run that measures everything in processes of its own."""
