"""The implementations of attention that benchmarks compare."""
