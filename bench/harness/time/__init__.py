"""Timing: the loop of all benchmarks, and the full run in processes of its own."""
