"""What the benchmarks share: shapes, implementations, timing, figures and reports."""
