"""Reports of runs: JSON, tables and plots."""
