"""Shared code of the benchmarks: cases, implementations, timing, figures, runs and reports."""
